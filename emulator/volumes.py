"""A Job's volumes as directories: buckets follow what others write, repositories are copies.

Each is a mirror below one directory, and is shown to the Job through a FUSE mount of that, if there is one.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from emulator.fuse_server import READ_ONLY, WRITABLE
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
    """Mounts volumes of Jobs.

    `repositories` maps "model:org/name" to a local directory; `lag` is the buckets'. `mirrors` is a directory of its
    own; `shown` is where a FUSE server shows it, or None.
    """

    def __init__(
        self,
        bucket: BucketSettings,
        repositories: Mapping[str, Path],
        lag: Lag,
        mirrors: Path,
        shown: Path | None = None,
    ) -> None:
        self.bucket = bucket
        self.repositories = repositories
        self.mirrors = mirrors
        self.shown = shown or mirrors
        # Who looked up what was missing is known to the FUSE server.
        self.lag = replace(lag, missing_s=0.0) if shown else lag

    def place(self, job_id: str, volume: Volume) -> Path:
        """Where a Job finds its volume on this machine."""
        return self.shown / _below(job_id, volume)

    def mount(self, job_id: str, volume: Volume, seed: int = 0) -> LiveMount | None:
        """Make a Job's volume; a bucket's goes on with the returned mount's `step` and `flush`.

        Raises NoSuchVolume or BucketError.
        """
        directory = self.mirrors / _below(job_id, volume)
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

    def remove(self, job_id: str) -> None:
        """The Job is over: remove its mirrors."""
        for kind in (READ_ONLY, WRITABLE):
            shutil.rmtree(self.mirrors / kind / job_id, ignore_errors=True)


def _below(job_id: str, volume: Volume) -> Path:
    name = volume.mount_path.strip("/").replace("/", "--")
    return Path(WRITABLE if volume.writable else READ_ONLY, job_id, name)
