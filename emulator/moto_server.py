"""moto's S3 server as strict as the Hub's gateway: `python -m emulator.moto_server BUCKET ACCESS_KEY`.

It prints `{"port": n}` once it listens and ends when its standard input does, which is when the emulator dies.

In front of moto stands what the gateway at https://s3.hf.co is known to differ in, so that a client that relies on more
fails here first: only the one access key; conditional PUTs that are atomic; no `If-Match` and the like on GET; no user
metadata; no checksum the client was not asked for; ListObjectsV2 only, and `/` the only delimiter.
"""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, NoReturn
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

from emulator.disturbance import Disturbance

LOOPBACK = "127.0.0.1"
MAX_CONCURRENT_LOCKS = 64

DISTURB_PATH = "/_emulator/disturb"
"""Takes the arguments of `Disturbance.set`, with the access key in the header x-emulator-key."""

Environ = dict[str, Any]
Headers = list[tuple[str, str]]
StartResponse = Callable[..., Any]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]

_BODY_AND_CONDITIONS = {
    "CONTENT_LENGTH",
    "CONTENT_TYPE",
    "HTTP_CONTENT_MD5",
    "HTTP_IF_MATCH",
    "HTTP_IF_NONE_MATCH",
    "HTTP_TRANSFER_ENCODING",
    "werkzeug.request",
}
"""What a HEAD made from a PUT leaves out."""


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
        self._disturbance = Disturbance()

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer, refuse, or hand on to moto."""
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path == DISTURB_PATH:
            return self._disturb(environ, start_response)
        if code := self._disturbance.refusal():
            return _error(environ, start_response, 503, code, "Please reduce your request rate.")
        if refused := refusal(environ, self.access_key):
            return _error(environ, start_response, *refused)
        if method == "PUT" or method == "POST":
            # moto looks and writes in two steps, so of two conditional PUTs at once both could win.
            with self._locks[hash(path) % len(self._locks)]:
                return self._write(environ, start_response)
        if self._disturbance.lags and method in ("GET", "HEAD"):
            return self._read(environ, start_response)
        return self.behind(environ, start_response)

    def _write(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if not self._disturbance.lags:
            return list(self.behind(environ, start_response))
        known = self._exists(environ)
        status, headers, body = _collect(self.behind, environ)
        if not known and status.startswith("200") and "uploads" not in environ["QUERY_STRING"]:
            self._disturbance.wrote(path)
        start_response(status, headers)
        return [body]

    def _exists(self, environ: Environ) -> bool:
        head = {name: value for name, value in environ.items() if name not in _BODY_AND_CONDITIONS}
        head |= {"REQUEST_METHOD": "HEAD", "QUERY_STRING": "", "wsgi.input": io.BytesIO()}
        return _collect(self.behind, head)[0].startswith("200")

    def _read(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        bucket, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
        if key and self._disturbance.hidden(environ["PATH_INFO"]):
            return _error(environ, start_response, 404, "NoSuchKey", "The specified key does not exist.")
        if key:
            return self.behind(environ, start_response)
        status, headers, body = _collect(self.behind, environ)
        body = self._disturbance.trim(bucket, body)
        headers = [(n, str(len(body)) if n.lower() == "content-length" else v) for n, v in headers]
        start_response(status, headers)
        return [body]

    def _disturb(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        wanted = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        if environ.get("HTTP_X_EMULATOR_KEY") != self.access_key:
            return _error(environ, start_response, 403, "AccessDenied", "Access Denied")
        self._disturbance.set(**wanted)
        start_response("204 No Content", [])
        return []


def _collect(application: Application, environ: Environ) -> tuple[str, Headers, bytes]:
    """Run a WSGI application to its end."""
    answer: list[tuple[str, Headers]] = []

    def start_response(status: str, headers: Headers, error: Any = None) -> Callable[[bytes], None]:
        answer.append((status, headers))
        return lambda data: None

    body = b"".join(application(environ, start_response))
    return *answer[-1], body


def _error(environ: Environ, start_response: StartResponse, status: int, code: str, message: str) -> Iterable[bytes]:
    if length := int(environ.get("CONTENT_LENGTH") or 0):
        environ["wsgi.input"].read(length)  # or the client meets a reset connection instead of the answer
    body = (
        f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{escape(code)}</Code>"
        f"<Message>{escape(message)}</Message></Error>"
    ).encode()
    start_response(f"{status} {code}", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
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
