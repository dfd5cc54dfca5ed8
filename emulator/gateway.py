"""The gateway before a Job's exposed ports: one local port for each, which opens with the bearer token only.

`https://<job>--<port>.hf.jobs` is here `http://127.0.0.1:<n>`, or https if there is a certificate. Bodies stream both
ways, a request may take as long as it takes, a client that leaves takes its request with it, and an answer that breaks
upstream breaks for the client too.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState
from yarl import URL

from emulator.ports import LOOPBACK

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

BODY_LIMIT_BYTES = 64 << 20
"""Three times the largest completion seen (20 MB of log-probabilities)."""
LISTEN_KEEP_ALIVE_S = 75
"""Longer than clients pool a connection (aiohttp: 15 s): they never meet one that is being closed."""
UPSTREAM_KEEP_ALIVE_S = 2.0
"""Shorter than servers keep one (uvicorn: 5 s): the same, from the other side."""
CONNECT_S = 5.0
SMALL_BYTES = 256 << 10
"""Answers of up to this announced length are sent in one piece."""

# Headers that concern one connection only: RFC 9110, 7.6.1.
_HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
_METHODS_WITHOUT_BODY = {"GET", "HEAD", "OPTIONS", "DELETE"}

logging.getLogger("uvicorn.error").addHandler(logging.NullHandler())  # a broken answer is the Job's affair, not ours


@dataclass(eq=False)
class Route:
    """One exposed port. `locate(refused)` gives the "host:port" where the Job listens, or None while it is not up.

    `refused` is true when the address it gave last did not answer.
    """

    job_id: str
    port: int
    public: bool
    locate: Callable[[bool], Awaitable[str | None]]
    url: str = ""
    server: asyncio.Server | None = None


Interfere = Callable[[str, int, str], Awaitable[int | None]]
"""Called with Job, port and path before a request is forwarded; may wait; a status it returns is answered instead."""


class BodyTooLarge(Exception):
    """The client sent more than the limit."""


class Gateway:
    """All exposed ports of one emulator: an ASGI application behind as many listening sockets."""

    def __init__(
        self, token: str, body_limit_bytes: int = BODY_LIMIT_BYTES, certificate: ssl.SSLContext | None = None
    ) -> None:
        self.body_limit_bytes = body_limit_bytes
        self._certificate = certificate
        self.interfere: Interfere | None = None
        self._bearer = f"Bearer {token}".encode()
        self._routes: dict[int, Route] = {}
        self._session: aiohttp.ClientSession | None = None
        self._state = ServerState()
        self._config = uvicorn.Config(
            self,
            http=HttpToolsProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=LISTEN_KEEP_ALIVE_S,
        )
        self._config.load()

    async def open(
        self, job_id: str, port: int, public: bool, locate: Callable[[bool], Awaitable[str | None]]
    ) -> Route:
        """Listen for one exposed port; the route's `url` is where."""
        listener = socket.create_server((LOOPBACK, 0), backlog=self._config.backlog)
        scheme = "https" if self._certificate else "http"
        route = Route(job_id, port, public, locate, f"{scheme}://{LOOPBACK}:{listener.getsockname()[1]}")
        self._routes[listener.getsockname()[1]] = route
        make = functools.partial(HttpToolsProtocol, config=self._config, server_state=self._state, app_state={})
        route.server = await asyncio.get_running_loop().create_server(make, sock=listener, ssl=self._certificate)
        return route

    def close_route(self, route: Route) -> None:
        """Stop listening. Requests under way go on, their connections get no other."""
        self._routes.pop(int(route.url.rpartition(":")[2]), None)
        if route.server:
            route.server.close()

    async def close(self) -> None:
        """Stop listening everywhere and drop every connection."""
        for route in list(self._routes.values()):
            self.close_route(route)
        drop(self._state)
        for task in list(self._state.tasks):
            task.cancel()
        if self._session:
            await self._session.close()

    def _upstream(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=UPSTREAM_KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the token and the size, then forward."""
        route = self._routes.get(scope["server"][1])
        if route is None:
            await answer(send, 404, "this port is not exposed any more")
            return
        headers: Headers = scope["headers"]
        if not route.public and not self._authorised(headers):
            await answer(send, 401, "a token with read access to the Job's namespace is needed: Authorization: Bearer")
            return
        length = next((int(value) for name, value in headers if name == b"content-length"), None)
        if length is not None and length > self.body_limit_bytes:
            await answer(send, 413, self._too_large())
            return
        if self.interfere and (status := await self.interfere(route.job_id, route.port, scope["path"])):
            await answer(send, status, "fault injected at the gateway")
            return
        forward = asyncio.ensure_future(self._forward(route, scope, length, receive, send))
        try:
            await forward
        except BodyTooLarge:
            await answer(send, 413, self._too_large())

    def _authorised(self, headers: Headers) -> bool:
        return any(n == b"authorization" and hmac.compare_digest(v, self._bearer) for n, v in headers)

    def _too_large(self) -> str:
        return f"the body is larger than body_limit_bytes = {self.body_limit_bytes} of the emulator's gateway"

    async def _forward(self, route: Route, scope: Scope, length: int | None, receive: Receive, send: Send) -> None:
        body = Body(receive, self.body_limit_bytes)
        data: Any = None
        if scope["method"] not in _METHODS_WITHOUT_BODY or length or _is_chunked(scope["headers"]):
            data = await body.source()
            if body.left:
                return
        request = asyncio.ensure_future(self._exchange(route, scope, data, send))
        try:
            gone = asyncio.ensure_future(body.gone())
            await asyncio.wait((request, gone), return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if request.done():
                request.result()
        finally:
            request.cancel()  # closes the upstream connection of an answer that nobody reads any more

    async def _exchange(self, route: Route, scope: Scope, data: Any, send: Send) -> None:
        started = refused = False
        while True:
            address = await route.locate(refused)
            if address is None:
                await answer(send, 503, f"Job {route.job_id}: nothing listens on port {route.port}")
                return
            raw = scope["raw_path"].decode("latin-1")
            query = scope["query_string"].decode("latin-1")
            url = URL(f"http://{address}{raw}{'?' + query if query else ''}", encoded=True)
            headers = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in _end_to_end(scope["headers"])]
            try:
                async with self._upstream().request(
                    scope["method"], url, headers=headers, data=data, allow_redirects=False
                ) as response:
                    started = True
                    await _relay(response, send)
                    return
            except aiohttp.ClientConnectorError:
                if refused:
                    await answer(send, 503, f"Job {route.job_id}: nothing listens on port {route.port}")
                    return
                refused = True  # it may listen somewhere else
            except aiohttp.ClientError as error:
                if isinstance(error.__cause__, BodyTooLarge):
                    raise error.__cause__ from None
                if started:
                    raise  # the connection to the client is dropped: an incomplete answer must not look complete
                await answer(send, 502, f"Job {route.job_id} closed the connection on port {route.port}: {error}")
                return


class Body:
    """The client's body, and word of its leaving. `receive` is called by one of both at a time."""

    def __init__(self, receive: Receive, limit_bytes: int) -> None:
        self._ended = False
        self._receive = receive
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self.left = False
        self._listen = asyncio.Event()
        self._listen.set()

    async def source(self) -> bytes | AsyncIterator[bytes]:
        """The body: whole if it came with the head, as for most requests, else as it comes. Raises BodyTooLarge."""
        first = await self._take()
        if self._ended:
            return first
        self._listen.clear()
        return self._chunks(first)

    async def _chunks(self, first: bytes) -> AsyncIterator[bytes]:
        try:
            yield first
            while not self._ended:
                yield await self._take()
            if self.left:
                raise ConnectionError("the client left in the middle of its body")
        finally:
            self._listen.set()

    async def _take(self) -> bytes:
        message = await self._receive()
        self.left = message["type"] == "http.disconnect"
        self._ended = not message.get("more_body")
        data: bytes = message.get("body", b"")
        self._size_bytes += len(data)
        if self._size_bytes > self._limit_bytes:
            raise BodyTooLarge
        return data

    async def gone(self) -> None:
        """Return when the client has left."""
        await self._listen.wait()
        while not self.left:
            await self._take()


def drop(state: ServerState) -> None:
    """Break every connection of a uvicorn server; one with TLS would otherwise wait for its client to say goodbye."""
    for connection in list(state.connections):
        if transport := getattr(connection, "transport", None):
            transport.abort()


def _is_chunked(headers: Headers) -> bool:
    return any(name == b"transfer-encoding" for name, _ in headers)


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Drop what is for this connection only, and the token: it opens the gateway and is none of the Job's business."""
    headers = list(headers)
    named = {
        token.strip().lower() for name, value in headers if name.lower() == b"connection" for token in value.split(b",")
    }
    return [
        (name, value)
        for name, value in headers
        if (low := name.lower()) not in _HOP_BY_HOP and low not in named and low != b"authorization"
    ]


async def _relay(response: aiohttp.ClientResponse, send: Send) -> None:
    headers = [(name.lower(), value) for name, value in _end_to_end(response.raw_headers)]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    length = response.content_length
    if length is not None and length <= SMALL_BYTES:
        await send({"type": "http.response.body", "body": await response.read()})
        return
    async for chunk in response.content.iter_any():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def answer(send: Send, status: int, error: str) -> None:
    """An answer of the gateway's own."""
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
