"""`python -m jobs.train`: trains the recipe with TRL's AsyncGRPOTrainer, or runs its script, which does.

The trainer's supervisor starts it.

Reads ASYNCGRPO_SPEC_FILE (else the spec in the bucket), ASYNCGRPO_MODEL_DIR (the base model), ASYNCGRPO_SERVER_URL
(what TRL takes for its vLLM server), ASYNCGRPO_RESUME (a checkpoint to go on from; optional) and ASYNCGRPO_PARENT (the
pid it must not outlive; optional). With several GPUs it is one process for each (jobs.ranks). Writes to
ASYNCGRPO_OUTPUT_DIR: `metrics.jsonl` (see jobs.journal), checkpoints in `checkpoint-<step>/`, and at the end the
adapter in PEFT's format in `final/`.

Exit status: 0 trained to the end; 2 a setting cannot work; 1 training failed; 143 ended by SIGTERM, with the state
after the last optimizer step saved as a checkpoint.
"""

import atexit
import dataclasses
import difflib
import gc
import inspect
import logging
import multiprocessing.util
import os
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jobs import (
    as_main,
    bundle,
    journal,
    modules,
    packages,
    probe,
    processes,
    prompt_lengths,
    resume,
    rewards,
    rollout_patches,
    scoring,
    trl_patches,
    versions,
)
from jobs.bucket import SHOWN_S, Bucket
from jobs.errors import ConfigError, RunFailed
from jobs.hooks import Hooks, Train
from jobs.ranks import Ranks
from jobs.recipe import DatasetSource, Recipe
from jobs.spec import RunSpec
from jobs.stop import TERMINATED, InterruptibleQueue, Stop, Terminated

if TYPE_CHECKING:
    import datasets

CPU_NICENESS = 5
"""Without GPUs replicas may share this machine's cores, and everybody waits for a replica that starts: with 0 one that
was replaced in the middle of a run needed over 27 s beside the trainer (measured on two cores)."""
SERVER_TIMEOUT_S = 3600.0
"""How long to wait for the first replica. The supervisor and the Job's own limit end a run that waits in vain."""
OWN_FIELDS = ("output_dir", "vllm_server_base_url", "use_cpu", "dtype")
"""Fields of AsyncGRPOConfig that follow from the rest of the recipe or from the machine."""
TAKEN_COLUMNS = ("completions", "prompts", "self")
"""Names that no column of the data set can have, for a reward would get two arguments of that name: TRL (1.14 to 1.16)
passes its own `completions` and `prompts` beside the columns. Left out are `prompt`, `completion`, `completion_ids`."""

TOLD = ("reward", "ratio", "sample/staleness_mean", "perf/step_s", "perf/weight_sync_s")
"""Metrics that the Job's log has of each step; the journal has all."""

log = logging.getLogger("jobs.train")


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Trains; see the module's text. Returns the exit status."""
    bundle.activate()
    parent = environ.get("ASYNCGRPO_PARENT")
    processes.die_with_parent(int(parent) if parent else None)
    stop = Stop()
    try:
        spec = _read_spec(environ)
        _prepare_environment(spec)
        ranks = Ranks.join(environ, spec.recipe.jobs.parallel)
        modules.install(spec.recipe.sources, Path(environ[journal.OUTPUT_DIR]).absolute().with_name("modules"))
        script, as_script = spec.recipe.script, None
        if script is not None:
            file = Path(environ[journal.OUTPUT_DIR]).absolute().with_name("script") / script.name
            as_script = as_main.become(file, script.text, script.args)
        on_cpu = _import_everything(stop, ranks)
        if ranks.first:
            log.info("trl %s, %s", packages.installed("trl"), "on the CPU" if on_cpu else "on a GPU")
            journal.phase("imported")
        if as_script is not None:
            _run_script(as_script, spec.recipe, environ, stop, on_cpu, ranks)
        else:
            trainer = build(spec.recipe, environ, stop, on_cpu, ranks)
            train_to_the_end(trainer, lambda resume: trainer.train(resume_from_checkpoint=resume), environ, ranks)
    except Terminated:
        return TERMINATED if ranks.first else 0
    except (ConfigError, RunFailed) as error:
        sys.stderr.write(f"error: {error}\n")
        return ConfigError.exit_status if isinstance(error, ConfigError) else 1
    return 0


def build(recipe: Recipe, environ: Mapping[str, str], stop: Stop, on_cpu: bool, ranks: Ranks) -> Any:
    """Returns the AsyncGRPOTrainer of the recipe; waits for the server at ASYNCGRPO_SERVER_URL to be healthy.

    Raises:
        ConfigError: a field that AsyncGRPOConfig does not have, a dataset or reward that cannot be had, or an adapter
            that cannot be served.
    """
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    assert recipe.reward is not None and recipe.lora is not None
    scores = scoring.from_settings(recipe.reward)
    if ranks.first:
        scores.check_servers()
    trainer = AsyncGRPOTrainer(
        model=environ["ASYNCGRPO_MODEL_DIR"],
        reward_funcs=scores.columns,
        args=_config(recipe, environ, on_cpu, ranks),
        train_dataset=_dataset(recipe),
        peft_config=recipe.lora.peft(),
    )
    attach(trainer, recipe, stop, ranks)
    return trainer


def attach(trainer: Any, recipe: Recipe, stop: Stop, ranks: Ranks) -> None:
    """Gives a new trainer the journal, and what makes it end when it is asked to.

    Raises:
        ConfigError: a prompt does not fit into the model's context.
    """
    from transformers import PrinterCallback

    if ranks.first:
        prompt_lengths.check(trainer, recipe.replica.vllm.get("max_model_len"))
    trainer.remove_callback(PrinterCallback)  # prints fifty numbers a step; the journal has them
    trainer.add_callback(_journal_callback(stop, ranks))
    rollout_patches.bound_rollouts_ahead(trainer)
    if ranks.first:
        trainer.rollout_queue = InterruptibleQueue(trainer.rollout_queue, stop)
        journal.phase("built")


def _run_script(
    as_script: types.ModuleType,
    recipe: Recipe,
    environ: Mapping[str, str],
    stop: Stop,
    on_cpu: bool,
    ranks: Ranks,
) -> None:
    """Runs the recipe's script to its end.

    Raises:
        Terminated: SIGTERM ended its training.
        ConfigError: a setting cannot work, or the script did not train.
    """
    left = dict(environ)

    def train(trainer: Any, trl_train: Train) -> Any:
        result = train_to_the_end(trainer, trl_train, left, ranks)
        left.pop("ASYNCGRPO_RESUME", None)  # a script that trains twice goes on from a checkpoint once
        stop.training = False  # what the script does after it is not waited for
        return result

    def attach_checked(trainer: Any) -> None:
        if trainer.train_dataset is not None:
            check_rows(trainer.train_dataset, "trainer.script: train_dataset")
        attach(trainer, recipe, stop, ranks)

    check_fields(recipe)
    settings = {
        "disable_tqdm": True,
        "vllm_server_timeout": SERVER_TIMEOUT_S,
        "ddp_timeout": int(SERVER_TIMEOUT_S),
        **recipe.trainer,
        **own_fields(recipe, environ, on_cpu),
    }
    hooks = Hooks(
        recipe,
        settings,
        environ["ASYNCGRPO_MODEL_DIR"],
        attach_checked,
        train,
        tell=ranks.first,
    )
    hooks.install()
    as_main.run(as_script)
    if stop.asked:  # and the script caught it
        raise Terminated
    if not hooks.trained:
        raise ConfigError("trainer.script ended without training: it never called train() of an AsyncGRPOTrainer.")


def _read_spec(environ: Mapping[str, str]) -> RunSpec:
    if file := environ.get("ASYNCGRPO_SPEC_FILE"):
        return RunSpec.from_json(Path(file).read_bytes())
    return RunSpec.read(Bucket.from_env(environ), environ["ASYNCGRPO_RUN"], SHOWN_S)


def _prepare_environment(spec: RunSpec) -> None:
    """What libraries read from the environment when they are imported."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive the fork of the rollout process
    if not probe.gpus(os.environ):
        os.nice(CPU_NICENESS)
    if spec.model.kind != "hub" and spec.recipe.dataset and ":" in spec.recipe.dataset.load:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is here: nothing to ask the Hub for


def _import_everything(stop: Stop, ranks: Ranks) -> bool:
    """Imports torch, TRL and PEFT, patched; returns whether to train on the CPU.

    Meanwhile the garbage collector rests, for it would find nothing among modules; that saves 0.8 s of 5 (measured).
    """
    versions.check_trl(packages.installed("trl"))  # before the seconds that the imports take
    gc.disable()
    try:
        import torch

        on_cpu = not torch.cuda.is_available()
        if on_cpu:
            torch.set_num_threads(1)  # the replicas have the other cores; forking also wants no OpenMP threads
        trl_patches.apply(on_cpu, lambda: stop.asked)
        resume.apply(on_cpu)
        if ranks.processes > 1:
            rollout_patches.end_together(Terminated)
        import peft  # noqa: F401
    finally:
        gc.enable()
        gc.freeze()
    return on_cpu


def check_fields(recipe: Recipe) -> None:
    """Raises ConfigError for a field of `trainer` that AsyncGRPOConfig has not, or that is not the recipe's to set."""
    from trl.experimental.async_grpo import AsyncGRPOConfig

    known = [field.name for field in dataclasses.fields(AsyncGRPOConfig)]
    for name, value in recipe.trainer.items():
        if name in OWN_FIELDS:
            raise ConfigError(f"trainer.{name} = {value!r}: set by asyncgrpo itself; remove it from the recipe.")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"trainer.{name}: TRL's AsyncGRPOConfig has no such field.{hint}")


def own_fields(recipe: Recipe, environ: Mapping[str, str], on_cpu: bool) -> dict[str, Any]:
    """The fields of AsyncGRPOConfig that follow from the machine and from the rest of the recipe."""
    return {
        "output_dir": environ[journal.OUTPUT_DIR],
        "vllm_server_base_url": environ["ASYNCGRPO_SERVER_URL"],
        "dtype": recipe.model.dtype,
        **({"use_cpu": True, "bf16": False, "fp16": False} if on_cpu else {}),
    }


def _config(recipe: Recipe, environ: Mapping[str, str], on_cpu: bool, ranks: Ranks) -> Any:
    from trl.experimental.async_grpo import AsyncGRPOConfig

    check_fields(recipe)
    fields: dict[str, Any] = {
        "report_to": "none",
        "disable_tqdm": True,
        "vllm_server_timeout": SERVER_TIMEOUT_S,
        "save_total_limit": 3,
        **recipe.trainer,
        **own_fields(recipe, environ, on_cpu),
    }
    if ranks.processes > 1:
        fields.setdefault("ddp_timeout", int(SERVER_TIMEOUT_S))  # the others wait as long as the first one does
    try:
        return AsyncGRPOConfig(**fields)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"trainer: TRL refuses these settings: {error}") from error


def _dataset(recipe: Recipe) -> "datasets.Dataset | datasets.IterableDataset":
    import datasets

    source = recipe.dataset
    assert source is not None
    where = f"dataset.load = {source.load!r}"
    if ":" in source.load:
        found = _returned(rewards.resolve(source.load, "dataset.load"), where, source.split)
    else:
        where += f", split {source.split!r}"
        try:
            found = datasets.load_dataset(source.load, split=source.split)
        except Exception as error:
            raise ConfigError(f"{where}: {error}") from error
    first = check_rows(found, where)
    if "prompt" not in first:
        raise ConfigError(f"{where}: no column `prompt`, only {', '.join(first)}.")
    prompt_lengths.check_conversation(first["prompt"], 0)
    return found


def _returned(function: Callable[..., Any], where: str, split: str) -> "datasets.Dataset | datasets.IterableDataset":
    """What a data set's function returns; it gets `split` if it takes that. A list of rows becomes a data set.

    Raises:
        ConfigError: the function raises, or returns something else.
    """
    import datasets

    parameters = inspect.signature(function).parameters
    if "split" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        named = {"split": split}
    elif split == DatasetSource.split:
        named = {}
    else:
        raise ConfigError(
            f"dataset.split = {split!r}: the function of {where} takes no `split`. Remove one of the two."
        )
    try:
        found = function(**named)
    except ConfigError:
        raise
    except Exception as error:
        own = error.__traceback__.tb_next if error.__traceback__ else None
        log.error("%s failed", where, exc_info=(type(error), error, own))
        raise ConfigError(f"{where}: {_in_one_line(error)}") from error
    if isinstance(found, datasets.Dataset | datasets.IterableDataset):
        return found
    told = f"a {type(found).__name__}"
    if isinstance(found, list):
        if all(isinstance(row, dict) for row in found):
            try:
                return datasets.Dataset.from_list(found)
            except Exception as error:
                raise ConfigError(f"{where}: its rows make no data set: {_in_one_line(error)}") from error
        told = "a list with a " + next(type(row).__name__ for row in found if not isinstance(row, dict))
    raise ConfigError(
        f"{where}: returned {told}. Return a datasets.Dataset, a datasets.IterableDataset or a list of dicts."
    )


def check_rows(dataset: Any, where: str) -> dict[str, Any]:
    """Returns the first row of a data set.

    Raises:
        ConfigError: there is none, it cannot be read, or a column has a name that TRL cannot pass on to the rewards.
    """
    try:
        first: dict[str, Any] | None = next(iter(dataset), None)
    except Exception as error:
        log.exception("%s: the first row", where)
        raise ConfigError(f"{where}: its first row cannot be read: {_in_one_line(error)}") from error
    if first is None:
        raise ConfigError(f"{where}: no rows.")
    if taken := [name for name in first if name in TAKEN_COLUMNS]:
        raise ConfigError(
            f"{where}: column `{taken[0]}`: rewards get each column under its name, and this one has another meaning "
            "there. Rename it where the data set is loaded: rename_column does."
        )
    return first


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _journal_callback(stop: Stop, ranks: Ranks) -> Any:
    """The callback that writes the journal and ends training between two steps when asked to."""
    from transformers import TrainerCallback

    class Journal(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if ranks.first:
                journal.phase("started")
                journal.append({"event": "planned", "max_steps": state.max_steps})
            stop.training = True

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "loss" in logs and state.is_world_process_zero:
                journal.append({"step": state.global_step, **logs})
                told = "  ".join(f"{name} {logs[name]:.4g}" for name in TOLD if logs.get(name) is not None)
                log.info("step %d of %d  %s", state.global_step, state.max_steps, told)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ranks.agree(True)  # each process writes files of its own: now all have
            if state.is_world_process_zero:
                path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
                journal.append({"event": "saved", "step": state.global_step, "path": str(path)})

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.leave_if_asked()

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            self.leave_if_asked()  # rollouts have no end but this one

        def leave_if_asked(self) -> None:
            if ranks.agree(stop.asked):
                raise Terminated

    return Journal()


def train_to_the_end(trainer: Any, train: Train, environ: Mapping[str, str], ranks: Ranks) -> Any:
    """Trains, from the checkpoint that the environment names if there is one, and saves the adapter in `final/`.

    `train` is TRL's own way to train; returns what it returns.

    Raises:
        Terminated: SIGTERM came first; the state after the last optimizer step is saved as a checkpoint.
    """
    try:
        result = train(environ.get("ASYNCGRPO_RESUME") or None)
    except Terminated:
        if trainer.state.global_step > 0:
            trainer._save_checkpoint(trainer.model, trial=None)
            trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        raise
    trainer.save_model(str(Path(environ[journal.OUTPUT_DIR]) / "final"))
    return result


def _run_and_leave() -> NoReturn:
    """Trains, then ends the process without the interpreter's clean-up.

    That takes a second, and native libraries fill the end of the log, where the reason of a failure should stand, with
    complaints about leaks. What multiprocessing has to do at the end is done: semaphores are freed, children end.
    """
    own = sys.modules["__main__"]
    try:
        status = main()
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    if sys.modules["__main__"] is own:
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    else:
        atexit._run_exitfuncs()  # a script may have handlers of its own: what reports its metrics does
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for chatty in ("trl", "httpx"):  # each phase of each sync, each request
        logging.getLogger(chatty).setLevel(logging.WARNING)
    _run_and_leave()
