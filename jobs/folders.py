"""A folder of files in the bucket: file by file, the list of them last, so that a torn one is never taken for whole."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs.bucket import Bucket
from jobs.errors import ConfigError

COMPLETE = "complete.json"


def send(bucket: Bucket, prefix: str, directory: Path, **more: Any) -> None:
    """Uploads a directory below `prefix/`; `more` stands in the list beside its files."""
    files = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = path.relative_to(directory).as_posix()
        bucket.put_file(f"{prefix}/{name}", path)
        files[name] = {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    bucket.put(f"{prefix}/{COMPLETE}", json.dumps({**more, "files": files}).encode())


def listed(bucket: Bucket, prefix: str, within_s: float = 0.0) -> Iterator[tuple[str, int, str]]:
    """Name, size and sha256 of each file that a whole folder has.

    Raises:
        NotFound: there is none, or its upload never finished; not within `within_s`.
        ConfigError: a name leaves the folder.
    """
    for name, file in bucket.get_json(f"{prefix}/{COMPLETE}", within_s)["files"].items():
        if name.startswith("/") or ".." in name.split("/"):
            raise ConfigError(f"{prefix}: file name {name!r} leaves its folder.")
        yield name, int(file["size"]), str(file["sha256"])


def receive(bucket: Bucket, prefix: str, directory: Path, within_s: float = 0.0) -> None:
    """Downloads and verifies a whole folder into `directory`; raises what `listed` does, and ConfigError for a file
    that is another one than the list says."""
    for name, size, sha256 in listed(bucket, prefix, within_s):
        bucket.get_file(f"{prefix}/{name}", directory / name)
        data = (directory / name).read_bytes()
        if len(data) != size or hashlib.sha256(data).hexdigest() != sha256:
            raise ConfigError(f"{prefix}: {name} is not what {COMPLETE} says.")
