"""Patches with which TRL's asynchronous trainer goes on exactly where a checkpoint was, on one GPU or several.

Each is one function with its reason; written for TRL 1.14 to 1.16 and transformers 5.17. They change TRL's classes, so
that a user's own script gets them too. Nothing here imports TRL or torch before it is called.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

from jobs.prompts import Prompts, Remaining
from jobs.trl_targets import TRAINER, WORKER, existing, imported, replace

STATE = "rollout_state.json"
"""TRL's own part of a checkpoint."""


def apply(on_cpu: bool) -> None:
    """Makes the trainer fit to resume. `on_cpu` says that there is no GPU to train on."""
    count_prompts()
    take_no_step_too_many()
    save_sharded_adapters()
    if on_cpu:
        load_on_numbered_cpus()


def count_prompts() -> None:
    """Has checkpoints say which prompts are done, and a trainer that resumes begin with the others (see Prompts)."""
    from transformers import TrainerCallback

    trainer, worker = existing(imported(TRAINER), "AsyncGRPOTrainer"), existing(imported(WORKER), "AsyncRolloutWorker")
    train, dataloader = existing(trainer, "_inner_training_loop"), existing(trainer, "get_train_dataloader")
    save, start = existing(trainer, "_save_checkpoint"), existing(worker, "start")

    class Steps(TrainerCallback):  # type: ignore[misc]
        """Tells the account of the micro-batches that each step was made with."""

        batches, prompts = 0, Prompts()

        def on_substep_end(self, *_: Any, **__: Any) -> None:
            self.batches += 1

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.prompts.trained(self.batches + 1)
            self.batches = 0

    @functools.wraps(train)
    def _inner_training_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.rollout_worker, worker):  # the first process has it
            self.rollout_worker.prompts = Prompts.of(state_of(kwargs.get("resume_from_checkpoint")))
            self.remove_callback(Steps)
            steps = Steps()
            steps.prompts = self.rollout_worker.prompts
            self.add_callback(steps)
        return train(self, *args, **kwargs)

    @functools.wraps(dataloader)
    def get_train_dataloader(self: Any) -> Any:
        if prompts := getattr(self.rollout_worker, "prompts", None):
            self.rollout_queue = _WatchedQueue(existing(self, "rollout_queue"), prompts)
            replace(self, "_trained_groups", _Batched(prompts))
            replace(self, "_groups_before_resume", prompts.count)
        return dataloader(self)

    @functools.wraps(start)
    def start_worker(self: Any) -> None:
        if (prompts := getattr(self, "prompts", None)) and prompts.count:
            rows = Remaining(existing(self, "_loop_kwargs")["dataset"], *prompts.begin)
            self._loop_kwargs |= {"dataset": rows, "dataset_start_index": 0}
        start(self)

    @functools.wraps(save)
    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        save(self, model, trial)
        if prompts := getattr(self.rollout_worker, "prompts", None):
            file = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}", STATE)
            file.write_text(json.dumps(json.loads(file.read_text()) | prompts.state()))

    trainer._inner_training_loop = _inner_training_loop
    trainer.get_train_dataloader = get_train_dataloader
    trainer._save_checkpoint = _save_checkpoint
    worker.start = start_worker


class _WatchedQueue:
    """The rollout queue as the trainer reads it, which tells the account what was taken."""

    def __init__(self, rollouts: Any, prompts: Prompts) -> None:
        # One of an earlier call of `train` is replaced.
        self._rollouts: Any = rollouts._rollouts if isinstance(rollouts, _WatchedQueue) else rollouts
        self._prompts = prompts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollouts, name)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """The next rollout, as the queue's own `get` has it."""
        sample = self._rollouts.get(*args, **kwargs)
        self._prompts.taken(sample.group_id)
        return sample


class _Batched(set[int]):
    """What TRL takes for the groups it has trained on; it adds those of each micro-batch when that is put together."""

    def __init__(self, prompts: Prompts) -> None:
        super().__init__()
        self._prompts = prompts

    def update(self, *groups: Any) -> None:
        """Adds the groups of one micro-batch's rollouts."""
        for each in groups:
            batch = list(each)
            self._prompts.batched(batch)
            super().update(batch)


def take_no_step_too_many() -> None:
    """A run that ended after its last step is not trained on when it resumes; only its adapter is loaded.

    transformers makes one more step before it looks at `max_steps`, and TRL before it looks at the number of epochs.
    """
    from transformers.trainer_callback import TrainerState
    from transformers.trainer_utils import TrainOutput

    trainer = existing(imported(TRAINER), "AsyncGRPOTrainer")
    train = existing(trainer, "_inner_training_loop")

    @functools.wraps(train)
    def _inner_training_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint = kwargs.get("resume_from_checkpoint")
        if checkpoint is not None:
            state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
            groups = existing(self, "_epoch_stop_groups")
            epochs_over = groups and Prompts.of(state_of(checkpoint)).count >= groups
            if state.global_step >= self.args.max_steps or epochs_over:
                self.state = state
                if self.is_fsdp_enabled:  # else transformers has loaded it by now
                    self.model.load_adapter(checkpoint, self._adapter_name, is_trainable=True)
                return TrainOutput(state.global_step, 0.0, {})
        return train(self, *args, **kwargs)

    trainer._inner_training_loop = _inner_training_loop


def save_sharded_adapters() -> None:
    """Has a trainer under FSDP2 write its adapter in PEFT's format, beside the shards that it resumes from.

    With a sharded state transformers writes the shards alone, and with a full one (torch 2.13) PEFT fails: what was
    gathered has no storage.
    """
    trainer = existing(imported(TRAINER), "AsyncGRPOTrainer")
    save = existing(trainer, "save_model")

    @functools.wraps(save)
    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.is_fsdp_enabled:
            from torch.distributed.tensor import DTensor

            whole = {}
            for name, tensor in self.accelerator.unwrap_model(self.model).state_dict().items():
                if "lora_" in name:  # all processes gather, in one order; the first one writes
                    whole[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
            if self.args.should_save:
                self._save(output_dir or self.args.output_dir, state_dict=whole)
        save(self, output_dir, _internal_call)

    trainer.save_model = save_model


def load_on_numbered_cpus() -> None:
    """Lets torch load onto "cpu:0": so accelerate calls the device of a process that is one of several on a CPU."""
    import torch

    def deserialize(storage: Any, location: str) -> Any:
        return storage if re.fullmatch("cpu:[0-9]+", location) else None

    torch.serialization.register_package(100, lambda _: None, deserialize)


def state_of(checkpoint: str | None) -> dict[str, Any]:
    """TRL's part of a checkpoint; nothing where it has none."""
    file = Path(checkpoint or "", STATE)
    if checkpoint is None or not file.exists():
        return {}
    found: dict[str, Any] = json.loads(file.read_text())
    return found
