"""The few ASGI moves that the data plane makes."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class ClientGone(Exception):
    """The client closed its connection before its request was complete."""


class TooLarge(Exception):
    """The body is longer than allowed."""


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """The whole request body.

    Raises:
        ClientGone: before the end.
        TooLarge: after `max_bytes`.
    """
    message = await receive()
    pieces = []
    size = 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        size += len(piece)
        if size > max_bytes:
            raise TooLarge
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)
        message = await receive()


async def gone(receive: Receive) -> None:
    """Returns when the client closes its connection. Only for after the body was read: it eats what comes."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """A whole response; Content-Length is added."""
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_body(status: int, message: str, kind: str) -> dict[str, Any]:
    """An error in vLLM's and OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def respond_error(send: Send, status: int, message: str, kind: str) -> None:
    """A whole response with an error in vLLM's shape."""
    headers = [(b"content-type", b"application/json")]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await respond(send, status, headers, json.dumps(error_body(status, message, kind)).encode())


def target(scope: Scope) -> bytes:
    """Path and query as the client wrote them."""
    path: bytes = scope["raw_path"]
    query: bytes = scope["query_string"]
    return b"%b?%b" % (path, query) if query else path
