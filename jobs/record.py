"""What a run leaves in the directory of whoever followed it: `runs/<run>/`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.errors import ConfigError

SUMMARY = "summary.json"


def folder(run: str) -> Path:
    """The run's folder below the current directory, made if it is not there.

    Raises:
        ConfigError: it cannot be made.
    """
    path = Path("runs", run)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}. Each run leaves its summary there: go to a directory that you may write to."
        ) from error
    return path


def write(path: Path, summary: Mapping[str, Any]) -> None:
    """Writes the summary of a run, done or failed, into its folder."""
    (path / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")


def read(path: Path) -> dict[str, Any] | None:
    """The summary in a run's folder, if there is one."""
    try:
        found: dict[str, Any] = json.loads((path / SUMMARY).read_bytes())
        return found
    except FileNotFoundError:
        return None


def since(began_at: float, at: float | None) -> float | None:
    """Seconds from the start of a command to something in its run; None if that has not been, or was before."""
    return round(at - began_at, 2) if at is not None and at >= began_at else None
