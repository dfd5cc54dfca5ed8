"""Requests that are about no model of the fleet's: to one ready engine and back, as they are."""

from jobs.asgi import Scope, Send, respond_error, target
from jobs.connections import BrokenOff, Headers
from jobs.dispatch import Dispatcher
from jobs.upstream import request_headers, response_headers
from jobs.verdict import Elsewhere, here


async def forward(dispatcher: Dispatcher, ours: Headers, scope: Scope, body: bytes, send: Send) -> None:
    """Passes a request to the ready engine with the least in flight, and its answer back as it comes.

    Another engine is asked only if the first could not be reached: who knows what it did otherwise.
    """
    headers = request_headers(scope["headers"], ours)
    for engine in sorted(dispatcher.pool.ready(), key=dispatcher.router.in_flight):
        if engine not in dispatcher.pool.ready():  # it left while another was tried
            continue
        try:
            response = await dispatcher.open(engine, scope["method"], target(scope), headers, body)
        except Elsewhere as elsewhere:
            dispatcher.pool.failed(engine, elsewhere.reason)
            if elsewhere.delivered:
                await respond_error(send, 502, f"engine {engine}: {elsewhere.reason}", "BadGateway")
                return
            continue
        try:
            start = {"status": response.status, "headers": here(response_headers(response.headers))}
            await send({"type": "http.response.start", **start})
            while chunk := await response.read_some():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except BrokenOff as error:
            dispatcher.pool.failed(engine, f"its answer broke off: {error}")
        finally:
            response.close()
        return
    await respond_error(send, 503, "No engine is ready.", "ServiceUnavailable")
