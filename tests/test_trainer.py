"""What the supervisor of a trainer Job tells the bucket. Training itself: test_train.py, and the whole loop in e2e/."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs import attempts, lease, trainer
from jobs.bucket import Bucket
from jobs.errors import RunFailed
from jobs.progress import progress_key
from jobs.recipe import load
from jobs.spec import ModelRef, RunSpec, spec_key
from jobs.trainer import Supervisor, Uploads
from tests.conftest import MotoBucket

SPEC = RunSpec("r", load("digit", None, ["jobs.lease_s=1"]), ModelRef("hub", "org/model", "digit"))


@pytest.fixture
def bucket(moto_bucket: MotoBucket) -> Bucket:
    bucket = Bucket.from_env(moto_bucket.environ)
    bucket.put(spec_key("r"), SPEC.to_json())
    lease.renew(bucket, "r")
    return bucket


@pytest.fixture
def begin(
    bucket: Bucket, moto_bucket: MotoBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Supervisor]]:
    """Begins attempts of the run `r`. In place of training a process sleeps, and there is no proxy."""
    begun: list[Supervisor] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests' own stays
    monkeypatch.setattr(Supervisor, "_start_proxy", lambda _: None)
    monkeypatch.setattr(trainer, "STATUS_S", 0.1)
    monkeypatch.setattr(Supervisor, "_proxy_status", lambda _: None)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(Supervisor, "_start_training", lambda _: subprocess.Popen(sleep))

    def supervisor() -> Supervisor:
        environ = {**os.environ, **moto_bucket.environ}
        begun.append(Supervisor(bucket, SPEC, attempts.claim(bucket, "r"), environ, tmp_path))
        return begun[-1]

    yield supervisor
    for each in begun:
        each._listener.close()


def test_no_failed_write_ends_the_writes_to_come(moto_bucket: MotoBucket) -> None:
    bucket = Bucket.from_env(moto_bucket.environ, retry_s=0.01)
    bucket.put(lease.lease_key("r"), b"")  # as if the bucket had answered without a body
    uploads, failed = Uploads(bucket), threading.Event()

    def fail() -> None:
        failed.set()
        raise ZeroDivisionError

    uploads.start()
    uploads.call("lease", lambda: lease.keep(bucket, "r"))
    uploads.call("defect", fail)
    assert failed.wait(5)
    uploads.put("after", b"written")
    uploads.close(5)
    assert bucket.get("after") == b"written"


def alive(bucket: Bucket) -> bool:
    """Whether lease and progress are both written anew while it looks."""

    def beats() -> list[str | None]:
        entries = bucket.entries("runs/r/")
        return [entries[key].etag if key in entries else None for key in (lease.lease_key("r"), progress_key("r"))]

    before, deadline = beats(), time.monotonic() + 5
    while any(now == then for now, then in zip(beats(), before, strict=True)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_lease_and_progress_do_not_wait_for_a_checkpoint(
    bucket: Bucket, begin: Callable[[], Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, found = begin(), []

    def save(_: Path) -> None:
        found.append(alive(bucket))
        attempt._term.set()

    attempt.metrics_file.write_text('{"event": "saved", "path": "checkpoint-1"}\n')
    monkeypatch.setattr(attempt, "_save", save)
    assert attempt.run() == 143 and found == [True]


def test_lease_and_progress_do_not_wait_for_what_training_needs(
    bucket: Bucket, begin: Callable[[], Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, found = begin(), []
    train = attempt._start_training

    def fetch() -> subprocess.Popen[bytes]:
        found.append(alive(bucket))
        attempt._term.set()
        return train()

    monkeypatch.setattr(attempt, "_start_training", fetch)
    assert attempt.run() == 143 and found == [True]


def test_a_run_that_was_stopped_stays_stopped(
    bucket: Bucket, moto_bucket: MotoBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "SHOWN_S", 0.0)
    lease.end(bucket, "r")
    with pytest.raises(RunFailed, match="launch RECIPE --run r --resume"):
        trainer.run({**moto_bucket.environ, "ASYNCGRPO_RUN": "r"})
    assert lease.ended(bucket, "r") and bucket.list("runs/r/attempts/") == []


def test_an_attempt_that_was_taken_for_dead_ends_itself_and_nothing_else(
    bucket: Bucket, begin: Callable[[], Supervisor]
) -> None:
    first, second = begin(), begin()
    before = bucket.entries("")
    with pytest.raises(attempts.Superseded, match="attempt 2"):
        first.run()
    assert bucket.entries("") == before
    second._keep_lease()
    assert not second._stopped and bucket.entries("") != before


@pytest.mark.parametrize("state", ["done", "failed"])
def test_the_end_of_an_attempt_that_was_taken_for_dead_is_not_the_runs(
    bucket: Bucket, begin: Callable[[], Supervisor], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begin()

    def train(self: Supervisor) -> int:
        begin()
        if state == "failed":
            raise RunFailed("its adapters are gone")
        self.progress.state = "done"
        return 0

    monkeypatch.setattr(Supervisor, "_watch", train)
    with pytest.raises(RunFailed, match="its adapters are gone" if state == "failed" else "attempt 2"):
        first.run()
    assert not lease.ended(bucket, "r") and bucket.list("runs/r/progress") == bucket.list("runs/r/summary") == []
