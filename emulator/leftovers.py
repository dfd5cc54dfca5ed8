"""What an emulator leaves that was killed together with its reaper: the next one to start takes it away.

An emulator's directory has a lock, which it and its reaper hold as long as either lives, and in it the mark of its
processes. A lock that nobody holds is that of a dead one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from emulator import reaper

PREFIX = "asyncgrpo-"
"""Starts the name of every emulator's directory."""
LOCK = ".lock"
MOUNTS = Path("/proc/self/mounts")


def claim(root: Path, mark: str) -> int:
    """Take the lock of a new directory; returns the descriptor that holds it, to be inherited by the reaper."""
    lock = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, mark.encode())
    return lock


def sweep(parent: Path) -> None:
    """End the processes and remove the files of every dead emulator below `parent`."""
    for root in parent.glob(f"{PREFIX}*"):
        try:
            lock = os.open(root / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # somebody else's, or just being made
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if mark := os.read(lock, 100).decode():
                _remove(root, mark)
        except BlockingIOError:  # it lives
            continue
        finally:
            os.close(lock)


def _remove(root: Path, mark: str) -> None:
    reaper.end(set(), mark)
    for line in MOUNTS.read_text().splitlines() if MOUNTS.exists() else ():
        target = line.split()[1]
        if Path(target).is_relative_to(root):
            reaper.unmount(target)
    shutil.rmtree(root, ignore_errors=True)
