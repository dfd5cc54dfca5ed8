"""Local ports: free ones, and who listens on a port (Linux)."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable
from pathlib import Path

LOOPBACK = "127.0.0.1"
FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Below the ports that systems hand out themselves (Linux from 32768, macOS from 49152): a port that is chosen for a
Job before the Job binds it is not taken by somebody's outgoing connection in between."""
TRIES = 1000
_LISTEN = "0A"  # TCP_LISTEN in proc_net_tcp(5)


def free_port(taken: Iterable[int] = ()) -> int:
    """A port of the loopback interface nobody is bound to, and not in `taken`. Raises OSError when none is found."""
    held = set(taken)
    for _ in range(TRIES):
        port = random.randint(FIRST_PORT, LAST_PORT)
        if port in held:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port between {FIRST_PORT} and {LAST_PORT}")


def listens(pids: Iterable[int], port: int) -> bool:
    """Whether one of the processes listens on the TCP port. False where there is no /proc."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    if not sockets:
        return False
    for pid in pids:
        try:
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                if str(descriptor.readlink()) in sockets:
                    return True
        except OSError:
            continue
    return False
