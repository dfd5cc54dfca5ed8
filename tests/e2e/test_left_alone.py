"""Runs whose launcher was killed: found, followed and stopped from elsewhere; and ended by their lease."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from emulator.serve import Emulator
from jobs import lease, recipe, replica, tiny
from jobs.bucket import Bucket
from jobs.bundle import app_dir
from jobs.errors import ConfigError
from jobs.launch import Launch
from jobs.operate import Operation
from jobs.site import Site
from jobs.spec import RunSpec
from tests.conftest import started
from tests.e2e.test_emulate import PROGRAM

pytestmark = pytest.mark.e2e

WAIT_S = 120.0
"""For what takes some 20 s on an idle machine: a trainer's first steps."""
LAUNCHER = """
import os
from jobs import recipe, tiny
from jobs.launch import Launch
from jobs.site import Site
chosen = recipe.load("digit", None, ["trainer.max_steps=100000"])
with Launch(Site.from_env(os.environ), chosen, "left", "sim", "emulator.sim_engine", 0) as run:
    run.start(tiny.build("digit"))
    run.follow(lambda _: None)
"""
"""`asyncgrpo launch digit --follow`, with the simulated engine."""


def until(happened: Callable[[], Any], wait_s: float = WAIT_S) -> Any:
    deadline = time.monotonic() + wait_s
    while not (found := happened()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What `asyncgrpo emulate --serve` prints, on top of this process's own environment."""
    (tmp_path / "serving").mkdir()
    command = [*PROGRAM, "emulate", "--serve"]
    serving = subprocess.Popen(command, cwd=tmp_path / "serving", stdout=subprocess.PIPE, text=True)
    assert serving.stdout is not None
    lines = [serving.stdout.readline() for _ in range(7)]
    yield {**os.environ, **dict(line.strip().split("=", 1) for line in lines)}
    serving.send_signal(signal.SIGINT)
    assert serving.wait(30) == 0
    serving.stdout.close()
    until(lambda: not started(), 10)


def test_a_run_is_found_followed_and_stopped_from_another_directory(tmp_path: Path, environ: dict[str, str]) -> None:
    def asyncgrpo(*args: str) -> Any:
        done = subprocess.run([*PROGRAM, *args], cwd=elsewhere, env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    (here := tmp_path / "here").mkdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    own = {**environ, "PYTHONPATH": str(app_dir())}
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], cwd=here, env=own, stderr=subprocess.DEVNULL)
    until(lambda: _step(environ) >= 1)
    launcher.kill()
    launcher.wait()

    (found,) = asyncgrpo("status", "--json")
    assert (found["run"], found["recipe"], found["trainer"], found["replicas"]) == ("left", "digit", "RUNNING", 2)
    shown = asyncgrpo("status", found["run"], "--json")
    assert shown["state"] == "training" and len(shown["jobs"]) == 3
    command = [*PROGRAM, "logs", found["run"], "--follow"]
    with subprocess.Popen(command, cwd=elsewhere, env=environ, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        wanted = f"step {shown['step'] + 3} of 100000"
        assert any(wanted in line for line in following.stdout), "it goes on without its launcher"
        stopped = asyncgrpo("stop", found["run"], "--json")
        assert len(stopped["cancelled"]) == 3
        following.stdout.read()
        assert following.wait(30) == 0
    assert asyncgrpo("status", "--json") == []
    assert asyncgrpo("status", found["run"], "--json")["state"] == "stopped"


def _step(environ: dict[str, str]) -> int:
    try:
        return int(json.loads(Bucket.from_env(environ).get("runs/left/progress.json"))["step"])
    except KeyError:
        return 0


def test_replicas_end_in_the_stated_time_when_nobody_looks(tmp_path: Path) -> None:
    """The trainer is killed, its launcher has gone, and no credit is left to start another trainer."""
    lease_s = 12.0
    with Emulator() as emulator:
        site = Site.from_env(emulator.environment())
        chosen = recipe.load("digit", None, ["trainer.max_steps=100000", f"jobs.lease_s={lease_s:.0f}"])
        with Launch(site, chosen, "lease", "sim", "emulator.sim_engine", 0) as run:
            run.start(tiny.build("digit"))
            run.detach()
        operation = Operation(site, Bucket(site.bucket), "lease")
        until(lambda: [each["state"] for each in operation.status()["replicas"]] == ["ready", "ready"])
        jobs = {job["id"]: job["role"] for job in operation.status()["jobs"]}
        (trainer,) = [job for job, role in jobs.items() if role == "trainer"]
        emulator.hub.affordable = 0
        killed = time.monotonic()
        emulator.signal(trainer, signal.SIGKILL)
        until(lambda: all(job["stage"] != "RUNNING" for job in operation.status()["jobs"]), 2 * lease_s)
        assert time.monotonic() - killed <= lease.end_within_s(lease_s) + replica.GRACE_S
        assert {job["stage"] for job in operation.status()["jobs"] if job["role"] == "replica"} == {"COMPLETED"}
        assert "lease was not renewed for 12 s" in "\n".join(operation.logs("replica", 0, follow=False))
        assert operation.status()["state"] == "dead"


def test_a_run_that_was_stopped_is_resumed(tmp_path: Path) -> None:
    """With another reward's weight, say: all but the model and the adapter may change meanwhile."""
    with Emulator() as emulator:
        site = Site.from_env(emulator.environment())
        bucket = Bucket(site.bucket)

        def launch(steps: int, *, seed: int = 0, resume: bool = False, rank: int = 8) -> Launch:
            more = [f"trainer.max_steps={steps}", "trainer.save_steps=2", f"lora.r={rank}"]
            chosen = recipe.load("digit", None, more)
            return Launch(site, chosen, "again", "sim", "emulator.sim_engine", seed, resume=resume)

        with pytest.raises(ConfigError, match="there is no run 'again'"):
            launch(40, resume=True).start(tiny.build("digit"))
        with launch(100_000, seed=3) as run:
            run.start(tiny.build("digit"))
            run.detach()
        operation = Operation(site, bucket, "again")
        until(lambda: any(key.endswith("complete.json") for key in bucket.list("runs/again/checkpoints/")))
        with pytest.raises(ConfigError, match=r"still has Jobs, such as .* asyncgrpo stop again"):
            launch(40, resume=True).start(tiny.build("digit"))
        operation.stop()
        saved = max(int(key.split("checkpoint-")[1].split("/")[0]) for key in bucket.list("runs/again/checkpoints/"))
        with pytest.raises(ConfigError, match=r"\[lora\] of run again is .*r=8.* would become .*r=4"):
            launch(40, resume=True, rank=4).start(tiny.build("digit"))
        with launch(saved + 10, resume=True) as run:
            run.start(tiny.build("digit"))
            summary = run.follow(lambda _: None)
        assert (summary["steps"], summary["attempt"], summary["rollouts_lost"]) == (saved + 10, 2, 0)
        log = "\n".join(operation.logs("trainer", 0, follow=False))
        assert f"attempt 2 goes on from checkpoint-{saved}" in log, "the newest trainer is the resumed one's"
        assert {job["stage"] for job in operation.status()["jobs"]} <= {"CANCELED", "COMPLETED"}
        assert RunSpec.read(bucket, "again").seed == 3, "the order of the prompts stays"
        with pytest.raises(ConfigError, match=f"is done, after {saved + 10} steps"):
            launch(saved + 10, resume=True).start(tiny.build("digit"))
