"""Real S3 servers that the bucket's client is tested against, by name."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from emulator import tls
from emulator.bucket import MotoServer
from emulator.bucket_programs import PROGRAMS, ProgramServer, find
from jobs.bucket import BucketSettings
from jobs.errors import ConfigError
from tests.conftest import MotoBucket


def installed(name: str) -> bool:
    """Whether the program is on this machine."""
    try:
        find(name)
    except ConfigError:
        return False
    return True


STORES = [
    *("moto", "hub", "hub over tls", "aws", "r2", "minio's manner"),
    *(name for name in PROGRAMS if installed(name)),
]
PAGE_KEYS = 40
"""Keys in a page of moto's lists in these tests; the programs have S3's 1,000."""


@contextmanager
def serve(name: str, directory: Path, plain: Callable[[], MotoBucket]) -> Iterator[BucketSettings]:
    """Runs a store for as long as the context lasts."""
    if name == "moto":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("moto.settings.get_s3_default_max_keys", lambda: PAGE_KEYS)
            yield BucketSettings.from_env(plain().environ)
        return
    certificate = tls.issue(directory) if name.endswith("over tls") else None
    profile = re.split(r"\W", name)[0]
    server = ProgramServer(name) if name in PROGRAMS else MotoServer(profile, certificate=certificate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", str(PAGE_KEYS))
        settings = server.start()
    try:
        yield settings
    finally:
        server.stop()
