"""Where Jobs' volumes are FUSE mounts: whether this machine can do it, and the process that does (`fuse_server`)."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from emulator import reaper
from emulator.live_mount import Lag
from jobs import bundle

DEVICE = Path("/dev/fuse")
START_S = 30.0
"""How long mounting may take; 0.3 s on a quiet machine."""
STOP_S = 2.0


class NoFuse(RuntimeError):
    """There is no FUSE here; says why."""


def absent() -> str | None:
    """What FUSE lacks on this machine, as far as that can be seen without trying; None if nothing."""
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        return f"no {DEVICE} for this user"
    if not shutil.which("fusermount3", path=os.defpath):
        return "no fusermount3 (Debian: fuse3)"
    if importlib.util.find_spec("mfusepy") is None:
        return "no mfusepy (PyPI)"
    return None


@dataclass
class FuseServer:
    """Shows the directory `source` at `target`, with the lags that a directory alone cannot have.

    It ends when `stop` is called or this process dies; `reaper.unmount` takes the mount away if it was killed itself.
    """

    source: Path
    target: Path
    lag: Lag
    mark: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[str] = field(init=False)
    _words: IO[str] = field(init=False)

    def start(self) -> None:
        """Begin to start it; `wait` has to follow. Raises NoFuse."""
        if lacks := absent():
            raise NoFuse(lacks)
        for directory in (self.source, self.target):
            directory.mkdir(parents=True, exist_ok=True)
        settings = {
            "source": str(self.source),
            "target": str(self.target),
            "missing_s": self.lag.missing_s,
            "listing_s": self.lag.listing_s,
        }
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115 (`stop` closes it)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "emulator.fuse_server", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            start_new_session=True,
            env={**os.environ, **self.mark, "PYTHONPATH": str(bundle.app_dir())},
        )

    def wait(self) -> None:
        """Until it is mounted. Raises NoFuse if it cannot be."""
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], START_S)[0]:
            self.process.kill()
            self.stop()
            raise NoFuse(f"nothing was mounted within {START_S:.0f} s")
        if not self.process.stdout.readline():  # it ended
            self.process.wait()
            self._words.seek(0)
            words = self._words.read().strip() or f"the process ended with status {self.process.returncode}"
            self.stop()
            raise NoFuse(words.splitlines()[-1])

    def stop(self) -> None:
        """Unmount it and wait for its end."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:  # somebody still has a file open
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self._words.close()
        reaper.unmount(str(self.target))
