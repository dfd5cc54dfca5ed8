"""What the completions know of the fleet (a `Pool`), and how the proxy talks to an engine: sessions and header rules.

The fleet implements `Pool`; the completions consume it. Both live in one process, on one asyncio loop.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import aiohttp

from jobs.errors import AsyncgrpoError
from jobs.http import KEY_HEADER

POOL_KEEP_ALIVE_S = 4.0
"""How long an idle upstream socket is kept: below the 5 s after which vLLM closes it (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)."""
LISTENER_KEEP_ALIVE_S = 75
"""How long the proxy's listener keeps an idle client: well above the 15 s of aiohttp's client pool, which TRL uses."""
CONNECT_TIMEOUT_S = 5.0
"""A replica's gateway answers a SYN within a round trip (about 0.1 s); after this long it is taken for dead."""

LISTENER_OPTIONS: dict[str, Any] = {
    "timeout_keep_alive": LISTENER_KEEP_ALIVE_S,
    "server_header": False,  # the engine's own Server and Date pass through; a second pair would be a lie
    "date_header": False,
    "access_log": False,
    "log_level": "warning",
}
"""What the proxy's `uvicorn.Config` needs for the completions to behave as tested."""


class UnknownModel(AsyncgrpoError):
    """Neither the base model nor a version that was ever published. Answered with 404 and vLLM's words."""

    def __init__(self, model: str) -> None:
        self.model = model
        super().__init__(f"The model `{model}` does not exist.")


class VersionFailed(AsyncgrpoError):
    """A version that no replica can load; the message holds the replicas' own words."""


class PoolListener(Protocol):
    """Who wants to know when something that was cached, or is in flight, is no more."""

    def engine_left(self, engine: str) -> None:
        """The engine left `ready` and may come back as another process: what it had cached is not to be counted on.

        What is in flight there goes on.
        """

    def engine_gone(self, engine: str) -> None:
        """The engine is given up (hung, unreachable, removed): what is in flight there is closed and sent elsewhere."""

    def version_retired(self, name: str) -> None:
        """No completion under this wire name is expected any more."""


class Pool(Protocol):
    """The fleet as the completions see it. All calls are on the event loop and, but for `wait_for`, return at once."""

    def resolve(self, model: str | None) -> str:
        """The name to send upstream: a wire name, or the base model's id (also for None: the request names no model).

        A retired version of the current attempt is revived, never unknown.

        Raises:
            UnknownModel: for what was never published.
        """
        ...

    def public_name(self, name: str) -> str:
        """The inverse of `resolve`, for the `model` field of answers; a name it does not know is returned as it is."""
        ...

    def candidates(self, name: str) -> Sequence[str]:
        """Names of the engines in `ready` that proved this version; for the base model every engine in `ready`."""
        ...

    def ready(self) -> Sequence[str]:
        """Names of all engines in `ready`, for requests that are about no model."""
        ...

    def url(self, engine: str) -> str:
        """The engine's base URL, without a slash at the end."""
        ...

    async def wait_for(self, name: str) -> None:
        """Returns once `candidates(name)` is not empty. Cancelling it must be harmless.

        Raises:
            VersionFailed: no replica can load this version.
        """
        ...

    def begin(self, name: str) -> None:
        """A completion under this name came in; it counts as in flight, parked or not, until `end`."""
        ...

    def end(self, name: str) -> None:
        """A completion under this name is over, whatever came of it."""
        ...

    def failed(self, engine: str, reason: str) -> None:
        """A connection failed or broke, or the engine answered 5xx: it leaves `ready` until it answers again."""
        ...

    def missing(self, engine: str, name: str) -> None:
        """The engine answered 404 for a version it was thought to hold: it has to load and prove it again."""
        ...

    def max_model_len(self) -> int | None:
        """Tokens of prompt and completion together that the engines take; None while unknown."""
        ...

    def subscribe(self, listener: PoolListener) -> None:
        """Calls `listener` for every later event, on the event loop."""
        ...


HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
"""RFC 9110 7.6.1 and RFC 2616 13.5.1: what concerns one connection only. Never forwarded, in neither direction."""
_NOT_UPSTREAM = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"authorization", KEY_HEADER.encode()}
"""Written anew for the upstream, or the client's own business."""

RawHeaders = Iterable[tuple[bytes, bytes]]


def request_headers(headers: RawHeaders, ours: Mapping[str, str], *, identity: bool = False) -> list[tuple[str, str]]:
    """Headers for an upstream request from a client's, names in lower case as ASGI gives them.

    Duplicates survive; hop-by-hop headers, those that Connection names, and the client's Host, Authorization and key do
    not; `ours` (the replica's key and the gateway's bearer token) come last. `identity` asks for an answer that can be
    read without decompression.
    """
    drop = _NOT_UPSTREAM | {b"accept-encoding"} if identity else _NOT_UPSTREAM
    headers = list(headers)
    drop |= _named_by_connection(headers)
    kept = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers if name not in drop]
    if identity:
        kept.append(("accept-encoding", "identity"))
    kept.extend(ours.items())
    return kept


def response_headers(headers: RawHeaders, *, drop: frozenset[bytes] = frozenset()) -> list[tuple[bytes, bytes]]:
    """Headers for the client from an upstream's: order and duplicates as they came, less hop-by-hop ones and `drop`."""
    kept = [(name.lower(), value) for name, value in headers]
    drop = drop | HOP_BY_HOP | _named_by_connection(kept)
    return [(name, value) for name, value in kept if name not in drop]


def _named_by_connection(headers: RawHeaders) -> frozenset[bytes]:
    named: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
    return frozenset(named)


class _Connector(aiohttp.TCPConnector):
    """Tells, per task, whether a request went out on a new socket or on one that had idled in the pool."""

    async def _create_connection(self, *args: Any, **kwargs: Any) -> Any:
        protocol = await super()._create_connection(*args, **kwargs)
        on_new_socket.set(True)
        return protocol


on_new_socket: ContextVar[bool] = ContextVar("on_new_socket", default=False)
"""Set to False before a request; True afterwards if a socket was opened for it. A reset on a reused socket says nothing
about the engine: it may have closed it for idleness at that moment."""


def open_session(*, reuse: bool = True) -> aiohttp.ClientSession:
    """A client session for engines: no connection limit, no cookies kept, answers as they are on the wire.

    With `reuse=False` every request gets a socket of its own. There is no time-out but for connecting: how long a
    completion takes is the client's business, and a hung engine is the fleet's.
    """
    options: dict[str, Any] = {"keepalive_timeout": POOL_KEEP_ALIVE_S} if reuse else {"force_close": True}
    return aiohttp.ClientSession(
        connector=_Connector(limit=0, ttl_dns_cache=30, **options),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        trust_env=False,
    )
