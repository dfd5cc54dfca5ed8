"""What the completions know of the fleet (a `Pool`), and how the proxy talks to an engine: sessions and header rules.

The fleet implements `Pool`; the completions consume it. Both live in one process, on one asyncio loop.
"""

import gc
from collections.abc import Sequence
from typing import Any, Protocol

import aiohttp

from jobs.connections import CONNECT_TIMEOUT_S, POOL_KEEP_ALIVE_S, Headers
from jobs.errors import AsyncgrpoError
from jobs.http import KEY_HEADER

LISTENER_KEEP_ALIVE_S = 75
"""How long the proxy's listener keeps an idle client: well above the 15 s of aiohttp's client pool, which TRL uses."""
LISTENER_OPTIONS: dict[str, Any] = {
    "timeout_keep_alive": LISTENER_KEEP_ALIVE_S,
    "server_header": False,  # the engine's own Server and Date pass through; a second pair would be a lie
    "date_header": False,
    "proxy_headers": False,  # nobody before the proxy is to be believed about who the client is
    "access_log": False,
    "log_level": "warning",
}
"""What the proxy's `uvicorn.Config` needs for the completions to behave as tested."""


def tune_process() -> None:
    """For a process that serves completions, once it is set up: lets the garbage collector look seldom.

    What a request leaves is freed by reference counts; looking for cycles after every 700 objects found none and took a
    tenth of the processor time (measured by `asyncgrpo bench proxy`).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


class UnknownModel(AsyncgrpoError):
    """Neither the base model nor a version that was ever published. Answered with 404 and vLLM's words."""

    def __init__(self, model: str) -> None:
        self.model = model
        super().__init__(f"The model `{model}` does not exist.")


class VersionFailed(AsyncgrpoError):
    """A version that no replica can load; the message holds the replicas' own words."""


class PoolListener(Protocol):
    """Who wants to know when an engine comes, and when something that was cached, or is in flight, is no more."""

    def engine_ready(self, engine: str) -> None:
        """The engine entered `ready`: it has nothing to do yet, or has what it had before it left."""

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
_NOT_UPSTREAM_IDENTITY = _NOT_UPSTREAM | {b"accept-encoding"}


def request_headers(headers: Headers, ours: Headers, *, identity: bool = False) -> Headers:
    """Headers for an upstream request from a client's, names in lower case as ASGI gives them.

    Duplicates survive; hop-by-hop headers, those that Connection names, and the client's Host, Authorization and key do
    not; `ours` (the replica's key and the gateway's bearer token) come last. `identity` asks for an answer that can be
    read without decompression.
    """
    drop = _drop(headers, _NOT_UPSTREAM_IDENTITY if identity else _NOT_UPSTREAM)
    kept = [header for header in headers if header[0] not in drop]
    if identity:
        kept.append((b"accept-encoding", b"identity"))
    return kept + ours


def response_headers(headers: Headers, drop: frozenset[bytes] = frozenset()) -> Headers:
    """Headers for the client from an upstream's, names in lower case: as they came, less hop-by-hop ones and `drop`."""
    drop = _drop(headers, HOP_BY_HOP | drop if drop else HOP_BY_HOP)
    return [header for header in headers if header[0] not in drop]


def _drop(headers: Headers, drop: frozenset[bytes]) -> frozenset[bytes]:
    """`drop`, and whatever Connection names."""
    for name, value in headers:
        if name == b"connection":
            drop = drop | {token.strip().lower() for token in value.split(b",")}
    return drop


def open_session(*, reuse: bool = True) -> aiohttp.ClientSession:
    """A client session for what is no completion: no connection limit, no cookies, answers as they are on the wire.

    With `reuse=False` every request gets a socket of its own. There is no time-out but for connecting.
    """
    options: dict[str, Any] = {"keepalive_timeout": POOL_KEEP_ALIVE_S} if reuse else {"force_close": True}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, **options),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        trust_env=False,
    )
