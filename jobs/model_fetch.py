"""Brings a run's base model to this machine."""

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from jobs.bucket import SHOWN_S, Bucket
from jobs.cache import cache_dir
from jobs.errors import ConfigError, RunFailed
from jobs.spec import ModelRef

AGAIN_S = 1.0
"""Before a model that was not whole is fetched again."""


def obtain(model: ModelRef, bucket: Bucket, environ: Mapping[str, str]) -> str:
    """What to load the model by: an id on the Hub, which vLLM and transformers fetch themselves, or a directory.

    A model in the bucket is fetched to the cache, once for all processes of this machine, and used only if its files
    are those that its prefix is named for.

    Raises:
        ConfigError: the directory is not there.
        RunFailed: the bucket holds other files than the prefix says.
        BucketError: it cannot be read.
    """
    if model.kind == "hub":
        return model.source
    if model.kind == "path":
        if not Path(model.source, "config.json").is_file():
            raise ConfigError(f"model.id = {model.source!r}: no config.json there. It must be on every machine.")
        return model.source
    expected = model.source.rpartition("/")[2]
    directory = Path(environ.get("ASYNCGRPO_CACHE") or cache_dir()) / "models" / f"bucket-{expected}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory.with_suffix(".lock"), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        deadline = time.monotonic() + SHOWN_S
        while not directory.is_dir():
            try:
                _fetch(model.source, bucket, directory, expected)
            except RunFailed:  # it may be that the bucket does not show all of it yet
                if time.monotonic() >= deadline:
                    raise
                time.sleep(AGAIN_S)
    finally:
        os.close(lock)
    return str(directory)


def hub_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a process that reads models or data sets from the Hub.

    ASYNCGRPO_HUB names that Hub where it is not the one that runs the Jobs: the emulator has Jobs alone, and its token
    opens nothing elsewhere.
    """
    hub = environ.get("ASYNCGRPO_HUB")
    if not hub:
        return dict(environ)
    return {name: value for name, value in environ.items() if name != "HF_TOKEN"} | {"HF_ENDPOINT": hub}


def weights_bytes(model: str) -> int | None:
    """Size of the weights in a model's directory; None for an id on the Hub."""
    files = list(Path(model).glob("*.safetensors"))
    return sum(path.stat().st_size for path in files) if files else None


def digest(directory: Path) -> str:
    """Names a model by its content: the start of the sha256 over its files' paths and digests."""
    whole = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{path.relative_to(directory)} {content}\n".encode())
    return whole.hexdigest()[:16]


def _fetch(prefix: str, bucket: Bucket, directory: Path, expected: str) -> None:
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        staging.chmod(0o755)
        for key in bucket.list(f"{prefix}/"):
            path = (staging / key.removeprefix(f"{prefix}/")).resolve()
            if not path.is_relative_to(staging.resolve()):
                raise RunFailed(f"the model {prefix} holds {key!r}, which is no path below it.")
            bucket.get_file(key, path)
        if (found := digest(staging)) != expected:
            raise RunFailed(f"the model {prefix} in the bucket is damaged: its files have digest {found}.")
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
