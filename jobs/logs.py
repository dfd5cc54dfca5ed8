"""Log lines of a role: plain, on stderr, one format for all. A run outlives whoever read them."""

import contextlib
import logging
import os
import sys
from typing import Any, TextIO, cast


class Forgiving:
    """A stream that cannot be written to any more loses what is written, and nobody is the worse for it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes the text if that is possible. Returns its length."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream if that is possible."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_readers() -> None:
    """Makes this process one that goes on when its stderr is closed, full, or a pipe that nobody reads any more.

    Descriptors 0 to 2 that are closed lead to the null device from now on, or the next files would be opened as them,
    and children would write into those.
    """
    for standard in range(3):
        try:
            os.fstat(standard)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(standard, True)
    stream = sys.stderr or os.fdopen(2, "w", closefd=False)
    if not isinstance(stream, Forgiving):
        sys.stderr = cast(TextIO, Forgiving(stream))


def to_stderr(level: int = logging.INFO) -> None:
    """Sends this program's log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for package in ("jobs", "emulator"):
        logging.getLogger(package).setLevel(level)
