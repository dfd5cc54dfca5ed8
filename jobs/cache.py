"""The directory for what can be made or fetched again: models, adapters, unpacked files."""

import os
import sys
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """Returns ASYNCGRPO_CACHE, else this platform's cache directory, else (home not writable) one under the temp dir.

    The directory exists on return. Files of other users are never trusted: the fallback belongs to this user alone.

    Raises:
        OSError: not even the temp directory can be written, or ASYNCGRPO_CACHE cannot.
    """
    if chosen := os.environ.get("ASYNCGRPO_CACHE"):
        Path(chosen).mkdir(parents=True, exist_ok=True)
        return Path(chosen).resolve()
    try:
        if sys.platform == "darwin":
            path = Path.home() / "Library" / "Caches" / "asyncgrpo"
        else:
            path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "asyncgrpo"
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK | os.X_OK):
            return path
    except (OSError, RuntimeError):  # read-only home, or none at all
        pass
    path = Path(tempfile.gettempdir()) / f"asyncgrpo-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user; set ASYNCGRPO_CACHE to a directory of your own")
    return path
