"""A Job's volumes: copied into its directory at the start, and what it wrote copied back at the end.

Files appear whole at the start and are durable at the end. It is not a live mount: what another Job writes meanwhile is
not seen.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from emulator.jobs_state import Volume
from jobs.bucket import Bucket, BucketSettings

Snapshot = dict[str, tuple[int, int]]
"""Relative path -> (size, modification time in ns) of a file."""


class NoSuchVolume(LookupError):
    """The bucket, repository or folder to be mounted does not exist: the Hub fails such a Job."""


def snapshot(directory: Path) -> Snapshot:
    """All files below a directory."""
    return {
        str(path.relative_to(directory)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in directory.rglob("*")
        if path.is_file()
    }


def changed(before: Snapshot, after: Snapshot) -> list[str]:
    """Files that are new or differ in size or time."""
    return sorted(name for name, stat in after.items() if before.get(name) != stat)


class Volumes:
    """Fills and empties directories. `repositories` maps "model:org/name" to a local directory."""

    def __init__(self, bucket: BucketSettings, repositories: Mapping[str, Path]) -> None:
        self.bucket = bucket
        self.repositories = repositories

    def _open(self, volume: Volume) -> Bucket:
        # A bucket of the Hub is `namespace/name`; in the S3 gateway the namespace is part of the endpoint.
        name = volume.source.rpartition("/")[2]
        return Bucket(replace(self.bucket, url=f"s3://{name}/{volume.path or ''}".rstrip("/")))

    def fetch(self, volume: Volume, directory: Path) -> Snapshot:
        """Copy a volume into a new directory; returns what is there now. Raises NoSuchVolume or BucketError."""
        if volume.type == "bucket":
            directory.mkdir(parents=True)
            bucket = self._open(volume)
            keys = [key for key in bucket.list("") if not key.endswith("/")]
            if volume.path and not keys:
                raise NoSuchVolume(f"bucket {volume.source}: no folder {volume.path!r}")
            for key in keys:
                bucket.get_file(key, directory / key)
        else:
            source = self.repositories.get(f"{volume.type}:{volume.source}")
            if source is None or not (source / (volume.path or "")).is_dir():
                raise NoSuchVolume(f"{volume.type} {volume.source}: not found")
            shutil.copytree(source / (volume.path or ""), directory)
        return snapshot(directory)

    def store(self, volume: Volume, directory: Path, before: Snapshot) -> None:
        """Copy what was written since `before` to the bucket, and remove what was deleted."""
        after = snapshot(directory)
        bucket = self._open(volume)
        for name in changed(before, after):
            bucket.put_file(name, directory / name)
        bucket.delete(name for name in before if name not in after)
