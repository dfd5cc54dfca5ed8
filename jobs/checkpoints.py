"""Checkpoints in the bucket: file by file, the list of files last, so that a torn one is never resumed from."""

import hashlib
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from jobs import folders
from jobs.bucket import Bucket
from jobs.errors import ConfigError, NotFound
from jobs.folders import COMPLETE

log = logging.getLogger(__name__)

NEEDED = ("trainer_state.json", "rollout_state.json", "adapter_model.safetensors", "adapter_config.json")
"""Files without which TRL cannot go on where it was (transformers' Trainer, and AsyncGRPO's own rollout_state.json)."""
WHOLE, SHARDED = ("optimizer.pt",), ("pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata")
"""What is needed besides: either one file, or, of several processes under FSDP2, the lists of their shards."""

_STEP = re.compile(r"checkpoint-([0-9]+)")


@dataclass(frozen=True)
class Found:
    """The checkpoint to resume from, and why newer ones were passed over."""

    step: int
    skipped: dict[int, str]


def prefix(run: str, step: int) -> str:
    """Where a checkpoint's files lie, without the last '/'."""
    return f"runs/{run}/checkpoints/checkpoint-{step}"


def upload(bucket: Bucket, run: str, directory: Path) -> int:
    """Uploads a checkpoint that is complete on disk; returns its step."""
    match = _STEP.fullmatch(directory.name)
    if not match:
        raise ConfigError(f"{directory} is no checkpoint: its name must be checkpoint-<step>.")
    step = int(match[1])
    folders.send(bucket, prefix(run, step), directory, step=step)
    return step


def find_latest(bucket: Bucket, run: str) -> Found | None:
    """The newest complete checkpoint of the run; None if the run has none at all.

    Raises:
        ConfigError: there are checkpoints and none is complete; says what each one lacks.
    """
    root = f"runs/{run}/checkpoints/"
    steps: dict[int, set[str]] = {}
    for key in bucket.list(root):
        folder, _, name = key.removeprefix(root).partition("/")
        if match := _STEP.fullmatch(folder):
            steps.setdefault(int(match[1]), set()).add(name)
    skipped: dict[int, str] = {}
    for step in sorted(steps, reverse=True):
        why = _incomplete(bucket, run, step, steps[step])
        if why is None:
            return Found(step, skipped)
        skipped[step] = why
    if skipped:
        told = "; ".join(f"checkpoint-{step}: {why}" for step, why in skipped.items())
        raise ConfigError(f"run {run}: none of its checkpoints is complete ({told}). Start a new run, or repair one.")
    return None


def fetch(bucket: Bucket, run: str, step: int, directory: Path) -> Path:
    """Downloads and verifies a checkpoint into `directory`; returns the folder, named as TRL expects it."""
    target = directory / f"checkpoint-{step}"
    folders.receive(bucket, prefix(run, step), target)
    return target


def _incomplete(bucket: Bucket, run: str, step: int, present: set[str]) -> str | None:
    optimizer = SHARDED if present.intersection(SHARDED) else WHOLE
    if missing := [name for name in (*NEEDED, *optimizer) if name not in present]:
        return f"{missing[0]} is missing"
    if COMPLETE not in present:
        return f"its upload never finished (no {COMPLETE})"
    try:
        for name, size, sha256 in folders.listed(bucket, prefix(run, step)):
            data = bucket.get(f"{prefix(run, step)}/{name}")
            if len(data) != size or hashlib.sha256(data).hexdigest() != sha256:
                return (
                    f"{name} has {len(data)} bytes and not the {size} it was saved with"
                    if len(data) != size
                    else f"{name} has other bytes"
                )
    except NotFound as error:
        return f"{error.key.rpartition('/')[2]} is missing"
    return None
