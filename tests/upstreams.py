"""Engines whose every move a test decides, and the proxy's data plane in front of them, all in the test's own loop."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web

from jobs.completions import Completions
from jobs.dispatch import Limits
from jobs.upstream import LISTENER_OPTIONS, PoolListener, UnknownModel, VersionFailed

BASE = "base-model"
V1, V2 = "run.1.v1", "run.1.v2"
PUBLIC = {V1: "trl-policy-v1", V2: "trl-policy-v2"}
KEY = {"x-asyncgrpo-key": "the-key", "authorization": "Bearer hf_ours"}

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse | None]]


def answer(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A completion as vLLM answers it: one token for each of `max_tokens`."""
    tokens = body.get("max_tokens", 16) if isinstance(body.get("max_tokens", 16), int) else 16
    ids = list(range(tokens))
    choices = [
        {
            "index": index,
            "text": "x" * tokens,
            "logprobs": {"token_logprobs": [-0.5] * tokens, "tokens": ["x"] * tokens},
            "finish_reason": "length",
            "token_ids": ids,
        }
        for index in range(body.get("n", 1))
    ]
    prompt = body.get("prompt")
    length = len(prompt) if isinstance(prompt, list | str) else 0
    usage = {"prompt_tokens": length, "completion_tokens": tokens, "total_tokens": length + tokens}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": body.get("model"),
        "choices": choices,
        "usage": usage,
    } | changes


def json_response(payload: Any, status: int = 200, **kwargs: Any) -> web.Response:
    """Compact JSON, as vLLM writes it."""
    return web.Response(
        body=json.dumps(payload, separators=(",", ":")).encode(),
        status=status,
        content_type="application/json",
        **kwargs,
    )


@dataclass
class Seen:
    """A request as an engine saw it."""

    method: str
    path: str
    headers: Any
    body: bytes
    json: Any


@dataclass
class Upstream:
    """An engine: `handler` decides what it does; None answers a completion at once."""

    name: str
    handler: Handler | None = None
    seen: list[Seen] = field(default_factory=list)
    open: int = 0
    closed_by_peer: int = 0
    url: str = ""
    runner: web.AppRunner | None = None

    async def start(self, port: int = 0, keepalive_timeout: float = 75) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self.runner = web.AppRunner(
            app, handler_cancellation=True, keepalive_timeout=keepalive_timeout, shutdown_timeout=0.1
        )
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()
        port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    @property
    def completions(self) -> list[Seen]:
        return [seen for seen in self.seen if "completions" in seen.path]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        self.seen.append(Seen(request.method, request.raw_path, request.headers, raw, body))
        self.open += 1
        try:
            if self.handler is not None:
                response = await self.handler(request, body)
                if response is None:  # cut the connection
                    assert request.transport
                    request.transport.abort()
                    raise asyncio.CancelledError
                return response
            return json_response(answer(body if isinstance(body, dict) else {}))
        except asyncio.CancelledError:
            self.closed_by_peer += 1
            raise
        finally:
            self.open -= 1


class FakePool:
    """A `jobs.upstream.Pool` that a test moves by hand."""

    def __init__(self) -> None:
        self.urls: dict[str, str] = {}
        self.up: dict[str, set[str]] = {}
        self.failures: list[tuple[str, str]] = []
        self.missed: list[tuple[str, str]] = []
        self.in_flight: dict[str, int] = {}
        self.limit: int | None = 4096
        self.suspect_on_failure = True
        self.listeners: list[PoolListener] = []
        self.hopeless: str | None = None
        self._change = asyncio.Event()

    def add(self, engine: str, url: str, names: Sequence[str] = (V1, V2, BASE)) -> None:
        self.urls[engine] = url
        self.up[engine] = set(names)
        for listener in self.listeners:
            listener.engine_ready(engine)
        self.changed()

    def drop(self, engine: str) -> None:
        self.up.pop(engine, None)
        for listener in self.listeners:
            listener.engine_left(engine)

    def give_up(self, engine: str) -> None:
        self.up.pop(engine, None)
        for listener in self.listeners:
            listener.engine_gone(engine)

    def changed(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()

    def resolve(self, model: str | None) -> str:
        if model is None or model == BASE:
            return BASE
        for wire, public in PUBLIC.items():
            if model in (wire, public):
                return wire
        raise UnknownModel(model)

    def public_name(self, name: str) -> str:
        return PUBLIC.get(name, name)

    def candidates(self, name: str) -> list[str]:
        return [engine for engine, names in self.up.items() if name in names]

    def ready(self) -> list[str]:
        return list(self.up)

    def url(self, engine: str) -> str:
        return self.urls[engine]

    async def wait_for(self, name: str) -> None:
        while not self.candidates(name):
            if self.hopeless:
                raise VersionFailed(self.hopeless)
            await self._change.wait()

    def begin(self, name: str) -> None:
        self.in_flight[name] = self.in_flight.get(name, 0) + 1

    def end(self, name: str) -> None:
        self.in_flight[name] -= 1

    def failed(self, engine: str, reason: str) -> None:
        self.failures.append((engine, reason))
        if self.suspect_on_failure:
            self.drop(engine)

    def missing(self, engine: str, name: str) -> None:
        self.missed.append((engine, name))
        self.up.get(engine, set()).discard(name)

    def max_model_len(self) -> int | None:
        return self.limit

    def subscribe(self, listener: PoolListener) -> None:
        self.listeners.append(listener)


@dataclass
class Proxy:
    """The data plane on a port of its own."""

    url: str
    port: int
    pool: FakePool
    completions: Completions
    engines: list[Upstream]
    http: aiohttp.ClientSession

    def count(self, name: str) -> Any:
        return self.completions.snapshot()["completions"][name]

    def idle(self) -> bool:
        """Whether nothing at all is in flight, by every count there is."""
        snapshot = self.completions.snapshot()
        engines = snapshot["engines"].values()
        return (
            snapshot["completions"]["in_flight"] == snapshot["completions"]["parked"] == 0
            and all(each["in_flight"] == each["outstanding_tokens"] == 0 for each in engines)
            and not any(self.pool.in_flight.values())
            and not any(engine.open for engine in self.engines)
        )

    async def complete(self, prompt: Any = (1, 2, 3), path: str = "/v1/completions", **members: Any) -> tuple[int, Any]:
        """Asks for a completion as a trainer does; returns the status and the JSON."""
        body = {
            "model": "trl-policy-v1",
            "prompt": list(prompt) if isinstance(prompt, tuple) else prompt,
            "max_tokens": 4,
        }
        data = io.BytesIO(json.dumps(body | members).encode())
        async with self.http.post(self.url + path, data=data) as response:
            return response.status, await response.json(content_type=None)


@asynccontextmanager
async def proxied(
    *handlers: Handler | None, limits: Limits | None = None, keepalive_timeout: float = 75
) -> AsyncIterator[Proxy]:
    """The proxy in front of one engine for each handler, named "0", "1", ..."""
    pool = FakePool()
    engines = [Upstream(str(index), handler) for index, handler in enumerate(handlers)]
    for engine in engines:
        await engine.start(keepalive_timeout=keepalive_timeout)
        pool.add(engine.name, engine.url)
    completions = Completions(pool, KEY, limits)
    server = uvicorn.Server(uvicorn.Config(completions, host="127.0.0.1", port=0, lifespan="off", **LISTENER_OPTIONS))
    server.capture_signals = _no_signals  # type: ignore[method-assign]
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            yield Proxy(f"http://127.0.0.1:{port}", port, pool, completions, engines, http)
    finally:
        server.should_exit = True
        await serving
        completions.close()
        for engine in engines:
            await engine.stop()


@contextmanager
def _no_signals() -> Iterator[None]:
    yield


async def until(condition: Callable[[], bool], deadline_s: float = 5.0) -> None:
    """Returns once the condition holds; fails after the deadline."""
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    while not condition():
        assert loop.time() < end, "it did not come about in time"
        await asyncio.sleep(0.005)
