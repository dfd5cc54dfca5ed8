import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs import rollout_patches
from jobs.bundle import app_dir

WAIT_S = 20.0

# A trainer whose rollout loop fills its queue and never ends by itself; `start` and `stop` are TRL's, patched.
TRAINER = """
import sys, time

class Loop:
    def __init__(self, rollout_buffer, **_):
        self.buffer = rollout_buffer
    def run(self):
        while True:
            self.buffer.put(b"x" * 100_000)

def tell(*words):
    print(*words, flush=True)

def begin(module):
    module.AsyncRolloutWorker._loop_cls = Loop
    worker = module.AsyncRolloutWorker(queue_maxsize=50)
    worker.start()
    tell(worker._process.pid)
    return worker

if __name__ == "__main__":
    from jobs import rollout_patches, trl_patches

    {start}
    time.sleep(600)
"""
FORKED = """trl_patches.apply(True, lambda: False)
    import accelerate
    accelerate.PartialState()
    from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker, weight_transfer
    tell([name for name in sys.modules if name.split(".")[0] == "vllm"])
    tell(async_grpo_trainer.get_peak_flops_per_device(None, "float32"))
    try:
        weight_transfer.get_ip()
    except ValueError as error:
        tell(type(error).__name__, error)
    worker = begin(async_rollout_worker)
    begun = time.monotonic()
    worker.stop()
    tell(time.monotonic() - begun)
    begin(async_rollout_worker)"""
SPAWNED = """import accelerate
    accelerate.PartialState()
    with trl_patches.without_vllm():
        from trl.experimental.async_grpo import async_rollout_worker
    rollout_patches.own_rollout_process(fork=False)
    begin(async_rollout_worker)"""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return gone(pid)


@contextmanager
def trainer(folder: Path, start: str) -> Iterator[tuple[subprocess.Popen[str], Callable[[], str]]]:
    """A trainer process, and what reads the next line it tells."""
    script = folder / "trainer.py"
    script.write_text(TRAINER.format(start=start))
    environ = {**os.environ, "PYTHONPATH": str(app_dir()), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    with subprocess.Popen([sys.executable, str(script)], env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = process.stdout
        try:
            yield process, lambda: lines.readline().strip()
        finally:
            process.kill()


def test_a_patched_trainer_from_its_import_to_its_sudden_end(tmp_path: Path) -> None:
    with trainer(tmp_path, FORKED) as (process, line):
        assert line() == "[]"  # vLLM is not imported, and nothing is left that stands in for it
        assert line() == "None"  # no peak FLOPS, and no question to CUDA
        assert line().startswith("ConfigError merged weights would go over NCCL")
        stopped = int(line())
        assert float(line()) < rollout_patches.STOP_GRACE_S + 2  # and not TRL's 15 s
        assert gone(stopped)
        rollouts = int(line())
        assert not gone(rollouts)
        process.kill()
        assert wait_until_gone(rollouts)


def test_a_spawned_rollout_process_never_outlives_a_killed_trainer(tmp_path: Path) -> None:
    with trainer(tmp_path, SPAWNED) as (process, line):
        rollouts = int(line())
        assert not gone(rollouts)
        process.kill()
        assert wait_until_gone(rollouts)


@pytest.mark.parametrize(("queue", "groups"), [(1024, 16), (32, 4), (8, 1), (1, 1)])
def test_a_small_queue_bounds_the_groups_that_wait_to_be_scored(queue: int, groups: int) -> None:
    args = types.SimpleNamespace(queue_maxsize=queue, num_generations=8)
    worker = types.SimpleNamespace(_loop_kwargs={}, _loop_cls=lambda score_queue_maxsize: None)
    rollout_patches.bound_rollouts_ahead(types.SimpleNamespace(args=args, rollout_worker=worker))
    assert worker._loop_kwargs == {"score_queue_maxsize": groups}
    rollout_patches.bound_rollouts_ahead(types.SimpleNamespace(args=args, rollout_worker=None))
