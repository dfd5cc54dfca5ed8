"""The emulator: bucket, Hub, gateway and reaper under one roof, in a thread of its own.

    with Emulator() as emulator:
        os.environ.update(emulator.environment())

Whatever way it ends, nothing of it remains: `stop` cancels the Jobs and closes the ports, and should this process die
instead, the reaper (a process of its own that notices) ends the Jobs' processes and removes their files, and the
bucket's server ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import uvicorn
import uvloop

from emulator import leftovers, reaper, tls
from emulator.bucket import BucketServer, MotoServer
from emulator.bucket_programs import ProgramServer
from emulator.fuse import FuseServer, NoFuse
from emulator.gateway import BODY_LIMIT_BYTES, Gateway, drop
from emulator.hub import QUOTA_CALLS, Hub
from emulator.hub_buckets import HubBuckets
from emulator.job_environment import IMAGES, Image
from emulator.jobs_state import Owner
from emulator.live_mount import LAG, Lag
from emulator.ports import LOOPBACK
from emulator.runner import GRACE_S, Runner
from emulator.slots import Slots
from emulator.volumes import Volumes
from jobs.bucket import BucketSettings

CPU_JOBS = 64
"""Jobs without GPUs at a time: they share this machine's processors, so the bound is memory's."""
NAMESPACE, ORGANIZATION = "local", "local-team"
"""The user whose token it is, and an organisation that the user may run Jobs for."""
START_S = 20.0
STOP_MARGIN_S = 15.0

T = TypeVar("T")


class DidNotStart(RuntimeError):
    """The emulator's thread failed or took too long."""


class Emulator:
    """A local Hub with its bucket. Several can run side by side; each has its own ports, token, bucket and files.

    `bucket` is an S3 bucket that exists, or a server to start; moto as strict as the Hub's gateway if left out. With
    `https`, Hub, exposed ports and the bucket's server speak HTTPS, under an authority that the Jobs trust. `devices`
    are CUDA devices that GPU Jobs share; without any, GPU Jobs run on the CPU. `logs` is where the Jobs' logs are kept;
    they are temporary otherwise. `repositories` maps "model:org/name" to a local directory for volumes of that type.
    `lag` is how late a mounted bucket shows what others wrote; `mounts` says how it is mounted.
    """

    def __init__(
        self,
        *,
        bucket: BucketSettings | BucketServer | None = None,
        https: bool = False,
        devices: Iterable[str] = (),
        cpu_jobs: int = CPU_JOBS,
        logs: Path | None = None,
        images: Mapping[str, Image] = IMAGES,
        repositories: Mapping[str, Path] | None = None,
        grace_s: float = GRACE_S,
        body_limit_bytes: int = BODY_LIMIT_BYTES,
        quota_calls: int = QUOTA_CALLS,
        lag: Lag = LAG,
        port: int = 0,
    ) -> None:
        self.token = f"hf_{secrets.token_hex(17)}"
        self.mark = secrets.token_hex(16)
        self.owner = Owner(NAMESPACE, secrets.token_hex(12))
        self.team = Owner(ORGANIZATION, secrets.token_hex(12), "org")
        self.endpoint = ""
        self.mounts = "none before it is started"
        self.certificate: tls.Certificate | None = None
        self.server: BucketServer | None = None
        self._bucket: BucketSettings | None = None
        if isinstance(bucket, BucketSettings):
            self._bucket = bucket
        else:
            self.server = bucket or MotoServer()
            self.server.mark = {reaper.MARK: self.mark}
        self._https = https
        self._slots = Slots(cpu_jobs, devices)
        self._logs = logs
        self._images = images
        self._repositories = repositories or {}
        self._grace_s = grace_s
        self._body_limit_bytes = body_limit_bytes
        self._quota_calls = quota_calls
        self._lag = lag
        self._port = port
        self._lock: int | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._stop = asyncio.Event()
        self._left: list[int] = []
        self._fuse: FuseServer | None = None

    _loop: asyncio.AbstractEventLoop
    _reaper: subprocess.Popen[str]
    runner: Runner
    hub: Hub
    gateway: Gateway
    root: Path

    def __enter__(self) -> Emulator:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything; on return, Jobs can be created. Raises DidNotStart or BucketDidNotStart."""
        leftovers.sweep(Path(tempfile.gettempdir()))
        self.root = Path(tempfile.mkdtemp(prefix=leftovers.PREFIX))
        self._lock = leftovers.claim(self.root, self.mark)
        self._reaper = self._start_reaper(self._lock)
        self._tell({"directory": str(self.root)})
        try:
            self._begin_fuse()
            if self._https:
                self.certificate = tls.issue(self.root / "tls")
            if self.server:
                self.server.certificate = self.certificate
                if isinstance(self.server, ProgramServer):
                    self.server.parent = self.root
                self._bucket = self.server.start()
                self._tell({"group": self.server.process.pid})
            self._await_fuse()
            self._loop = uvloop.new_event_loop()
            # A daemon: if `stop` is never called, this process can end nevertheless, and the reaper does the rest.
            self._thread = threading.Thread(target=self._serve, name="emulator", daemon=True)
            self._thread.start()
            if not self._ready.wait(START_S) or self._failure:
                raise DidNotStart(f"the emulator did not start: {self._failure or f'not ready in {START_S} s'}")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> list[int]:
        """Cancel all Jobs, close all ports, remove all files. Returns processes left over, which had to be killed.

        May be called more than once.
        """
        if self._thread:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the thread failed
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(self._grace_s + STOP_MARGIN_S)
            self._thread = None
            self._left = self.orphans()
        if self.server and hasattr(self.server, "process"):
            self.server.stop()
        if self._fuse:
            self._fuse.stop()
            self._fuse = None
        if self._reaper.stdin and not self._reaper.stdin.closed:
            self._reaper.stdin.close()
            self._reaper.wait()
        shutil.rmtree(self.root, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        return self._left

    def orphans(self) -> list[int]:
        """Living processes of this emulator's Jobs; after `stop`, what it found still alive at the end."""
        if self._thread is None:
            return self._left
        own = {server.process.pid for server in (self.server, self._fuse) if server}
        return [pid for pid in reaper.marked(self.mark) if pid not in own]

    @property
    def moto(self) -> MotoServer | None:
        """The bucket's server if it is one that can be told to misbehave."""
        return self.server if isinstance(self.server, MotoServer) else None

    def environment(self) -> dict[str, str]:
        """The variables that point `huggingface_hub`, the `hf` command, S3 clients and asyncgrpo's launcher here."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": self.token,
            **self.bucket.environment(),
            **self.bucket.secrets(),
            **(self.certificate.environment() if self.certificate else {}),
        }

    @property
    def bucket(self) -> BucketSettings:
        """Where the bucket is and what opens it."""
        if self._bucket is None:
            raise DidNotStart("the emulator has no bucket before it is started")
        return self._bucket

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the emulator's event loop, where the Hub, runner and gateway live, and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def pids(self, job_id: str) -> list[int]:
        """The living processes of a Job."""
        return self.runner.pids(self.runner.table.get(self.owner.name, job_id))

    def signal(self, job_id: str, signum: int) -> None:
        """Send a signal to a Job as a fault: SIGKILL is a machine that dies, SIGSTOP one that hangs, SIGTERM preempts.

        SIGTERM reaches the first process alone, as in a container; the others reach all. None reaches a Job of an
        emulator that has stopped.
        """
        job = self.runner.table.get(self.owner.name, job_id)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.runner.send, job, signum)

    def _start_reaper(self, lock: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(reaper.__file__)), self.mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal is not for it
            env={"PATH": os.defpath},
            pass_fds=[lock],
        )

    def _tell(self, message: dict[str, Any]) -> None:
        if self._reaper.stdin:
            self._reaper.stdin.write(json.dumps(message) + "\n")
            self._reaper.stdin.flush()

    def _begin_fuse(self) -> None:
        fuse = FuseServer(self.root / "mirrors", self.root / "mounts", self._lag, {reaper.MARK: self.mark})
        try:
            fuse.start()
        except NoFuse as reason:
            self.mounts = f"mirrors: {reason}"
        else:
            self._fuse = fuse
            self._tell({"mount": str(fuse.target)})

    def _await_fuse(self) -> None:
        if self._fuse:
            try:
                self._fuse.wait()
                self.mounts = "FUSE"
            except NoFuse as reason:
                self.mounts = f"mirrors: {reason}"
                self._fuse = None

    def _report(self, group: int, alive: bool) -> None:
        self._tell({"group" if alive else "forget": group})

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as failure:
            self._failure = failure
        finally:
            self._ready.set()
            self._loop.close()

    async def _main(self) -> None:
        listener = socket.create_server((LOOPBACK, self._port))
        trusted = self.certificate
        self.endpoint = f"{'https' if trusted else 'http'}://{LOOPBACK}:{listener.getsockname()[1]}"
        logs = self._logs or self.root / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.gateway = Gateway(self.token, self._body_limit_bytes, trusted.server_context() if trusted else None)
        more = trusted.environment() if trusted else {}
        images = {
            pattern: replace(image, environment={**more, **image.environment})
            for pattern, image in self._images.items()
        }
        self.runner = Runner(
            self.root,
            logs,
            self.gateway,
            Volumes(
                self.bucket,
                self._repositories,
                self._lag,
                self.root / "mirrors",
                self._fuse.target if self._fuse else None,
            ),
            self._slots,
            self.mark,
            self._report,
            images,
            self._grace_s,
        )
        buckets = HubBuckets(self.bucket, self.root / "xet", self.endpoint, self.owner.name)
        self.hub = Hub(self.runner, buckets, self.owner, self.team, self.token, self._quota_calls)
        server = uvicorn.Server(
            uvicorn.Config(
                self.hub,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=1,
                ssl_certfile=trusted.chain if trusted else None,
                ssl_keyfile=trusted.key if trusted else None,
            )
        )
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        self._ready.set()
        await self._stop.wait()
        await self.runner.close()
        server.should_exit = server.force_exit = True
        await serving
        drop(server.server_state)
        await self.gateway.close()
