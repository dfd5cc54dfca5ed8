"""Child processes of a role: started so that they end with it, and ended so that none is left."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterable

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal this process gets when the thread that started it ends."""


def die_with_parent(parent: int | None = None) -> None:
    """Makes the kernel kill this process when its parent is gone, however that went.

    `parent` is the pid it was started by: if that one has ended already, this process ends here.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def end(children: Iterable[subprocess.Popen[bytes]], grace_s: float) -> None:
    """Asks each process to end, waits up to `grace_s` for all of them, then kills what is left."""
    alive = [child for child in children if child.poll() is None]
    for child in alive:
        child.terminate()
    try:
        for child in alive:
            child.wait(grace_s)
    except subprocess.TimeoutExpired:
        pass
    for child in alive:
        if child.poll() is None:
            child.kill()
            child.wait()
