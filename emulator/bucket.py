"""The bucket of an emulation: moto's S3 server in a process of its own, in the manner of one profile."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import urllib.request
from dataclasses import dataclass, field
from typing import IO, Protocol

from emulator.front import DISTURB_PATH
from emulator.profiles import PROFILES
from emulator.tls import Certificate
from jobs import bundle
from jobs.bucket import BucketSettings

START_S = 20.0
"""A cold start of moto took 0.5 to 0.9 s on two cores; this is for a machine that is busy."""
BUCKET = "asyncgrpo"


class BucketDidNotStart(RuntimeError):
    """The server's process ended, or said nothing in time."""


class BucketServer(Protocol):
    """An S3 server that an emulator starts for itself. Its processes carry `mark`; it serves HTTPS if it has a
    `certificate`."""

    mark: dict[str, str]
    certificate: Certificate | None
    process: subprocess.Popen[str]

    def start(self) -> BucketSettings:
        """Start it and wait until its one bucket can be used. Raises BucketDidNotStart."""

    def stop(self) -> None:
        """End it and wait for that."""


def new_keys() -> tuple[str, str]:
    """An access key and its secret."""
    return f"AK{secrets.token_hex(9).upper()}", secrets.token_hex(20)


@dataclass
class MotoServer:
    """A fresh, empty S3 server with one bucket. It ends when `stop` is called or this process dies, however it dies."""

    profile: str = "hub"
    bucket: str = BUCKET
    mark: dict[str, str] = field(default_factory=dict)
    certificate: Certificate | None = None
    settings: BucketSettings = field(init=False)
    process: subprocess.Popen[str] = field(init=False)

    def start(self) -> BucketSettings:
        """Start it and wait until it listens and the bucket exists. Raises BucketDidNotStart."""
        profile = PROFILES[self.profile]
        access_key, secret_key = new_keys()
        session_token = secrets.token_hex(20) if profile.session_token else None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "emulator.moto_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **self.mark, "PYTHONPATH": str(bundle.app_dir())},
        )
        asked = {
            "bucket": self.bucket,
            "profile": profile.name,
            "access_key": access_key,
            "secret_key": secret_key,
            "session_token": session_token,
            "certificate": self.certificate and str(self.certificate.chain),
            "key": self.certificate and str(self.certificate.key),
        }
        _pipe(self.process.stdin).write(f"{json.dumps(asked)}\n")
        _pipe(self.process.stdin).flush()
        line = _pipe(self.process.stdout).readline()  # empty at its end: it died
        if not line:
            raise BucketDidNotStart(f"the bucket's server ended with status {self.process.wait()} before it listened")
        scheme = "https" if self.certificate else "http"
        self.settings = BucketSettings(
            url=f"s3://{self.bucket}",
            endpoint=f"{scheme}://127.0.0.1:{json.loads(line)['port']}/{profile.namespace}".rstrip("/"),
            access_key=access_key,
            secret_key=secret_key,
            session_token=session_token,
            region=(*profile.regions, "us-east-1")[0],
            ca_file=str(self.certificate.authorities) if self.certificate else None,
        )
        return self.settings

    def refuse(self, *, count: int = 0, seconds: float = 0.0, code: str = "SlowDown") -> None:
        """Make it answer 503 with this S3 error code to the next `count` requests and for the next `seconds`."""
        self._disturb(count=count, seconds=seconds, code=code)

    def disturb(self, *, rate: float = 0.0, lag_s: float = 0.0, seed: int = 0) -> None:
        """From now on refuse this fraction of all requests, and show new objects only `lag_s` after their PUT."""
        self._disturb(rate=rate, lag_s=lag_s, seed=seed)

    def tear(self, ending: str) -> None:
        """From now on refuse to write keys with this ending; with an empty one, write all again."""
        self._disturb(tear=ending)

    def torn(self) -> bool:
        """Whether a key was refused since `tear`."""
        return bool(self._disturb()["torn"])

    def _disturb(self, **settings: float | str) -> dict[str, bool]:
        body = json.dumps(settings).encode()
        scheme, _, rest = self.settings.endpoint.partition("://")
        request = urllib.request.Request(f"{scheme}://{rest.partition('/')[0]}{DISTURB_PATH}", body, method="POST")
        request.add_header("x-emulator-key", self.settings.access_key)
        context = self.certificate.client_context() if self.certificate else None
        with urllib.request.urlopen(request, timeout=START_S, context=context) as answer:
            told: dict[str, bool] = json.load(answer)
            return told

    def stop(self) -> None:
        """End it and wait for that."""
        _pipe(self.process.stdin).close()
        try:
            self.process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:  # it waits for a request under way
            self.process.kill()
            self.process.wait()
        _pipe(self.process.stdout).close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise BucketDidNotStart("the bucket's server was never started")
    return pipe
