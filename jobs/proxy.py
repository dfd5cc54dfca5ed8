"""`role proxy`: one process that looks like one vLLM server and is a fleet of them. Assembly only.

It is rebuilt from the bucket and the replicas whenever it is started again; the supervisor holds the listening
socket, so clients only wait.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router

from jobs import processes
from jobs.asgi import Receive, Scope, Send, error_body, respond_error
from jobs.bucket import Bucket
from jobs.completions import Completions
from jobs.control import Control
from jobs.counters import Counters
from jobs.dispatch import Limits
from jobs.engine import Facts
from jobs.errors import ConfigError, NotFound
from jobs.fleet import Fleet
from jobs.http import GROUP_PREFIX, KEY_HEADER, upstream_headers
from jobs.links import Links
from jobs.pool import FleetPool
from jobs.proof import NOISE
from jobs.publish import Publisher
from jobs.recipe import Proxy
from jobs.replica_set import ReplicaSet
from jobs.spec import RunSpec, spec_key
from jobs.status import Metrics, status
from jobs.upstream import LISTENER_OPTIONS, tune_process
from jobs.version import Ack

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""What completions in flight get after SIGTERM: whoever asked for them is leaving, too."""
TRL_TIMEOUT_S = 1800.0
"""How long TRL waits for a load (TRL 1.16, `VLLMClient.load_lora_adapter`)."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ProxySettings:
    """All that a proxy is started with. `fd` is an inherited listening socket, and goes before `host` and `port`.

    `attempt` 0 and `output_dir` None: it publishes nothing, and serves proxies in front of it. `model` and `dtype`
    None: the first engine that answers decides. `promise` is what the trainer may be told before any engine is there.
    `counters` is a file that keeps the counts of completions when the process is killed.
    """

    run: str
    bucket: Bucket
    key: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    attempt: int = 0
    output_dir: Path | None = None
    host: str = LOOPBACK
    port: int = 0
    fd: int | None = None
    replicas: Mapping[str, str] = field(default_factory=dict)
    proxy: Proxy = field(default_factory=Proxy)
    model: str | None = None
    dtype: str | None = None
    promise: Facts | None = None
    group_prefix: str | None = None
    counters: Path | None = None

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str],
        replicas: Sequence[str] = (),
        host: str = LOOPBACK,
        port: int = 0,
        fd: int | None = None,
    ) -> "ProxySettings":
        """Settings from a Job's environment and from the run's specification, where the bucket has one.

        Raises:
            ConfigError: naming the variable or field that is missing or cannot be.
        """
        for name in ("ASYNCGRPO_RUN", "ASYNCGRPO_KEY"):
            if not environ.get(name):
                raise ConfigError(f"{name} is not set: the proxy of a run needs it. Set it.")
        bucket, run = Bucket.from_env(environ), environ["ASYNCGRPO_RUN"]
        try:
            spec = RunSpec.from_json(bucket.get(spec_key(run)))
        except NotFound:
            spec = None
        proxy = spec.recipe.proxy if spec else Proxy()
        if proxy.publish_deadline_s + proxy.load_deadline_s >= TRL_TIMEOUT_S:
            raise ConfigError(
                f"proxy.publish_deadline_s = {proxy.publish_deadline_s:g} and proxy.load_deadline_s = "
                f"{proxy.load_deadline_s:g}: together they must stay below {TRL_TIMEOUT_S:g} s, after which TRL gives "
                "up without a reason. Lower them."
            )
        # A publish is two rounds of calls, the files and the manifest; each may take half of the time.
        bucket = Bucket(bucket.settings, retry_s=proxy.publish_deadline_s / 2)
        output = environ.get("ASYNCGRPO_OUTPUT_DIR")
        return cls(
            run=run,
            bucket=bucket,
            key=environ["ASYNCGRPO_KEY"],
            # Without a gateway nobody needs the token, and nobody gets it.
            headers=upstream_headers(environ, gateway=spec is None or spec.recipe.jobs.network == "exposed"),
            attempt=int(environ.get("ASYNCGRPO_ATTEMPT") or 0),
            output_dir=Path(output) if output else None,
            host=host,
            port=port,
            fd=fd,
            replicas={f"r{index}": url for index, url in enumerate(replicas)},
            proxy=proxy,
            model=spec.model.served if spec else None,
            dtype=f"torch.{spec.recipe.model.dtype}" if spec and spec.recipe.model.dtype in NOISE else None,
            promise=promise(spec) if spec else None,
            group_prefix=environ.get(GROUP_PREFIX),
            counters=Path(counters) if (counters := environ.get("ASYNCGRPO_COUNTERS")) else None,
        )


def promise(spec: RunSpec) -> Facts | None:
    """What every engine of the run will offer, as far as the recipe says it; None if it leaves a part to vLLM.

    With it TRL need not wait for the first engine: it loads its model and starts its rollouts meanwhile.
    """
    flags, dtype = spec.recipe.replica.vllm, spec.recipe.model.dtype
    numbers = [flags.get(name) for name in ("max_model_len", "max_loras", "max_lora_rank")]
    length, slots, rank = (number if isinstance(number, int) else 0 for number in numbers)
    if dtype not in NOISE or not (length and slots and rank):
        return None
    return Facts(spec.model.served, f"torch.{dtype}", length, slots, rank)


def run(settings: ProxySettings) -> None:
    """Serves until SIGTERM or SIGINT. Ends with the process that started it, if ASYNCGRPO_PARENT names that."""
    if parent := os.environ.get("ASYNCGRPO_PARENT"):
        processes.die_with_parent(int(parent))
    listener = listen(settings)

    async def until_told() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        tune_process()
        await serve(settings, listener, stop)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(until_told())


def listen(settings: ProxySettings) -> socket.socket:
    """The listening socket: the inherited one, or a new one.

    Raises:
        ConfigError: the address cannot be had.
    """
    if settings.fd is not None:
        return socket.socket(fileno=settings.fd)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"--host {settings.host} --port {settings.port}: cannot listen there: {error}") from error


async def serve(settings: ProxySettings, listener: socket.socket, stop: asyncio.Event) -> None:
    """Recovers what was, then serves on `listener` until `stop` is set."""
    assembly = Assembly(settings, listener)
    options = {**LISTENER_OPTIONS, "lifespan": "off", "timeout_graceful_shutdown": int(GRACE_S)}
    server = Server(uvicorn.Config(assembly, **options))

    async def end() -> None:
        await stop.wait()
        server.should_exit = True

    try:
        await assembly.recover()
        async with asyncio.TaskGroup() as tasks:
            works = [tasks.create_task(work) for work in (end(), assembly.links.run(), assembly.replicas.run())]
            host, port = listener.getsockname()[:2]
            log.info("proxy of run %s, attempt %d, on http://%s:%d", settings.run, settings.attempt, host, port)
            await server.serve(sockets=[listener])
            for work in works:
                work.cancel()
    finally:
        await assembly.close()


class Server(uvicorn.Server):
    """Leaves signals to `run`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes none."""
        yield


class Assembly:
    """The parts of one proxy, and the ASGI application in front of them."""

    def __init__(self, settings: ProxySettings, listener: socket.socket) -> None:
        self.settings = settings
        self.boot_id = secrets.token_hex(8)
        proxy = settings.proxy
        self.fleet = Fleet(
            settings.run, settings.attempt, Ack(proxy.ack), proxy.load_deadline_s, settings.model, settings.dtype
        )
        self.fleet.promised = settings.promise
        self.pool = FleetPool(self.fleet)
        self.publisher = Publisher(settings.bucket, settings.run, settings.attempt, settings.key, settings.output_dir)
        counters = Counters.kept_in(settings.counters) if settings.counters else None
        self.completions = Completions(self.pool, settings.headers, _limits(proxy), counters=counters)
        self.links = Links(self.pool, self.publisher, settings.headers, self._in_flight)
        self.replicas = ReplicaSet(
            settings.bucket,
            settings.run,
            self.publisher,
            settings.replicas,
            self.links.replace,
            settings.group_prefix,
        )
        control = Control(self.pool, self.publisher, f"proxy of {settings.run}", self.boot_id)
        self._metrics = Metrics(self.status)
        routes = [
            *control.routes(),
            Route("/asyncgrpo/status", self._status),
            Route("/asyncgrpo/replicas", self._replicas, methods=["GET", "POST"]),
            Route("/metrics", self._scrape),
        ]
        self._paths = frozenset(route.path for route in routes)
        self._router = Router(routes, redirect_slashes=False)
        address = ipaddress.ip_address(listener.getsockname()[0])
        self._key = None if address.is_loopback else hashlib.sha256(settings.key.encode()).digest()

    async def recover(self) -> None:
        """Takes up what earlier processes of this proxy published in this attempt."""
        started = time.monotonic()
        if self.settings.attempt:
            for published in await self.publisher.recover():
                manifest = published.manifest
                self.fleet.recovered(manifest.wire_name, manifest.digest, published.state, published.words)
        if self.fleet.versions:
            log.info("%d versions recovered in %.2f s", len(self.fleet.versions), time.monotonic() - started)

    async def close(self) -> None:
        """Closes the sockets and writes what is to be written."""
        self.completions.close()
        await self.publisher.close()

    def _in_flight(self, engine: str) -> int:
        return int(self.completions.snapshot()["engines"].get(engine, {}).get("in_flight", 0))

    def status(self) -> dict[str, Any]:
        """The status of this moment."""
        snapshot = self.completions.snapshot()
        return status(self.pool, self.publisher, self.settings.bucket, snapshot, self.boot_id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request: the control plane's paths here, everything else as a completion or as it is."""
        if self._key is not None and not self._opens(scope):
            await respond_error(
                send, 401, f"This proxy answers only with its run's key in {KEY_HEADER}.", "Unauthorized"
            )
        elif scope["type"] == "http" and scope["path"] in self._paths:
            await self._router(scope, receive, send)
        else:
            await self.completions(scope, receive, send)

    def _opens(self, scope: Scope) -> bool:
        """Whether a request to a proxy that others can reach carries the run's key."""
        assert self._key is not None
        given = next((value for name, value in scope["headers"] if name == KEY_HEADER.encode()), b"")
        return hmac.compare_digest(hashlib.sha256(given).digest(), self._key)

    async def _status(self, request: Request) -> Response:
        return JSONResponse(self.status())

    async def _scrape(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _replicas(self, request: Request) -> Response:
        if request.method == "POST":
            try:
                self.replicas.name({str(name): str(url) for name, url in (await request.json())["replicas"].items()})
            except (ConfigError, ValueError, KeyError, TypeError, AttributeError) as error:
                words = str(error) if isinstance(error, ConfigError) else 'expected {"replicas": {name: url}}.'
                return JSONResponse(error_body(400, words, "BadRequestError"), 400)
        return JSONResponse({"replicas": self.replicas.urls})


def _limits(proxy: Proxy) -> Limits:
    """The fields of `Limits` that the recipe sets."""
    known = set(Limits.__dataclass_fields__)
    return Limits(**{name: value for name, value in vars(proxy).items() if name in known})


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
