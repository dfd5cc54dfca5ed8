"""The run's lease: replicas end themselves when nobody renews it, so that nobody pays for orphans.

The trainer (and the launcher, until the trainer has started) writes `runs/<run>/lease.json` again and again. A replica
compares what it reads with what it read before, on its own clock: machines' clocks need not agree.
"""

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jobs.bucket import SHOWN_POLL_S, Bucket
from jobs.errors import AsyncgrpoError, BucketError, NotFound

log = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 6
"""A lease is renewed this many times in its length, so that a few lost writes do not end a run."""


LOOK_S = 5.0
"""Longest pause between two looks at a lease."""


def look_s(lease_s: float) -> float:
    """Pause between two looks of a replica at its lease."""
    return min(LOOK_S, lease_s / RENEWALS_PER_LEASE)


def end_within_s(lease_s: float) -> float:
    """How long after its last sign a run's replicas begin to end, at most: one look late to see the sign, one to miss
    the next. A bucket that shows things late adds its lag."""
    return lease_s + 2 * look_s(lease_s)


def lease_key(run: str) -> str:
    """Key of the run's lease."""
    return f"runs/{run}/lease.json"


def renew(bucket: Bucket, run: str) -> None:
    """Shows that somebody leads the run."""
    bucket.put(lease_key(run), _beat())


def keep(bucket: Bucket, run: str) -> bool:
    """Renews the lease unless somebody ended it; False if somebody did."""
    try:
        content, etag = bucket.get_json_tagged(lease_key(run))
    except NotFound:
        renew(bucket, run)
        return True
    if content.get("state") == "ended":
        return False
    bucket.put_if(lease_key(run), _beat(), etag)  # one that was changed meanwhile is looked at next time
    return True


def keep_on(keep: Callable[[], None], lease_s: float, stop: threading.Event) -> None:
    """Calls `keep` often enough for a lease, at once and until `stop`. Runs in a thread; a call that fails is lost."""
    while True:
        try:
            keep()
        except Exception as error:  # whatever it is, the next one may do
            known = isinstance(error, AsyncgrpoError)
            log.error("the lease was not renewed: %s", error, exc_info=not known)
        if stop.wait(lease_s / RENEWALS_PER_LEASE):
            return


def end(bucket: Bucket, run: str) -> None:
    """Tells every replica that the run is over."""
    bucket.put(lease_key(run), json.dumps({"state": "ended"}).encode())


def ended(bucket: Bucket, run: str, within_s: float = 0.0) -> bool:
    """Whether the run is over, or was stopped. One that goes on again may be shown so only `within_s`."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            if bucket.get_json(lease_key(run)).get("state") != "ended":
                return False
        except NotFound:
            return False
        if time.monotonic() >= deadline:
            return True
        time.sleep(SHOWN_POLL_S)


def _beat() -> bytes:
    return json.dumps({"state": "held", "beat": uuid.uuid4().hex}).encode()


@dataclass
class LeaseWatch:
    """One replica's view of the lease. Pure: time and content are arguments.

    `lease_s` counts from the last change seen; a lease that was never seen counts from `started_at`.
    """

    lease_s: float
    started_at: float
    content: dict[str, Any] | None = None
    changed_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.changed_at = self.started_at

    def observe(self, content: bytes | None, now: float) -> None:
        """Notes what the bucket showed; None if it showed nothing or did not answer. No JSON object is no answer."""
        try:
            told = None if content is None else json.loads(content)
        except ValueError:
            return
        if isinstance(told, dict) and told != self.content:
            self.content, self.changed_at = told, now

    def verdict(self, now: float) -> str | None:
        """Why the replica should end, or None."""
        if self.content is not None and self.content.get("state") == "ended":
            return "the run has ended"
        if now - self.changed_at > self.lease_s:
            return f"the run's lease was not renewed for {self.lease_s:.0f} s"
        return None


def watch(bucket: Bucket, run: str, lease_s: float, stop: threading.Event, expired: Callable[[str], None]) -> None:
    """Looks at the lease until it expires, then calls `expired(reason)` once. Runs in a thread; `stop` ends it."""
    view = LeaseWatch(lease_s, time.monotonic())
    while not stop.wait(look_s(lease_s)):
        try:
            content = bucket.get(lease_key(run))
        except NotFound:
            content = None
        except BucketError as error:
            log.warning("lease: %s", error)
            content = None
        view.observe(content, time.monotonic())
        if reason := view.verdict(time.monotonic()):
            expired(reason)
            return
