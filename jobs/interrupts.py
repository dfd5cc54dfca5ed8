"""SIGTERM and SIGHUP end a command as Ctrl-C does: with nothing left behind."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within it, the first of these signals raises KeyboardInterrupt. A second one does not interrupt the ending."""
    ending = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not ending.is_set():
            ending.set()
            raise KeyboardInterrupt

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(each, interrupt) for each in signals]
    try:
        yield
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)
