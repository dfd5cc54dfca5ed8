"""The training child with the real TRL, against the simulated engine."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from safetensors.numpy import load_file

from jobs import rollout_patches, tiny, trl_patches
from jobs.bundle import app_dir
from jobs.errors import ConfigError, RunFailed
from jobs.ranks import Ranks
from jobs.recipe import load
from jobs.spec import ModelRef, RunSpec
from jobs.stop import TERMINATED
from tests.engines import Engine, running, sim_command

WAIT_S = 90.0
"""For what takes some 8 s on an idle machine, most of it the imports of TRL."""


@pytest.fixture
def engine(tmp_path: Path, free_port: int) -> Iterator[Engine]:
    model = str(tiny.build("digit"))
    environ = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with running(sim_command(free_port, model=model), environ, free_port, tmp_path / "engine.log") as engine:
        yield engine


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCGRPO_CACHE", str(tmp_path_factory.mktemp("cache")))


class Training:
    """A training child at work."""

    def __init__(
        self,
        folder: Path,
        url: str,
        *overrides: str,
        recipe: str = "digit",
        resume: Path | None = None,
        gpus: str = "",
    ) -> None:
        folder.mkdir(exist_ok=True)
        model = str(tiny.build("digit"))
        spec = RunSpec(
            "test", load(recipe, overrides=['model.dtype="float32"', *overrides]), ModelRef("path", model, model)
        )
        (folder / "spec.json").write_bytes(spec.to_json())
        self.output, self.log = folder / "output", folder / "log"
        self.output.mkdir()
        environ = {
            **os.environ,
            "PYTHONPATH": str(app_dir()),
            "ASYNCGRPO_SPEC_FILE": str(folder / "spec.json"),
            "ASYNCGRPO_MODEL_DIR": model,
            "ASYNCGRPO_SERVER_URL": url,
            "ASYNCGRPO_OUTPUT_DIR": str(self.output),
            "ASYNCGRPO_PARENT": str(os.getpid()),
            "ASYNCGRPO_RESUME": str(resume or ""),
            "CUDA_VISIBLE_DEVICES": gpus,
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "jobs.train"], env=environ, stdout=log, stderr=log)

    def rows(self) -> list[dict[str, Any]]:
        file = self.output / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def steps(self) -> list[dict[str, Any]]:
        return [row for row in self.rows() if "step" in row and "event" not in row]

    def wait_for(self, happened: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if found := happened():
                return found
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            time.sleep(0.05)
        raise AssertionError(self.log.read_text()[-4000:])

    def children(self) -> list[int]:
        ids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in ids if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture
def train(tmp_path: Path, engine: Engine) -> Iterator[Callable[..., Training]]:
    started: list[Training] = []

    def start(*overrides: str, **more: Any) -> Training:
        started.append(Training(tmp_path / f"training-{len(started)}", engine.url, *overrides, **more))
        return started[-1]

    yield start
    for training in started:
        training.process.kill()
        training.process.wait()


def test_a_preempted_run_goes_on_where_it_was(train: Callable[..., Training], engine: Engine) -> None:
    first = train("trainer.max_steps=100000")
    first.wait_for(lambda: len(first.steps()) >= 3)
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(WAIT_S) == TERMINATED == 143
    done = first.steps()[-1]["step"]
    (saved,) = [row for row in first.rows() if row.get("event") == "saved"]
    checkpoint = Path(saved["path"])
    assert checkpoint.name == f"checkpoint-{saved['step']}" and saved["step"] >= done
    files = {"adapter_model.safetensors", "optimizer.pt", "trainer_state.json", "rollout_state.json"}
    assert files <= {path.name for path in checkpoint.iterdir()}
    version = json.loads((checkpoint / "rollout_state.json").read_text())["model_version"]
    assert version >= 3
    assert [row["name"] for row in first.rows() if row.get("event") == "phase"] == ["imported", "built", "started"]
    row = first.steps()[1]
    assert {"reward", "ratio", "loss", "perf/step_s", "sample/staleness_mean", "time"} <= row.keys()
    assert first.log.read_text().count("step 2 of ") == 1

    second = train(f"trainer.max_steps={saved['step'] + 2}", resume=checkpoint)
    assert second.process.wait(WAIT_S) == 0, second.log.read_text()[-4000:]
    assert [row["step"] for row in second.steps()] == [saved["step"] + 1, saved["step"] + 2]
    assert json.loads((second.output / "final" / "adapter_config.json").read_text())["r"] == 8
    assert (second.output / "final" / "adapter_model.safetensors").stat().st_size > 10_000
    assert not list(second.output.glob(".vllm_lora/*/README.md"))
    loads = [event["model"] for event in engine.get("/sim/log").json()["events"] if event["event"] == "load"]
    assert loads[-1] == f"trl-policy-v{version + 3}"  # the count goes on: one at the start, one a step

    third = train(f"trainer.max_steps={saved['step']}", resume=checkpoint)  # killed after its last step
    assert third.process.wait(WAIT_S) == 0, third.log.read_text()[-4000:]
    assert third.steps() == []
    weights = "adapter_model.safetensors"
    assert load_file(third.output / "final" / weights).keys() == load_file(checkpoint / weights).keys()
    for name, tensor in load_file(checkpoint / weights).items():
        assert (load_file(third.output / "final" / weights)[name] == tensor).all()


def test_several_processes_train_to_the_end(train: Callable[..., Training]) -> None:
    first = train("trainer.max_steps=2", gpus="0,1")
    assert first.process.wait(WAIT_S) == 0, first.log.read_text()[-4000:]
    assert (first.output / "final" / "adapter_model.safetensors").exists()
    assert first.log.read_text().count("step 2 of 2") == 1


def test_several_processes_train_and_stop_as_one(train: Callable[..., Training]) -> None:
    """Two GPUs that are not there: both processes train on the CPU, without shards but with all the rest."""
    first = train("trainer.max_steps=100000", "trainer.per_device_train_batch_size=16", gpus="0,1")
    first.wait_for(lambda: len(first.steps()) >= 3)
    assert first.steps()[0]["batch/samples_per_step"] == 32
    assert [row["name"] for row in first.rows() if row.get("event") == "phase"] == ["imported", "built", "started"]
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(WAIT_S) == TERMINATED, first.log.read_text()[-4000:]
    (saved,) = [row for row in first.rows() if row.get("event") == "saved"]
    assert saved["step"] >= first.steps()[-1]["step"]


def test_several_processes_that_wait_for_rollouts_save_and_leave(
    train: Callable[..., Training], engine: Engine
) -> None:
    settings = ("trainer.per_device_train_batch_size=16", "trainer.weight_sync_steps=100000")
    first = train("trainer.max_steps=100000", *settings, gpus="0,1")
    first.wait_for(lambda: len(first.steps()) >= 2)
    engine.process.send_signal(signal.SIGSTOP)
    done = [0, 1]
    while done[-1] != done[-2]:  # what was under way when the engine was stopped
        time.sleep(2.0)
        done.append(len(first.steps()))
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(WAIT_S) == TERMINATED, first.log.read_text()[-4000:]
    engine.process.send_signal(signal.SIGCONT)
    (saved,) = [row for row in first.rows() if row.get("event") == "saved"]
    assert saved["step"] in (done[-1], done[-1] + 1), "a batch that was ready is not thrown away"


def test_a_process_that_ends_takes_the_others_with_it(train: Callable[..., Training]) -> None:
    first = train("trainer.max_steps=100000", gpus="0,1")
    first.wait_for(lambda: len(first.steps()) >= 1)
    ranks = [pid for pid in first.children() if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    assert len(ranks) == 1
    os.kill(ranks[0], signal.SIGKILL)
    assert first.process.wait(WAIT_S) == 1
    assert "process 1 of the trainer ended with status -9" in first.log.read_text()


def test_rollouts_end_with_a_killed_trainer(train: Callable[..., Training]) -> None:
    training = train("trainer.max_steps=100000", "reward.functions=['tests.test_train:broken']")
    errors = training.wait_for(lambda: [row for row in training.rows() if row.get("event") == "reward_error"])
    assert errors[0]["error"] == "RuntimeError: this reward is broken"
    (rollouts,) = training.wait_for(training.children)
    training.process.kill()
    training.process.wait()
    deadline = time.monotonic() + WAIT_S
    while Path(f"/proc/{rollouts}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{rollouts}").exists()


def broken(completions: list[Any], **_: Any) -> list[float | None]:
    raise RuntimeError("this reward is broken")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """TRL's rollout worker with `tell_own_errors`, whose process has failed."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with trl_patches.without_vllm():
        from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
    monkeypatch.setattr(AsyncRolloutWorker, "check_health", AsyncRolloutWorker.check_health)
    rollout_patches.tell_own_errors()
    worker = AsyncRolloutWorker.__new__(AsyncRolloutWorker)
    worker._exception_info_queue, worker._failed_event = queue.Queue(1), threading.Event()
    worker._heartbeat_value, worker._process = SimpleNamespace(value=time.time()), None
    worker._failed_event.set()
    yield worker


TRACE = 'Traceback (most recent call last):\n  File "x"\nValueError: not this\n'


@pytest.mark.parametrize(
    ("told", "kind", "words"),
    [
        (("KeyError", "'prompt'", TRACE), RunFailed, "the rollout process failed: KeyError: 'prompt'"),
        (("OSError", "one\n  two", TRACE), RunFailed, "the rollout process failed: OSError: one two"),
        (("StopIteration", "", TRACE), RunFailed, "the rollout process failed: StopIteration"),
        (("ConfigError", "reward x: no column `a`.", TRACE), ConfigError, "reward x: no column `a`."),
        (("RunFailed", "reward x: failed", TRACE), RunFailed, "reward x: failed"),
    ],
)
def test_a_rollout_process_that_failed_is_told_in_its_own_words(
    worker: Any, told: tuple[str, str, str], kind: type[Exception], words: str
) -> None:
    worker._exception_info_queue.put(told)
    with pytest.raises(kind) as caught:
        worker.check_health(300.0)
    assert str(caught.value) == words and caught.value.__cause__ is None

    threading.Timer(0.1, worker._exception_info_queue.put, [told]).start()  # later than the event that it failed
    with pytest.raises(kind) as caught:
        worker.check_health(300.0)
    assert str(caught.value) == words


def test_a_rollout_process_that_failed_without_words_or_is_silent_is_told(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_patches, "TOLD_WITHIN_S", 0.01)
    with pytest.raises(RunFailed, match="the rollout process failed: its own words are in the log of the trainer"):
        worker.check_health(300.0)
    worker._failed_event.clear()
    worker._heartbeat_value.value = 0.0
    with pytest.raises(RuntimeError, match="heartbeat stale"):
        worker.check_health(300.0)


def test_what_the_rollout_process_died_of_is_the_last_line(train: Callable[..., Training]) -> None:
    """Its rows end it after some groups: the data set fails when it is read, which no check before has seen."""
    training = train("trainer.max_steps=100000", f"dataset.load='{__name__}:spoilt'")
    assert training.process.wait(WAIT_S) == 1
    last = training.log.read_text().splitlines()[-1]
    assert last == "error: the rollout process failed: OSError: row 2 is gone"


def spoilt() -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(_spoilt_rows)


def _spoilt_rows() -> Iterator[dict[str, Any]]:
    yield from [{"prompt": ASKED}] * 2
    raise OSError("row 2 is gone")


ASKED = [{"role": "user", "content": "1 + 1?"}]


def no_arguments() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"prompt": [ASKED]})


def with_split(split: str) -> list[dict[str, Any]]:
    return [{"prompt": ASKED, "answer": split}]


def any_arguments(**named: Any) -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(with_split, gen_kwargs=named)


def raises(split: str) -> datasets.Dataset:
    raise ValueError(f"no {split}\nhere")


def asks_for_more(size: int) -> datasets.Dataset:
    return no_arguments()


def several() -> datasets.DatasetDict:
    return datasets.DatasetDict({"train": no_arguments()})


def texts() -> list[str]:
    return ["1 + 1?"]


def mixed() -> list[dict[str, Any]]:
    return [{"prompt": ASKED, "answer": 1}, {"prompt": ASKED, "answer": [2]}]


def empty() -> list[dict[str, Any]]:
    return []


def empty_stream() -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(empty)


def broken_stream() -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(raises, gen_kwargs={"split": "train"})


def own_completions() -> datasets.Dataset:
    return no_arguments().add_column("completions", ["2"])


def own_self() -> datasets.Dataset:
    return no_arguments().add_column("self", ["2"])


def plain_text() -> list[dict[str, Any]]:
    return [{"prompt": "1 + 1?"}]


def question() -> list[dict[str, Any]]:
    return [{"question": "1 + 1?", "answer": "2"}]


def dataset_of(function: str, *overrides: str) -> Any:
    from jobs.train import _dataset

    return _dataset(load("digit", overrides=[f"dataset.load='{__name__}:{function}'", *overrides]))


def test_a_function_of_a_data_set_takes_split_or_not_and_may_return_a_list() -> None:
    assert dataset_of("no_arguments")["prompt"][0] == ASKED
    assert dataset_of("with_split", "dataset.split='test'")["answer"][0] == "test"
    assert [row["answer"] for row in dataset_of("any_arguments")] == ["train"]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", "ValueError: no train here"),
        ("asks_for_more", "TypeError: asks_for_more() missing 1 required positional argument: 'size'"),
        (
            "several",
            "returned a DatasetDict. Return a datasets.Dataset, a datasets.IterableDataset or a list of dicts.",
        ),
        ("texts", "returned a list with a str. Return a datasets.Dataset,"),
        ("mixed", "its rows make no data set: Arrow"),
        ("empty", "no rows."),
        ("empty_stream", "no rows."),
        ("broken_stream", "its first row cannot be read: "),
        ("own_completions", "column `completions`: rewards get each column under its name"),
        ("own_self", "column `self`: "),
        ("question", "no column `prompt`, only question, answer."),
    ],
)
def test_a_data_set_that_cannot_be_trained_on_is_named(function: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataset_of(function)
    assert str(caught.value).startswith(f"dataset.load = '{__name__}:{function}': {words}")
    assert "\n" not in str(caught.value)


def test_the_data_set_of_a_script_is_looked_at_too(train: Callable[..., Training], tmp_path: Path) -> None:
    scripts = Path(__file__).with_name("scripts")
    text = (scripts / "sevens.py").read_text()
    (tmp_path / "taken.py").write_text(
        text.replace("from_dict({", 'from_dict({"prompts": questions, ').replace(
            "remove_columns=dataset.column_names", 'remove_columns=["question"]'
        )
    )
    training = train(f"trainer.script={tmp_path}/taken.py", recipe=str(scripts / "sevens.toml"))
    assert training.process.wait(WAIT_S) == 2
    last = training.log.read_text().splitlines()[-1]
    assert last.startswith("error: trainer.script: train_dataset: column `prompts`: rewards get each column")


def test_a_prompt_that_is_text_is_refused_before_the_server_is_waited_for() -> None:
    with pytest.raises(ConfigError, match=r"the prompt of row 0 is '1 \+ 1\?', not a conversation"):
        dataset_of("plain_text")


def test_a_split_that_a_function_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dataset.split = 'test': the function of .*:no_arguments' takes no `split`"):
        dataset_of("no_arguments", "dataset.split='test'")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.max_stalenes=4", "AsyncGRPOConfig has no such field. Did you mean max_staleness?"),
        ("trainer.output_dir='x'", "trainer.output_dir = 'x': set by asyncgrpo itself"),
        ("dataset.load='jobs.tiny:none'", "dataset.load = 'jobs.tiny:none': jobs.tiny has no none"),
        ("reward.functions=['nothing:f']", "module nothing cannot be imported"),
    ],
)
def test_a_setting_that_cannot_work_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, words: str
) -> None:
    from jobs import train as module

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with trl_patches.without_vllm():
        import trl.experimental.async_grpo  # noqa: F401
    environ = {
        "ASYNCGRPO_MODEL_DIR": "none",
        "ASYNCGRPO_OUTPUT_DIR": str(tmp_path),
        "ASYNCGRPO_SERVER_URL": "http://127.0.0.1:9",
    }
    stop: Any = SimpleNamespace(training=False, asked=False)
    with pytest.raises(ConfigError) as caught:
        module.build(load("digit", overrides=[override]), environ, stop, True, Ranks(0, 1))
    assert words in str(caught.value)
