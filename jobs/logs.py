"""Log lines of a role: plain, on stderr, one format for all."""

import logging
import sys


def to_stderr(level: int = logging.INFO) -> None:
    """Sends this program's log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for package in ("jobs", "emulator"):
        logging.getLogger(package).setLevel(level)
