"""Labels: how any machine finds a run's Jobs again, and when a Job is overdue. Pure.

The Hub takes keys and values of at most 100 characters of `[A-Za-z0-9_-]` (docstring of huggingface_hub's
`update_job_labels`). Names that are longer, or have other characters, are shortened with a hash of the whole, so that
two of them never become one label.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jobs.errors import ConfigError
from jobs.names import check_run_name

LABEL_CHARS = 100
"""The Hub's limit; see above."""
RUN_CHARS = 63
"""The limit of `jobs.names.check_run_name`."""
HASH_CHARS = 12
"""48 bits of sha256: a million names collide with a probability of 0.2 %."""
RUN = "asyncgrpo-run"

_LABEL = re.compile(rf"[A-Za-z0-9_-]{{1,{LABEL_CHARS}}}")
_HASHED = re.compile(rf"-[0-9a-f]{{{HASH_CHARS}}}$")


@dataclass(frozen=True)
class Place:
    """What a Job's labels say: whose it is, which place it fills, and when it should be over (Unix seconds)."""

    run: str
    role: str
    index: int
    generation: int
    deadline: float | None


def label(value: str) -> str:
    """The label for any text: itself where the Hub takes it, else shortened with a hash.

    A text that looks as if it were shortened already is hashed too: it could be another text's label.
    """
    if _LABEL.fullmatch(value) and not _HASHED.search(value):
        return value
    kept = re.sub(r"[^A-Za-z0-9_-]+", "-", value)[: LABEL_CHARS - HASH_CHARS - 1].strip("-")
    return f"{kept}-{_hash(value)}"


def run_name(wanted: str) -> str:
    """The run's name for what a user calls it: itself if it can be one, else one made of it with a hash.

    Whoever names a run this way is to be told; the same words lead to the same name on every machine.

    Raises:
        ConfigError: nothing of it is left.
    """
    try:
        return check_run_name(wanted)
    except ConfigError:
        kept = re.sub(r"[^a-z0-9]+", "-", wanted.lower())[: RUN_CHARS - HASH_CHARS - 1].strip("-")
        if not kept:
            raise
        return f"{kept}-{_hash(wanted)}"


def of_job(run: str, role: str, index: int, generation: int, deadline: float) -> dict[str, str]:
    """The labels of one Job of a run, whose name is a label as it is. `generation` counts its place's Jobs, from 0."""
    return {
        RUN: run,
        "asyncgrpo-role": role,
        "asyncgrpo-index": str(index),
        "asyncgrpo-generation": str(generation),
        "asyncgrpo-deadline": str(int(deadline)),
    }


def read(labels: Mapping[str, str] | None) -> Place | None:
    """What a Job's labels say; None if they are none of ours, or not whole."""
    labels = labels or {}
    try:
        return Place(
            run=labels[RUN],
            role=labels["asyncgrpo-role"],
            index=int(labels["asyncgrpo-index"]),
            generation=int(labels["asyncgrpo-generation"]),
            deadline=float(labels["asyncgrpo-deadline"]) if "asyncgrpo-deadline" in labels else None,
        )
    except (KeyError, ValueError):
        return None


def _hash(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:HASH_CHARS]
