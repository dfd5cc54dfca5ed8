"""What became of a proxy's completions, counted in memory that outlives the process: nothing is lost with a SIGKILL."""

import ctypes
import mmap
from pathlib import Path
from typing import Any

FRACTIONS = ("affinity", "cold", "spilled")
COMPLETIONS = ("asked", "answered", "lost", "cancelled", "redispatched", "upstream_retries")


class Counters(ctypes.Structure):
    """Counts since the proxy's start. Of its own memory, unless it comes from `kept_in`."""

    asked: int
    answered: int
    lost: int
    cancelled: int
    redispatched: int
    upstream_retries: int
    affinity: int
    cold: int
    spilled: int
    _fields_ = [(name, ctypes.c_uint64) for name in (*COMPLETIONS, *FRACTIONS)]

    @classmethod
    def kept_in(cls, path: Path) -> "Counters":
        """Zeros, mapped into a new file of the supervisor's, which reads it when the proxy has ended.

        Raises:
            OSError: the file cannot be written.
        """
        path.write_bytes(bytes(ctypes.sizeof(cls)))
        with path.open("r+b") as file:
            return cls.from_buffer(mmap.mmap(file.fileno(), 0))

    @classmethod
    def read(cls, path: Path) -> "Counters":
        """What a proxy left in the file; zeros if it ended before it had one."""
        try:
            return cls.from_buffer_copy(path.read_bytes())
        except (FileNotFoundError, ValueError):
            return cls()

    def completions(self) -> dict[str, int]:
        """The completions of the status."""
        counts = {name: getattr(self, name) for name in COMPLETIONS}
        return {"in_flight": self.asked - self.answered - self.lost - self.cancelled, **counts}

    def routing(self) -> dict[str, Any]:
        """The decisions of the status: their number, and fractions of it (None before the first); a spilled completion
        is a cold one, too."""
        decisions = self.affinity + self.cold
        fractions = {name: getattr(self, name) / decisions if decisions else None for name in FRACTIONS}
        return {"decisions": decisions, **fractions}
