"""What stands in front of vLLM inside a replica: the run's key for every path, and adapters by their manifest.

Completions that are for tokens alone are taken to the engine by `jobs.tokens`; all others pass straight through.

vLLM takes it as `--middleware jobs.middleware.ReplicaMiddleware`. Settings come from the environment: ASYNCGRPO_KEY
(the run's key) and ASYNCGRPO_ADAPTERS (the directory for adapters, shared by the engines of one Job) must be there;
ASYNCGRPO_REPLICA and ASYNCGRPO_ENGINE name this engine; ASYNCGRPO_REQUEST_SEEDS=1 has completions by adapters drawn
with the seeds that they ask for; ASYNCGRPO_MOUNT is a directory that shows the bucket, without
which the bucket's own variables are used.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from jobs import tokens
from jobs.adapter_store import AdapterNotVisible, AdapterRejected, AdapterStore, Mount, Source
from jobs.bucket import Bucket
from jobs.errors import ConfigError
from jobs.http import KEY_HEADER
from jobs.names import parse_wire

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)

MANIFEST = "manifest:"
LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"
REPLICA = "/asyncgrpo/replica"
ADAPTERS = "/adapters"
"""vLLM's second way to load (for SageMaker), which takes any path of the machine: closed."""
LOAD_BODY_BYTES = 64 << 10
"""Most that the body of a load may have; one has about 200 bytes."""
BUCKET_RETRY_S = 5.0
"""How long one read of the bucket is retried here; whoever asked for the load retries that in turn."""


class ReplicaMiddleware:
    """Pure ASGI. What is not its own business passes straight through, `receive` and `send` untouched."""

    def __init__(self, app: App, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        for name in ("ASYNCGRPO_KEY", "ASYNCGRPO_ADAPTERS"):
            if not environ.get(name):
                raise ConfigError(f"{name} is not set: a replica that anybody could use must not start.")
        self.app = app
        self._key = hashlib.sha256(environ["ASYNCGRPO_KEY"].encode()).digest()
        self._header = KEY_HEADER.encode()
        mount = environ.get("ASYNCGRPO_MOUNT")
        source: Source = Mount(Path(mount)) if mount else Bucket.from_env(environ, retry_s=BUCKET_RETRY_S)
        self.store = AdapterStore(Path(environ["ASYNCGRPO_ADAPTERS"]), source, environ["ASYNCGRPO_KEY"])
        self._request_seeds = environ.get("ASYNCGRPO_REQUEST_SEEDS") == "1"
        self._identity = {
            "replica": environ.get("ASYNCGRPO_REPLICA", "0"),
            "engine": environ.get("ASYNCGRPO_ENGINE", "vllm"),
            "boot_id": secrets.token_hex(8),
        }

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serves one connection; without the run's key it gets 401, whatever it asks for."""
        kind = scope["type"]
        if kind == "lifespan":
            return self.app(scope, receive, send)
        if not self._opens(scope):
            return _refuse_key(kind, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path == LOAD:
            return self._load(scope, receive, send)
        if path == UNLOAD:
            return self._unload(scope, receive, send)
        if path == tokens.PATH and hasattr(getattr(scope.get("app"), "state", None), "engine_client"):
            return self._complete(scope, receive, send)
        if path == REPLICA:
            return self._describe(scope, receive, send)
        if path == ADAPTERS or path.startswith(f"{ADAPTERS}/"):
            return _answer(send, 403, _error("Load adapters by their manifest.", "AdapterRejected", 403))
        return self.app(scope, receive, send)

    def _opens(self, scope: Scope) -> bool:
        """Whether the request carries the run's key. Digests are compared: not even its length shows in the time."""
        header = self._header
        for name, value in scope["headers"]:
            if name == header:
                return hmac.compare_digest(hashlib.sha256(value).digest(), self._key)
        return False

    async def _complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _body(receive)
        if body is None:
            return
        state = scope["app"].state
        if (ask := tokens.read(body, state, self._request_seeds)) is not None:
            try:
                answer = await tokens.complete(ask, state, receive)
            except Exception as error:  # vLLM has a status and words for each kind: it is asked the same
                log.info("a completion goes vLLM's own way: %s", error)
            else:
                if answer is not None:
                    await _send_json(send, 200, answer)
                return
        await self.app(scope, _replay(body, receive), send)

    async def _load(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _body(receive, LOAD_BODY_BYTES)
        if body is None:
            await _answer(send, 413, _error("The body of a load is too long.", "AdapterRejected", 413))
            return
        try:
            asked = json.loads(body)
        except ValueError:
            asked = None
        if isinstance(asked, dict):
            try:
                asked["lora_path"] = await asyncio.to_thread(self._local_path, asked)
            except AdapterRejected as error:
                await _answer(send, 400, _error(str(error), "AdapterRejected", 400))
                return
            except AdapterNotVisible as error:
                await _answer(send, 503, _error(str(error), "AdapterNotVisible", 503))
                return
            body = json.dumps(asked).encode()
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        rewritten = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        await self.app(rewritten, _replay(body, receive), send)

    def _local_path(self, asked: dict[str, Any]) -> str:
        """Fetches the adapter that a load asks for; the directory that vLLM is to read."""
        name, path = asked.get("lora_name"), asked.get("lora_path")
        if asked.get("load_inplace"):
            raise AdapterRejected("load_inplace = true: a name stands for one adapter for ever. Use another name.")
        if not isinstance(name, str) or not isinstance(path, str) or not path.startswith(MANIFEST):
            raise AdapterRejected(f"lora_path = {path!r}: expected '{MANIFEST}<key of a manifest in the bucket>'.")
        if parse_wire(name) is not None:
            self.store.use(name)
        return str(self.store.fetch(name, path.removeprefix(MANIFEST)).directory)

    async def _unload(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _body(receive, LOAD_BODY_BYTES)
        if body is None:
            await _answer(send, 413, _error("The body of an unload is too long.", "AdapterRejected", 413))
            return
        try:
            name = json.loads(body)["lora_name"]
        except (ValueError, TypeError, KeyError):
            name = None
        if isinstance(name, str) and parse_wire(name) is not None:
            await asyncio.to_thread(self.store.release, name, time.monotonic())
        await self.app(scope, _replay(body, receive), send)

    async def _describe(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What this engine is and holds. The adapters are those that the engine itself lists."""
        status, body = await _ask(self.app, scope, receive, "/v1/models")
        if status != 200:
            await _answer(send, 200, {**self._identity, "ready": False, "adapters": {}})
            return
        cards = json.loads(body)["data"]
        base = next(card for card in cards if card["parent"] is None)
        adapters = [card["id"] for card in cards if card["parent"] is not None]
        config = scope["app"].state.vllm_config
        description = {
            **self._identity,
            "ready": True,
            "model": base["id"],
            "adapters": await asyncio.to_thread(self._digests, adapters),
            "max_model_len": config.model_config.max_model_len,
            "dtype": str(config.model_config.dtype),
            "max_loras": config.lora_config.max_loras,
            "max_lora_rank": config.lora_config.max_lora_rank,
        }
        await _answer(send, 200, description)

    def _digests(self, wires: Iterable[str]) -> dict[str, str | None]:
        held = {wire: self.store.held(wire) for wire in wires}
        return {wire: stored.manifest.digest if stored else None for wire, stored in held.items()}


async def _body(receive: Receive, limit_bytes: float = math.inf) -> bytes | None:
    """The request's whole body; None if it is longer than the limit, or the client left."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(bytes(message.get("body", b"")))
        size += len(parts[-1])
        if size > limit_bytes:
            return None
        if not message.get("more_body"):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives `body` first and then what `receive` gives."""
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay


async def _ask(app: App, scope: Scope, receive: Receive, path: str) -> tuple[int, bytes]:
    """Status and body of GET `path`, asked of the application below, in this process."""
    status, parts = 0, b""

    async def send(message: Message) -> None:
        nonlocal status, parts
        if message["type"] == "http.response.start":
            status = message["status"]
        parts += message.get("body", b"")

    path = scope.get("root_path", "") + path
    asked = {"method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"", "state": {}}
    await app({**scope, **asked}, _replay(b"", receive), send)
    return status, parts


def _error(message: str, kind: str, status: int) -> dict[str, Any]:
    """An error in vLLM's shape."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def _answer(send: Send, status: int, content: Mapping[str, Any]) -> None:
    await _send_json(send, status, json.dumps(content).encode())


async def _send_json(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _refuse_key(kind: str, receive: Receive, send: Send) -> None:
    if kind == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": "the run's key is missing"})
        return
    message = f"This replica answers only with its run's key in the header {KEY_HEADER}."
    await _answer(send, 401, _error(message, "Unauthorized", 401))
