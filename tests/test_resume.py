"""Trainers that go on after an interruption, with the real TRL against the simulated engine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from jobs import checkpoints, ranks, tiny
from jobs.bucket import Bucket
from jobs.bundle import app_dir
from jobs.recipe import Parallel, load
from jobs.spec import ModelRef, RunSpec
from jobs.stop import TERMINATED
from tests.conftest import MotoBucket
from tests.engines import running, sim_command

WAIT_S = 90.0
"""For what takes some 8 s on an idle machine, most of it the imports of TRL."""
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCGRPO_CACHE", str(tmp_path_factory.mktemp("cache")))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Trainer:
    """The processes of one attempt, with an engine of their own: no version of an earlier attempt is held there."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        processes: int = 1,
        parallel: Parallel = "fsdp2",
        resume: Path | None = None,
    ) -> None:
        self.folder, self.output = folder, folder / "output"
        self.output.mkdir(parents=True)
        self._ends = ExitStack()
        model, port = str(tiny.build("digit")), free_port()
        environ = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}
        # Long answers take their time, so that prompts overtake each other.
        command = sim_command(port, "--sim-decode-tokens-per-s", "100", model=model)
        self.engine = self._ends.enter_context(running(command, environ, port, folder / "engine.log"))
        spec = RunSpec(
            "test", load("digit", overrides=['model.dtype="float32"', *overrides]), ModelRef("path", model, model)
        )
        (folder / "spec.json").write_bytes(spec.to_json())
        own = {
            **os.environ,
            "PYTHONPATH": str(app_dir()),
            "ASYNCGRPO_SPEC_FILE": str(folder / "spec.json"),
            "ASYNCGRPO_MODEL_DIR": model,
            "ASYNCGRPO_SERVER_URL": self.engine.url,
            "ASYNCGRPO_OUTPUT_DIR": str(self.output),
            "ASYNCGRPO_PARENT": str(os.getpid()),
            "ASYNCGRPO_RESUME": str(resume or ""),
            "CUDA_VISIBLE_DEVICES": "",
        }
        meeting = free_port()
        self.processes = []
        for rank in range(processes):
            place = ranks.environment(rank, processes, meeting, parallel) if processes > 1 else {}
            with (folder / f"log-{rank}").open("wb") as log:
                command = [sys.executable, "-m", "tests.training"]
                self.processes.append(subprocess.Popen(command, env={**own, **place}, stdout=log, stderr=log))

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._ends.close()

    def log(self) -> str:
        return "\n".join(file.read_text()[-3000:] for file in sorted(self.folder.glob("log-*")))

    def wait(self) -> list[int]:
        statuses = [process.wait(WAIT_S) for process in self.processes]
        self._ends.close()
        return statuses

    def wait_for(self, happened: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + WAIT_S
        while not (found := happened()):
            assert all(process.poll() is None for process in self.processes), self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)
        return found

    def rows(self) -> list[dict[str, Any]]:
        file = self.output / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows() if "loss" in row]

    def saved(self, step: int) -> bool:
        return any(row.get("event") == "saved" and row["step"] == step for row in self.rows())

    def tickets(self, until: int | None = None) -> list[int]:
        """The prompts that were trained on, up to a step, each as often as batches had rollouts of it."""
        batches = [json.loads(line) for line in (self.output / "tickets.jsonl").read_text().splitlines()]
        return [each for batch in batches if until is None or batch["step"] <= until for each in set(batch["tickets"])]

    def held(self, when: str) -> list[Path]:
        return sorted(self.output.glob(f"held-{when}-*.pt"))


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    begun: list[Trainer] = []

    def begin(*overrides: str, **options: Any) -> Trainer:
        begun.append(Trainer(tmp_path / str(len(begun)), *overrides, **options))
        return begun[-1]

    yield begin
    for each in begun:
        each.end()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_processes_go_on_bit_for_bit(
    attempt: Callable[..., Trainer], parallel: Parallel, moto_bucket: MotoBucket, tmp_path: Path
) -> None:
    """Killed after a checkpoint, which travels through the bucket: adapter, optimizer and rate are those saved."""
    import torch

    sharded, both = parallel == "fsdp2", {"processes": 2, "parallel": parallel}
    batch = "trainer.per_device_train_batch_size=16"
    first = attempt(batch, "trainer.max_steps=5", "trainer.save_steps=2", **both)
    first.wait_for(lambda: first.saved(2))
    for process in first.processes:
        process.kill()
    bucket = Bucket.from_env(moto_bucket.environ)
    checkpoints.upload(bucket, "run", first.output / "checkpoint-2")
    found = checkpoints.find_latest(bucket, "run")
    assert found is not None and found.step == 2
    checkpoint = checkpoints.fetch(bucket, "run", 2, tmp_path / "fetched")
    assert (checkpoint / "optimizer_0" / "__1_0.distcp").exists() == sharded

    second = attempt(batch, "trainer.max_steps=4", resume=checkpoint, **both)
    assert second.wait() == [0, 0], second.log()
    assert second.steps() == [3, 4]
    before, after = first.held("saved-2"), second.held("begun-2")
    assert len(before) == len(after) == 2
    for was, is_now in zip(before, after, strict=True):
        old, new = torch.load(was), torch.load(is_now)
        assert sum("exp_avg_sq" in name for name in old) == sum(name.endswith("weight") for name in old) > 20
        assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    version = json.loads((checkpoint / "rollout_state.json").read_text())["model_version"] + 1
    published = load_file(second.output / ".vllm_lora" / f"trl-policy-v{version}" / WEIGHTS)
    saved = load_file(checkpoint / WEIGHTS)
    assert saved.keys() == published.keys() and all((saved[name] == published[name]).all() for name in saved)
    final = load_file(second.output / "final" / WEIGHTS)
    assert final.keys() == saved.keys() and any((saved[name] != final[name]).any() for name in saved)
    both_of = [*first.tickets(until=2), *second.tickets()]
    assert len(both_of) == len(set(both_of)) == 4 * 4
    if sharded:  # without shards, see tests/test_train.py
        third = attempt(batch, "trainer.max_steps=2", resume=checkpoint, **both)
        assert third.wait() == [0, 0] and third.steps() == [], "it was killed after its last step"
        final = load_file(third.output / "final" / WEIGHTS)
        assert final.keys() == saved.keys() and all((saved[name] == final[name]).all() for name in saved)


def test_prompts_are_neither_left_out_nor_repeated(attempt: Callable[..., Trainer]) -> None:
    """Over a run that is interrupted by SIGTERM, then by SIGKILL, then ends."""
    settings = ["trainer.max_steps=20", "trainer.save_steps=5", "trainer.max_inflight_tasks=64"]
    settings += ["trainer.queue_maxsize=32", "trainer.weight_sync_steps=1000"]  # so that no rollout is too old
    first = attempt(*settings)
    first.wait_for(lambda: len(first.steps()) >= 6)
    first.processes[0].send_signal(signal.SIGTERM)
    assert first.wait() == [TERMINATED], first.log()
    (saved,) = [row["step"] for row in first.rows() if row.get("event") == "saved" and row["step"] != 5]
    second = attempt(*settings, resume=first.output / f"checkpoint-{saved}")
    second.wait_for(lambda: second.saved(15))
    second.processes[0].kill()
    third = attempt(*settings, resume=second.output / "checkpoint-15")
    assert third.wait() == [0], third.log()
    assert third.steps() == [16, 17, 18, 19, 20]
    trained = [*first.tickets(until=saved), *second.tickets(until=15), *third.tickets()]
    assert len(trained) == len(set(trained)) == 20 * 4, "none was repeated"
    state = json.loads((third.output / "checkpoint-20" / "rollout_state.json").read_text())
    assert set(trained) == {*range(state["prompt_index"]), *state["prompts_done"]}, "what is left out is known as such"
