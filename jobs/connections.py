"""HTTP/1.1 to engines over kept-alive sockets: a request out, a response's head and body in.

Why not aiohttp's client: a request costs it 140 us of processor time where this takes 30 (measured with 20 KB answers),
and it does not say whether a request that failed had gone out on a new socket or on one that had idled in the pool, on
which a retry depends. The parsing is httptools', as in uvicorn.
"""

import asyncio
import socket
import ssl
import time
from collections import defaultdict, deque
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools

POOL_KEEP_ALIVE_S = 4.0
"""How long an idle socket is kept: below the 5 s after which vLLM closes it (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)."""
CONNECT_TIMEOUT_S = 5.0
"""A replica's gateway answers a SYN within a round trip (about 0.1 s); after this long it is taken for dead."""
HANDSHAKES = 256
"""TLS connections being made at a time. Each costs 0.7 ms of our own processor time, and what the others cost runs
against its CONNECT_TIMEOUT_S: of 8,192 begun at once none was done in time. Fewer would be bound by the network: with
round trips of 0.1 s, 384 connections took 1.4 s with 64 at a time and 0.6 with these. Without TLS nobody has to wait:
8,192 took 0.9 s. All measured."""
BUFFER_BYTES = 1 << 18
"""Body bytes held for a slow reader before the socket is read no further; as much as uvloop reads at once."""
_PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A peer that vanished without a word is noticed after a minute (the kernel's own default is two hours)."""

Headers = list[tuple[bytes, bytes]]


class Unreachable(Exception):
    """No connection could be made: the engine has seen nothing."""


class BrokenOff(Exception):
    """The connection ended before the response was complete.

    `stale`: it had idled in the pool and not a byte came back; most likely the engine had just closed it for idleness.
    """

    def __init__(self, reason: str, *, stale: bool = False) -> None:
        self.stale = stale
        super().__init__(reason)


class Origin(NamedTuple):
    """Where a base URL points."""

    host: str
    port: int
    tls: bool
    authority: bytes
    path: bytes


@lru_cache(maxsize=4096)
def origin(url: str) -> Origin:
    """Takes a base URL apart.

    Raises:
        ValueError: it is no http or https URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url = {url!r}: expected http://host:port or https://host")
    tls = parts.scheme == "https"
    authority = parts.netloc.rpartition("@")[2].encode()
    return Origin(parts.hostname, parts.port or (443 if tls else 80), tls, authority, parts.path.rstrip("/").encode())


class Response:
    """A response whose head is here and whose body may still be on its way. Read it to its end, or close it."""

    __slots__ = ("_complete", "_failure", "_pieces", "_size", "_socket", "_waiter", "_whole", "headers", "status")

    def __init__(self, over: "_Socket", status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        self._socket = over
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._complete = False
        self._whole = False
        self._failure: BrokenOff | None = None
        self._waiter: asyncio.Future[None] | None = None

    def header(self, name: bytes) -> bytes:
        """The first header of that name (in lower case), or nothing."""
        return next((value for key, value in self.headers if key == name), b"")

    async def read(self) -> bytes:
        """All of the body that was not read yet.

        Raises:
            BrokenOff: it is not complete.
        """
        self._whole = True
        self._socket.flow(True)
        while not self._complete:
            await self._wait()
        pieces, self._pieces = self._pieces, deque()
        return b"".join(pieces) if len(pieces) != 1 else pieces[0]

    async def read_some(self) -> bytes:
        """What has arrived of the body, at least a byte; nothing at its end.

        Raises:
            BrokenOff: it ended too soon.
        """
        while not self._pieces and not self._complete:
            await self._wait()
        piece = b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        self._socket.flow(True)
        return piece

    def close(self) -> None:
        """Ends the connection, if the response is not complete."""
        if not self._complete:
            self._complete = True
            self._socket.abort()

    def feed(self, data: bytes) -> None:
        """A piece of the body came."""
        self._pieces.append(data)
        if not self._whole:
            self._size += len(data)
            if self._size > BUFFER_BYTES:
                self._socket.flow(False)
            self._wake()

    def finish(self, failure: BrokenOff | None = None) -> None:
        """The body is complete, or never will be."""
        if not self._complete and self._failure is None:
            self._failure = failure
            self._complete = failure is None
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class _Socket(asyncio.Protocol):
    """One connection: at most one request at a time."""

    def __init__(self, idle: "dict[_Socket, float]") -> None:
        self._idle = idle
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._head: asyncio.Future[Response] | None = None
        self._response: Response | None = None
        self._headers: Headers = []
        self._bodiless = False
        self._reading = True
        self.used = False

    def send(self, data: bytes, *, bodiless: bool) -> "asyncio.Future[Response]":
        """Writes a request; the future brings the response's head, or BrokenOff."""
        assert self._transport
        self._head = asyncio.get_running_loop().create_future()
        self._bodiless = bodiless
        self._transport.write(data)
        return self._head

    def flow(self, on: bool) -> None:
        """Reads from the socket, or leaves what comes to the kernel."""
        if on != self._reading and self._transport is not None:
            self._reading = on
            (self._transport.resume_reading if on else self._transport.pause_reading)()

    def abort(self) -> None:
        """Ends the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport, and has the kernel look after the peer."""
        self._transport = transport  # type: ignore[assignment]
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser, which calls the `on_` methods."""
        try:
            if self._head is None and self._response is None:
                raise httptools.HttpParserError("bytes that nobody asked for")
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"no proper HTTP response: {error}")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits for something learns that it will not come."""
        self._idle.pop(self, None)
        self._transport = None
        response = self._response
        # A body with neither length nor chunks ends where the connection does (RFC 9112 6.3).
        if (
            response is not None
            and exc is None
            and not (response.header(b"content-length") or response.header(b"transfer-encoding"))
        ):
            response.finish()
        self._fail(f"connection lost: {exc}" if exc else "connection closed by the engine")

    def _fail(self, reason: str) -> None:
        if self._head is not None and not self._head.done():
            self._head.set_exception(BrokenOff(reason, stale=self.used and not self._headers))
        if self._response is not None:
            self._response.finish(BrokenOff(reason))
        self._head = self._response = None

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of the response."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is complete: the request's future gets the response."""
        status = self._parser.get_status_code()
        if status < 200:
            return
        if self._head is None:
            self.abort()
            return
        self._response = Response(self, status, self._headers)
        if not self._head.done():
            self._head.set_result(self._response)
        self._head = None
        if self._bodiless:
            # The parser expects the body that Content-Length announces; the answer to HEAD has none.
            self._response.finish()
            self._response = None
            self.abort()

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self._response is not None:
            self._response.feed(data)

    def on_message_complete(self) -> None:
        """The response is complete: the socket is free for the next request, if the engine keeps it open."""
        self._headers = []
        if self._response is None:  # 1xx: the real one is still to come
            return
        response, self._response = self._response, None
        self.flow(True)
        if self._parser.should_keep_alive():
            self.used = True
            self._idle[self] = time.monotonic()
        else:
            assert self._transport
            self._transport.close()
        response.finish()


def _timed_out(to: Origin) -> str:
    return f"no connection to {to.host}:{to.port} within {CONNECT_TIMEOUT_S:g} s"


class Connections:
    """Sockets to all engines, as many as there are requests at a time."""

    def __init__(self) -> None:
        self._idle: dict[Origin, dict[_Socket, float]] = defaultdict(dict)
        self._handshakes = asyncio.Semaphore(HANDSHAKES)
        self._timed_out: dict[Origin, float] = {}
        self._tls: ssl.SSLContext | None = None
        self._sweep: asyncio.TimerHandle | None = None

    async def request(
        self, url: str, method: bytes, target: bytes, headers: Headers, body: bytes, *, fresh: bool = False
    ) -> Response:
        """Sends a request to `url` (a base URL) and returns once the response's head is there.

        Host and Content-Length are added. `fresh` asks for a new socket. There is no time-out but for connecting: how
        long a completion takes is the client's business, and a hung engine is the fleet's.

        Raises:
            Unreachable: no connection within CONNECT_TIMEOUT_S, not counting the wait for one of HANDSHAKES.
            BrokenOff: the connection ended before the head was complete.
        """
        to = origin(url)
        over = (None if fresh else self._take(to)) or await self._connect(to)
        lines = [b"%b %b%b HTTP/1.1\r\nhost: %b\r\n" % (method, to.path, target, to.authority)]
        lines += [b"%b: %b\r\n" % header for header in headers]
        if body or method == b"POST":
            lines.append(b"content-length: %d\r\n" % len(body))
        lines += (b"\r\n", body)
        try:
            return await over.send(b"".join(lines), bodiless=method == b"HEAD")
        except BaseException:
            over.abort()
            raise

    def close(self) -> None:
        """Ends the idle connections; others end with their responses."""
        if self._sweep is not None:
            self._sweep.cancel()
        for idle in self._idle.values():
            for each in list(idle):
                each.abort()
            idle.clear()

    def _take(self, to: Origin) -> _Socket | None:
        """The idle socket that was used last, if it is young enough."""
        idle = self._idle[to]
        oldest = time.monotonic() - POOL_KEEP_ALIVE_S
        while idle:
            over, since = idle.popitem()
            if since >= oldest and over.open:
                return over
            over.abort()
        return None

    async def _connect(self, to: Origin) -> _Socket:
        if not to.tls:
            return await self._open(to, None)
        self._tls = self._tls or ssl.create_default_context()
        asked = time.monotonic()
        async with self._handshakes:
            # Who waited while others found nobody there need not find out for itself: that would cost it, and all who
            # wait behind it, another time-out.
            if self._timed_out.get(to, asked) > asked:
                raise Unreachable(_timed_out(to))
            return await self._open(to, self._tls)

    async def _open(self, to: Origin, tls: ssl.SSLContext | None) -> _Socket:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, over = await asyncio.get_running_loop().create_connection(
                    lambda: _Socket(self._idle[to]), to.host, to.port, ssl=tls
                )
        except TimeoutError as error:
            self._timed_out[to] = time.monotonic()
            raise Unreachable(_timed_out(to)) from error
        except OSError as error:
            raise Unreachable(f"no connection to {to.host}:{to.port}: {error}") from error
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(POOL_KEEP_ALIVE_S, self._drop_old)
        return over

    def _drop_old(self) -> None:
        """Closes what has idled too long; runs as long as there are sockets."""
        oldest = time.monotonic() - POOL_KEEP_ALIVE_S
        for idle in self._idle.values():
            for over, since in list(idle.items()):
                if since >= oldest:
                    break
                del idle[over]
                over.abort()
        self._sweep = asyncio.get_running_loop().call_later(POOL_KEEP_ALIVE_S, self._drop_old)
