"""The WSGI application before the bucket's store: checks signatures, has a profile's manners, misbehaves on demand."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any
from xml.sax.saxutils import escape

from emulator import profiles, signature
from emulator.disturbance import Disturbance
from emulator.profiles import Profile
from emulator.signature import Keys, Request

LOCKS = 64
DISTURB_PATH = "/_emulator/disturb"
"""Takes the arguments of `Disturbance.set`, with the access key in the header x-emulator-key; tells whether one is
`torn`."""
AGAIN = "again."
"""Starts the token that follows an empty page: the same page is asked for once more, and comes with its keys."""

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
_ENTRY = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
_NEXT = re.compile(rb"(<NextContinuationToken>).*?(</NextContinuationToken>)")
_COUNT = re.compile(rb"(<KeyCount>)\d+(</KeyCount>)")


class Front:
    """One bucket server's front. `keys` are the only ones that open it."""

    def __init__(self, behind: Application, keys: Keys, profile: Profile) -> None:
        self.behind, self.keys, self.profile = behind, keys, profile
        self._locks = [threading.Lock() for _ in range(LOCKS)]
        self._disturbance = Disturbance()
        self._written: dict[str, float] = {}

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer, refuse, or hand on."""
        if environ["PATH_INFO"] == DISTURB_PATH:
            return self._disturb(environ, start_response)
        if code := self._disturbance.refusal():
            return _error(environ, start_response, 503, code, "Please reduce your request rate.")
        request = _request(environ)
        if refused := signature.refusal(request, self.keys, datetime.now(UTC)) or self._unsigned_body(environ, request):
            return _error(environ, start_response, *refused)
        if not self._enter_namespace(environ):
            return _error(environ, start_response, 404, "NoSuchBucket", "The specified bucket does not exist")
        request = _request(environ)
        if refused := profiles.refusal(self.profile, request):
            return _error(environ, start_response, *refused)
        # moto takes the region from the signature, and knows none of R2's.
        environ["HTTP_AUTHORIZATION"] = re.sub("/(auto)?/s3/", "/us-east-1/s3/", environ.get("HTTP_AUTHORIZATION", ""))
        if request.method in ("PUT", "POST"):
            return self._locked(environ, start_response)
        if profiles.is_list(request):
            return self._list(environ, start_response)
        if (
            self._disturbance.lags
            and request.method in ("GET", "HEAD")
            and self._disturbance.hidden(environ["PATH_INFO"])
        ):
            return _error(environ, start_response, 404, "NoSuchKey", "The specified key does not exist.")
        return self.behind(environ, start_response)

    def _unsigned_body(self, environ: Environ, request: Request) -> signature.Refusal | None:
        """Reads the body, which the store then reads again, and checks it against what was signed."""
        if not environ.get("CONTENT_LENGTH"):
            return None
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        environ["wsgi.input"] = io.BytesIO(body)
        return signature.payload_refusal(request, body)

    def _enter_namespace(self, environ: Environ) -> bool:
        """Takes the namespace off the path; False if there is none.

        Another namespace than the profile's own has buckets of its own.
        """
        if not self.profile.namespace:
            return True
        for name in ("PATH_INFO", "RAW_URI", "REQUEST_URI"):
            path, question, query = environ[name].partition("?")
            namespace, _, rest = path.removeprefix("/").partition("/")
            if not namespace:
                return False
            inside = rest if namespace == self.profile.namespace else f"{namespace}--{rest}"
            environ[name] = f"/{inside}{question}{query}"
        return True

    def _locked(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        # moto looks and writes in two steps, so of two conditional PUTs at once both could win.
        path = environ["PATH_INFO"]
        lock = self._locks[hash(path) % LOCKS]
        conditional = "HTTP_IF_MATCH" in environ or "HTTP_IF_NONE_MATCH" in environ
        if not lock.acquire(blocking=not (self.profile.conflicts and conditional)):
            message = "A conflicting conditional operation is currently in progress against this resource."
            return _error(environ, start_response, 409, "ConditionalRequestConflict", message)
        try:
            return self._write(environ, start_response)
        finally:
            lock.release()

    def _write(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        path, is_put = environ["PATH_INFO"], environ["REQUEST_METHOD"] == "PUT"
        if is_put and self.profile.keys_are_paths and self._below_an_object(environ):
            message = "Object-prefix is already an object, please choose a different object-prefix name."
            return _error(environ, start_response, 400, "XMinioParentIsObject", message)
        if is_put and time.monotonic() - self._written.get(path, float("-inf")) < self.profile.writes_per_key_s:
            message = "Reduce your concurrent request rate for the same object."
            return _error(environ, start_response, 429, "TooManyRequests", message)
        if code := self._disturbance.tears(path):
            return _error(environ, start_response, 503, code, "Please reduce your request rate.")
        is_new = self._disturbance.lags and not self._exists(environ, path)
        status, headers, body = _collect(self.behind, environ)
        if status.startswith("200") and "uploads" not in environ["QUERY_STRING"]:
            if is_new:
                self._disturbance.wrote(path)
            if self.profile.writes_per_key_s and "uploadId" not in environ["QUERY_STRING"]:
                self._written[path] = time.monotonic()
        start_response(status, headers)
        return [body]

    def _below_an_object(self, environ: Environ) -> bool:
        bucket, *parts = environ["PATH_INFO"].strip("/").split("/")
        return any(self._exists(environ, "/".join(["", bucket, *parts[:depth]])) for depth in range(1, len(parts)))

    def _exists(self, environ: Environ, path: str) -> bool:
        head = {name: value for name, value in environ.items() if name not in _BODY_AND_CONDITIONS}
        head |= {"REQUEST_METHOD": "HEAD", "QUERY_STRING": "", "wsgi.input": io.BytesIO()}
        if path != environ["PATH_INFO"]:
            head |= dict.fromkeys(("PATH_INFO", "RAW_URI", "REQUEST_URI"), path)
        return _collect(self.behind, head)[0].startswith("200")

    def _list(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        asked = environ["QUERY_STRING"]
        environ = environ | {"QUERY_STRING": asked.replace(f"continuation-token={AGAIN}", "continuation-token=")}
        environ["QUERY_STRING"] = environ["QUERY_STRING"].replace("continuation-token=&", "")
        status, headers, body = _collect(self.behind, environ)
        if self._disturbance.lags:
            body = self._disturbance.trim(environ["PATH_INFO"].strip("/"), body)
        if self.profile.empty_pages and b"<IsTruncated>true" in body and AGAIN not in asked:
            token = dict(_request(environ).query).get("continuation-token", "")
            body = _NEXT.sub(rb"\g<1>%b\g<2>" % f"{AGAIN}{token}".encode(), _ENTRY.sub(b"", body))
            body = _COUNT.sub(rb"\g<1>0\g<2>", body)
        headers = [(n, str(len(body)) if n.lower() == "content-length" else v) for n, v in headers]
        start_response(status, headers)
        return [body]

    def _disturb(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        wanted = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        if environ.get("HTTP_X_EMULATOR_KEY") != self.keys.access_key:
            return _error(environ, start_response, 403, "AccessDenied", "Access Denied")
        self._disturbance.set(**wanted)
        body = json.dumps({"torn": self._disturbance.torn}).encode()
        start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]


def _request(environ: Environ) -> Request:
    headers = {name[5:].replace("_", "-").lower(): value for name, value in environ.items() if name.startswith("HTTP_")}
    for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if environ.get(name):
            headers[name.replace("_", "-").lower()] = environ[name]
    return Request(environ["REQUEST_METHOD"], environ["RAW_URI"], headers)


def _collect(application: Application, environ: Environ) -> tuple[str, Headers, bytes]:
    """Run a WSGI application to its end."""
    answer: list[tuple[str, Headers]] = []

    def start_response(status: str, headers: Headers, error: Any = None) -> Callable[[bytes], None]:
        answer.append((status, headers))
        return lambda data: None

    body = b"".join(application(environ, start_response))
    return *answer[-1], body


def _error(environ: Environ, start_response: StartResponse, status: int, code: str, message: str) -> Iterable[bytes]:
    if (length := int(environ.get("CONTENT_LENGTH") or 0)) and not isinstance(environ["wsgi.input"], io.BytesIO):
        environ["wsgi.input"].read(length)  # or the client meets a reset connection instead of the answer
    body = (
        f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{escape(code)}</Code>"
        f"<Message>{escape(message)}</Message></Error>"
    ).encode()
    start_response(f"{status} {code}", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]
