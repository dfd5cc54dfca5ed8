"""Where this program lies on disk, and how it is started again.

The program is either a source checkout or what `asyncgrpo.pyz` unpacked into the cache at its first start. Both have
one shape: a folder with `asyncgrpo.py`, `jobs/` and `emulator/`. The unpacked one also has `bundled/`, third-party
packages for machines that lack them. Only the standard library is used here: it runs before any package is found.
"""

import sys
import zipfile
from pathlib import Path

BUNDLED = "bundled"
"""Folder of third-party packages inside an unpacked program; a source checkout has none."""


def app_dir() -> Path:
    """Return the folder that holds asyncgrpo.py, jobs/ and emulator/: what a child needs as PYTHONPATH."""
    return Path(__file__).resolve().parent.parent


def activate() -> None:
    """Make the bundled packages importable; packages of the environment win. Does nothing in a source checkout.

    They are appended, never inserted: vLLM and TRL must keep meeting the versions that they were installed with.
    """
    bundled = app_dir() / BUNDLED
    if bundled.is_dir() and str(bundled) not in sys.path:
        sys.path.append(str(bundled))


def command(*args: str) -> list[str]:
    """Return the command line that starts this program again with `args`, in this same interpreter.

    It names the unpacked program rather than the archive, so it works after the archive has been moved or deleted.
    """
    return [sys.executable, str(app_dir() / "asyncgrpo.py"), *args]


def archive() -> Path | None:
    """Return the `asyncgrpo.pyz` that this process was started from, to send to Jobs; None where it was not."""
    started = Path(sys.argv[0]).resolve()
    return started if (app_dir() / BUNDLED).is_dir() and zipfile.is_zipfile(started) else None


def version() -> str:
    """Return this program's version, such as "0.1.0"."""
    from jobs import __version__  # not at the top: the package imports this module while it is being set up

    return __version__
