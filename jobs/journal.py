"""The training child's journal: `metrics.jsonl` in the output directory, one JSON object a line, in order of writing.

A line with `step` and without `event` holds the metrics of an optimizer step; a line with `event` tells something else:
`phase` (name), `planned` (max_steps), `saved` (path of a checkpoint that is complete on disk), `reward_error`
(function, count, error).
Every line has `time`, in Unix seconds. The rollout process writes here too: a line is one append, so none is torn.
"""

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OUTPUT_DIR = "ASYNCGRPO_OUTPUT_DIR"
"""Environment variable with the directory that the training child writes to."""


def append(row: Mapping[str, Any]) -> None:
    """Appends one line; to stderr if there is no output directory. What is no finite number becomes null."""
    line = json.dumps({**{key: _plain(value) for key, value in row.items()}, "time": time.time()}) + "\n"
    if directory := os.environ.get(OUTPUT_DIR):
        file = os.open(Path(directory) / "metrics.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
    else:
        sys.stderr.write(line)
        sys.stderr.flush()


def phase(name: str) -> None:
    """Notes when a phase of the start was over: `imported`, `built` (the server is there too), `started` (rollouts)."""
    append({"event": "phase", "name": name})


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | str) or value is None:
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None
