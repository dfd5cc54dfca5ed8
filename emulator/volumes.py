"""A Job's volumes as directories: buckets follow what others write, repositories are copies."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from emulator.jobs_state import Volume
from emulator.live_mount import Lag, LiveMount
from jobs.bucket import BucketSettings


class NoSuchVolume(LookupError):
    """The bucket, repository or folder to be mounted does not exist: the Hub fails such a Job."""


def in_s3(settings: BucketSettings, source: str) -> BucketSettings:
    """Where the Hub's bucket `namespace/name` lies in S3.

    In the manner of the Hub's own gateway the namespace is the endpoint's path; other stores have no namespaces.
    """
    namespace, _, name = source.rpartition("/")
    endpoint = urlsplit(settings.endpoint)
    if namespace and endpoint.path.strip("/"):
        endpoint = endpoint._replace(path=f"/{namespace}")
    return replace(settings, url=f"s3://{name}", endpoint=endpoint.geturl())


class Volumes:
    """Mounts volumes. `repositories` maps "model:org/name" to a local directory; `lag` is the buckets'."""

    def __init__(self, bucket: BucketSettings, repositories: Mapping[str, Path], lag: Lag) -> None:
        self.bucket = bucket
        self.repositories = repositories
        self.lag = lag

    def mount(self, volume: Volume, directory: Path, seed: int = 0) -> LiveMount | None:
        """Make `directory` show a volume; a bucket's goes on with the returned mount's `step` and `flush`.

        Raises NoSuchVolume or BucketError.
        """
        if volume.type != "bucket":
            source = self.repositories.get(f"{volume.type}:{volume.source}")
            if source is None or not (source / (volume.path or "")).is_dir():
                raise NoSuchVolume(f"{volume.type} {volume.source}: not found")
            shutil.copytree(source / (volume.path or ""), directory)
            return None
        where = in_s3(self.bucket, volume.source)
        where = replace(where, url=f"{where.url}/{volume.path or ''}".rstrip("/"))
        mount = LiveMount(where, directory, volume.writable, self.lag, seed)
        if not mount.fill() and volume.path:
            raise NoSuchVolume(f"bucket {volume.source}: no folder {volume.path!r}")
        return mount
