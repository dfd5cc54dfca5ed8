"""A bucket's folder as a directory that follows it, late and in no order, as the Hub's mount does.

Measured on the real one: a file is whole or absent; what another machine wrote is seen about 2.5 s later, and later
still by who asked for it before it was there; the files of one directory come in any order, so a reader meets every
mixture of old and new; a renamed directory is files that come and files that go; empty directories do not travel. Here
each change gets its own delay when it is first noticed. What the Job writes is uploaded once it stopped changing, and
lost if the Job is killed before.

Where there is FUSE, the directory is shown to the Job through a mount (see `fuse`). A directory alone cannot tell who
looked a missing name up: every new name is taken for one that was asked for. Nor can it list less than it opens.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from emulator.fuse_server import BEING_WRITTEN
from jobs.bucket import Bucket, BucketSettings

LAG_S = 2.5
"""Mean time until a change is seen (measured on the Hub's mount, 2026-09)."""
SPREAD = 0.8
"""A delay is drawn from (1 - SPREAD) to (1 + SPREAD) times the mean."""
MISSING_S = 1.0
"""How long a looked-up name that was missing stays so (1 s since 2026-09, 30 s before)."""
LISTING_S = 10.0
"""How old a listing may be (measured on the Hub's mount; 30 s on some versions)."""

Stat = tuple[int, int]
Snapshot = dict[str, Stat]
"""Relative path -> (size, modification time in ns) of a file."""


def snapshot(directory: Path) -> Snapshot:
    """All files below a directory, but for those that vanish meanwhile."""
    found: Snapshot = {}
    for path in directory.rglob("*"):
        try:
            if path.is_file():
                found[str(path.relative_to(directory))] = (path.stat().st_size, path.stat().st_mtime_ns)
        except FileNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Lag:
    """How late a mount is: `mean_s` on the mean, `missing_s` more for a missing name, its lists up to `listing_s`."""

    mean_s: float = LAG_S
    missing_s: float = MISSING_S
    listing_s: float = LISTING_S

    def draw(self, draw: random.Random, is_new: bool) -> float:
        """Seconds until one change is seen in a directory: any new name may have been asked for at any time before."""
        return self.mean_s * draw.uniform(1 - SPREAD, 1 + SPREAD) + is_new * draw.uniform(0, self.missing_s)


LAG = Lag()
"""The lag that was measured."""


class Arrivals:
    """Which of the bucket's changes are to be shown by now. Pure: times come in, nothing is read or written.

    `delay_s` draws the delay of a change; it is told whether the name was missing. `shown` is what the directory shows,
    path -> etag.
    """

    def __init__(self, delay_s: Callable[[bool], float]) -> None:
        self.shown: dict[str, str] = {}
        self._delay_s = delay_s
        self._due: dict[str, tuple[str | None, float]] = {}

    def now(self, listing: Mapping[str, str], at: float) -> dict[str, str | None]:
        """Path -> etag to show now, or None for a file to remove, given what the bucket lists at this time."""
        for path in {*listing, *self.shown, *self._due}:
            etag = listing.get(path)
            if self.shown.get(path) == etag:
                self._due.pop(path, None)
            elif path not in self._due or self._due[path][0] != etag:
                self._due[path] = (etag, at + self._delay_s(path not in self.shown))
        ripe = {path: etag for path, (etag, due) in self._due.items() if due <= at}
        for path, etag in ripe.items():
            del self._due[path]
            if etag is None:
                del self.shown[path]
            else:
                self.shown[path] = etag
        return ripe


class LiveMount:
    """One mounted folder: `s3://bucket/folder` of `settings` at `directory`. Its methods block; one at a time."""

    def __init__(
        self,
        settings: BucketSettings,
        directory: Path,
        writable: bool,
        lag: Lag,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self.writable = writable
        self._bucket = Bucket(settings)
        self._clock = clock
        draw = random.Random(seed)
        self._arrivals = Arrivals(lambda is_new: lag.draw(draw, is_new))
        self._known: Snapshot = {}
        self._last: Snapshot = {}

    def _list(self) -> dict[str, str]:
        return {path: entry.etag for path, entry in self._bucket.entries("").items() if not path.endswith("/")}

    def fill(self) -> int:
        """Show everything there is, at once: the mount is new. Returns the number of files."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for path, etag in self._list().items():
            self._show(path)
            self._arrivals.shown[path] = etag
        return len(self._arrivals.shown)

    def step(self) -> None:
        """Upload what the Job wrote and finished, then show what has become due."""
        self._upload(finished_only=True)
        errors = []
        for path, etag in self._arrivals.now(self._list(), self._clock()).items():
            if etag is not None:
                try:
                    self._show(path)
                except Exception as error:
                    self._arrivals.shown.pop(path)  # throttled, or gone meanwhile: it is noticed anew
                    errors.append(error)
            elif path in self._known:
                self._hide(path)
        if errors:
            raise errors[0]

    def flush(self) -> None:
        """Upload all that is left: the Job is over."""
        self._upload(finished_only=False)

    def _show(self, path: str) -> None:
        target = self.directory / path
        part = self.directory.with_name(f"{self.directory.name}.part")  # not inside: nobody may see half a file
        self._bucket.get_file(path, part)
        target.parent.mkdir(parents=True, exist_ok=True)
        part.replace(target)
        self._known[path] = (target.stat().st_size, target.stat().st_mtime_ns)

    def _hide(self, path: str) -> None:
        """Remove a file, and the directories that are empty then: the bucket has none."""
        target = self.directory / path
        target.unlink(missing_ok=True)
        self._known.pop(path)
        for parent in target.parents:
            if parent == self.directory or any(parent.iterdir()):
                break
            parent.rmdir()

    def _upload(self, finished_only: bool) -> None:
        if not self.writable:
            return
        present = snapshot(self.directory)
        for path, stat in present.items():
            if self._known.get(path) != stat and (not finished_only or self._last.get(path) == stat):
                copy = self.directory.with_name(f"{self.directory.name}.copy")
                try:
                    if finished_only and not self._finished(path, stat):
                        continue
                    shutil.copyfile(self.directory / path, copy)
                    if finished_only and not self._finished(path, stat):  # the copy may be of half of it
                        continue
                except FileNotFoundError:  # removed or renamed since
                    continue
                # By its etag, what comes back is known to be our own.
                self._arrivals.shown[path] = self._bucket.put_file(path, copy)
                self._known[path] = stat
                copy.unlink()
        for path in self._known.keys() - present.keys():
            self._bucket.delete([path])
            self._known.pop(path)
            self._arrivals.shown.pop(path, None)
        self._last = present

    def _finished(self, path: str, stat: Stat) -> bool:
        found = (self.directory / path).stat()
        return (found.st_size, found.st_mtime_ns) == stat and not found.st_mode & BEING_WRITTEN
