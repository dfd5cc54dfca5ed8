"""A process that outlives the emulator by a moment and ends whatever is left of its Jobs.

    python reaper.py <mark>  <stdin>

It reads one JSON object per line: `{"group": 123}` names a process group to end, `{"forget": 123}` takes that back,
`{"directory": "/tmp/x"}` names a directory to remove, `{"mount": "/tmp/x/m"}` a FUSE mount to take away. When its
standard input ends, by the emulator's wish or by its death, whatever the cause, it ends every group and every process
whose environment bears the mark, takes the mounts away, removes the directories and leaves. Standard library only: it
starts in milliseconds and needs no package.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "ASYNCGRPO_EMULATOR"
"""Name of the variable that every process of an emulator's Jobs inherits."""
POLL_S = 0.02
GIVE_UP_S = 5.0
"""A process that has not gone this long after SIGKILL hangs in the kernel; nothing here can end it."""

PROC = Path("/proc")


def marked(mark: str, name: str = MARK) -> list[int]:
    """Living processes whose environment has `name` set to the mark. Empty without /proc (macOS): only groups are left.

    A process that starts with another environment and leaves its group as well is not found.
    """
    wanted = f"{name}={mark}".encode()
    found: list[int] = []
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # it ended meanwhile, or belongs to somebody else
                continue
    return found


def in_group(group: int) -> list[int]:
    """Processes of a process group that are not zombies; [group] where there is no /proc and the group exists."""
    if not PROC.is_dir():
        try:
            os.killpg(group, 0)
        except OSError:
            return []
        return [group]
    found: list[int] = []
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            try:
                # After the command's name in brackets: state, parent, group. See proc_pid_stat(5).
                state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(its_group) == group and state not in "ZX":
                found.append(int(entry.name))
    return found


def kill_group(group: int, signum: int = signal.SIGKILL) -> None:
    """Send a signal to a whole process group, if there still is one."""
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):  # PermissionError: macOS, when only zombies are left
        pass


def end(groups: set[int], mark: str, give_up_s: float = GIVE_UP_S) -> list[int]:
    """Kill the groups and all marked processes until none is left. Returns those that would not go."""
    deadline = time.monotonic() + give_up_s
    while True:
        for group in groups:
            kill_group(group)
        for pid in marked(mark):  # also those born since the last look
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        left = sorted({*marked(mark), *(pid for group in groups for pid in in_group(group))})
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(POLL_S)


def unmount(directory: str) -> None:
    """Take a FUSE mount away, also one that is in use or whose process is dead. Does nothing where there is none."""
    subprocess.run(["fusermount3", "-u", "-z", "-q", directory], stderr=subprocess.DEVNULL, check=False)


def main(mark: str) -> int:
    """Follow standard input to its end, then clean up. Exit status 1 if a process would not go."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # only the end of the emulator ends it
    groups: set[int] = set()
    directories: list[str] = []
    mounts: list[str] = []
    for line in sys.stdin:
        message = json.loads(line)
        if "group" in message:
            groups.add(message["group"])
        if "forget" in message:
            groups.discard(message["forget"])
        if "directory" in message:
            directories.append(message["directory"])
        if "mount" in message:
            mounts.append(message["mount"])
    left = end(groups, mark)
    for mount in mounts:
        unmount(mount)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
