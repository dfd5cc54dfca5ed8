"""moto's S3 server as strict as the Hub's gateway: `python -m emulator.moto_server BUCKET ACCESS_KEY`.

It prints `{"port": n}` once it listens and ends when its standard input does, which is when the emulator dies.

In front of moto stands what the gateway at https://s3.hf.co is known to differ in, so that a client that relies on more
fails here first: only the one access key; conditional PUTs that are atomic; no `If-Match` and the like on GET; no user
metadata; no checksum the client was not asked for; ListObjectsV2 only, and `/` the only delimiter.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

LOOPBACK = "127.0.0.1"
MAX_CONCURRENT_LOCKS = 64

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]


def refusal(environ: Environ, access_key: str) -> tuple[int, str, str] | None:
    """Why the gateway would refuse this request: status, S3 error code and message; None if it would not."""
    method, query = environ["REQUEST_METHOD"], parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    if f"Credential={access_key}/" not in environ.get("HTTP_AUTHORIZATION", "") and not any(
        value.startswith(f"{access_key}/") for value in query.get("X-Amz-Credential", [])
    ):
        return 403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records."
    if any(name.startswith("HTTP_X_AMZ_META_") for name in environ):
        return 501, "NotImplemented", "User metadata is not supported."
    if any(name.startswith("HTTP_X_AMZ_CHECKSUM_") for name in environ) or "HTTP_X_AMZ_TRAILER" in environ:
        return 501, "NotImplemented", "Checksum headers are not supported: send them only when required."
    if environ.get("HTTP_X_AMZ_CONTENT_SHA256", "").startswith("STREAMING-"):
        return 501, "NotImplemented", "aws-chunked bodies are not supported."
    if method == "GET":
        if "HTTP_IF_MATCH" in environ or "HTTP_IF_NONE_MATCH" in environ:
            return 501, "NotImplemented", "Conditional reads are not supported."
        is_list = environ["PATH_INFO"].strip("/").count("/") == 0 and environ["PATH_INFO"] != "/"
        if is_list and not ({"location", "versioning", "uploads"} & set(query)) and query.get("list-type") != ["2"]:
            return 501, "NotImplemented", "Only ListObjectsV2 is supported."
        if query.get("delimiter", ["/"]) not in (["/"], [""]):
            return 501, "NotImplemented", "The only supported delimiter is '/'."
    return None


class Front:
    """The WSGI application before moto's."""

    def __init__(self, behind: Application, access_key: str) -> None:
        self.behind = behind
        self.access_key = access_key
        self._locks = [threading.Lock() for _ in range(MAX_CONCURRENT_LOCKS)]
        self._refuse_lock = threading.Lock()
        self._refuse_count = 0
        self._refuse_until = 0.0
        self._refuse_code = "SlowDown"

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer, refuse, or hand on to moto."""
        if environ["PATH_INFO"] == "/_emulator/refuse":
            return self._set_refusals(environ, start_response)
        if self._refuses():
            return _error(environ, start_response, 503, self._refuse_code, "Please reduce your request rate.")
        if refused := refusal(environ, self.access_key):
            return _error(environ, start_response, *refused)
        if environ["REQUEST_METHOD"] == "PUT":
            # moto looks and writes in two steps, so of two conditional PUTs at once both could win.
            with self._locks[hash(environ["PATH_INFO"]) % MAX_CONCURRENT_LOCKS]:
                return list(self.behind(environ, start_response))
        return self.behind(environ, start_response)

    def _set_refusals(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("HTTP_X_EMULATOR_KEY") != self.access_key:
            return _error(environ, start_response, 403, "AccessDenied", "Access Denied")
        wanted = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        with self._refuse_lock:
            self._refuse_count = wanted["count"]
            self._refuse_until = time.monotonic() + wanted["seconds"]
            self._refuse_code = wanted["code"]
        start_response("204 No Content", [])
        return []

    def _refuses(self) -> bool:
        with self._refuse_lock:
            if self._refuse_count > 0:
                self._refuse_count -= 1
                return True
            return time.monotonic() < self._refuse_until


def _error(environ: Environ, start_response: StartResponse, status: int, code: str, message: str) -> Iterable[bytes]:
    stream = environ["wsgi.input"]
    if length := int(environ.get("CONTENT_LENGTH") or 0):
        stream.read(length)  # or the client meets a reset connection instead of the answer
    body = (
        f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{escape(code)}</Code>"
        f"<Message>{escape(message)}</Message></Error>"
    ).encode()
    start_response(
        f"{status} {code}", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
    )
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]


def main(bucket: str, access_key: str) -> NoReturn:
    """Serve until standard input ends."""
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    from moto.moto_server.werkzeug_app import create_backend_app
    from moto.s3.models import s3_backends
    from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

    class Quiet(WSGIRequestHandler):
        """Keeps connections open, and writes no line per request."""

        protocol_version = "HTTP/1.1"

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Say nothing."""

    s3_backends["123456789012"]["aws"].create_bucket(bucket, "us-east-1")
    front = Front(create_backend_app("s3"), access_key)
    server = ThreadedWSGIServer(LOOPBACK, 0, front, handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps({"port": server.server_port}), flush=True)  # noqa: T201
    sys.stdin.read()
    os._exit(0)  # the requests under way end with us


if __name__ == "__main__":
    main(*sys.argv[1:])
