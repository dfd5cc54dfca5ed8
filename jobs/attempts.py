"""Attempts: each start of a run's trainer is one, with a number of its own that no other start can have.

Only the newest speaks for the run. One that was taken for dead may wake up again, beside the one that took its place.
"""

import json
import time
import uuid
from pathlib import Path

from jobs.bucket import Bucket
from jobs.errors import NotFound, RunFailed


class Superseded(RunFailed):
    """A newer attempt has begun. No reason to start this one again: it would supersede that in turn."""

    def __init__(self, run: str, attempt: int) -> None:
        super().__init__(f"attempt {attempt} of run {run} was taken for dead: attempt {attempt + 1} took its place.")


def claim(bucket: Bucket, run: str) -> int:
    """Takes the next free attempt of the run, counted from 1, by a conditional PUT."""
    prefix = f"runs/{run}/attempts/"
    taken = [int(key.removeprefix(prefix).removesuffix(".json")) for key in bucket.list(prefix)]
    attempt = max(taken, default=0) + 1
    claimant = json.dumps({"nonce": uuid.uuid4().hex, "claimed_at": time.time()}).encode()
    while not bucket.put_new(_key(run, attempt), claimant):
        attempt += 1
    return attempt


class Voice(Bucket):
    """The bucket as one attempt writes to it. Most of a run's keys are the same for all attempts, so before each object
    it looks for the record of the next one.

    Writing raises `Superseded` once that is there; `superseded` says so, too.
    """

    def __init__(self, bucket: Bucket, run: str, attempt: int) -> None:
        super().__init__(bucket.settings, bucket.retry_s)
        self._run, self._attempt = run, attempt
        self.superseded = False

    def put(self, key: str, data: bytes) -> str:
        """See `Bucket`."""
        self._speak()
        return super().put(key, data)

    def put_file(self, key: str, path: Path) -> str:
        """See `Bucket`."""
        self._speak()
        return super().put_file(key, path)

    def _conditional(self, key: str, data: bytes, condition: dict[str, str]) -> bool:
        self._speak()
        return super()._conditional(key, data, condition)

    def _speak(self) -> None:
        try:
            self.get(_key(self._run, self._attempt + 1))
        except NotFound:
            return
        self.superseded = True
        raise Superseded(self._run, self._attempt)


def _key(run: str, attempt: int) -> str:
    return f"runs/{run}/attempts/{attempt}.json"
