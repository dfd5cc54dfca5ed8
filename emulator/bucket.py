"""The bucket of an emulation: moto's S3 server in a process of its own, or any S3 endpoint that is already there."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import urllib.request
from dataclasses import dataclass, field
from typing import IO

from emulator.moto_server import DISTURB_PATH
from jobs import bundle
from jobs.bucket import BucketSettings

START_S = 20.0
"""A cold start of moto took 0.5 to 0.9 s on two cores; this is for a machine that is busy."""
REGION = "us-east-1"
BUCKET = "asyncgrpo"


class BucketDidNotStart(RuntimeError):
    """The server's process ended, or said nothing in time."""


@dataclass
class MotoServer:
    """A fresh, empty S3 server with one bucket. It ends when `stop` is called or this process dies, however it dies."""

    bucket: str = BUCKET
    mark: dict[str, str] = field(default_factory=dict)
    settings: BucketSettings = field(init=False)
    process: subprocess.Popen[str] = field(init=False)

    def start(self) -> BucketSettings:
        """Start it and wait until it listens and the bucket exists. Raises BucketDidNotStart."""
        access_key, secret_key = f"AK{secrets.token_hex(9).upper()}", secrets.token_hex(20)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "emulator.moto_server", self.bucket, access_key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **self.mark, "PYTHONPATH": str(bundle.app_dir()), "AWS_SECRET_ACCESS_KEY": secret_key},
        )
        line = _pipe(self.process.stdout).readline()  # empty at its end: it died
        if not line:
            raise BucketDidNotStart(f"the bucket's server ended with status {self.process.wait()} before it listened")
        self.settings = BucketSettings(
            url=f"s3://{self.bucket}",
            endpoint=f"http://127.0.0.1:{json.loads(line)['port']}",
            access_key=access_key,
            secret_key=secret_key,
            region=REGION,
        )
        return self.settings

    def refuse(self, *, count: int = 0, seconds: float = 0.0, code: str = "SlowDown") -> None:
        """Make it answer 503 with this S3 error code to the next `count` requests and for the next `seconds`."""
        self._disturb(count=count, seconds=seconds, code=code)

    def disturb(self, *, rate: float = 0.0, lag_s: float = 0.0, seed: int = 0) -> None:
        """From now on refuse this fraction of all requests, and show new objects only `lag_s` after their PUT."""
        self._disturb(rate=rate, lag_s=lag_s, seed=seed)

    def _disturb(self, **settings: float | str) -> None:
        body = json.dumps(settings).encode()
        request = urllib.request.Request(f"{self.settings.endpoint}{DISTURB_PATH}", body, method="POST")
        request.add_header("x-emulator-key", self.settings.access_key)
        urllib.request.urlopen(request, timeout=START_S).close()

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
