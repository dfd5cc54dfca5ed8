"""The bucket: the one thing all machines of a run share. A small S3 client over minio-py.

Only what every S3-compatible store offers is used: PUT, conditional PUT, GET, ListObjectsV2 and DELETE, path style, no
user metadata, no checksum headers (some gateways refuse them; our readers verify a sha256 of their own). Conditional
PUT: https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
"""

import json
import logging
import os
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit
from xml.etree import ElementTree

import certifi
import urllib3
from minio import Minio
from minio.datatypes import parse_list_objects
from minio.error import InvalidResponseError, S3Error, ServerError

from jobs.errors import BucketError, ConfigError, NotFound

log = logging.getLogger(__name__)

RETRY_S = 120.0
"""How long a call is retried before it fails: a bucket that is away for a minute must not end a run."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Back-off between tries: doubles from the first to the longest, each with full jitter."""
SHOWN_S = 30.0
"""How long a bucket may take to show an object that was written for sure. Seen at the Hub's: about 2.5 s."""
SHOWN_POLL_S = 0.2
CONNECT_S, READ_S = 5.0, 60.0
MULTIPART_BYTES = 64 << 20
"""Files over this size are sent in parts; 5 GiB is the limit of one PUT in S3's own documentation."""

_THROTTLED = {"SlowDown", "ServiceUnavailable", "RequestLimitExceeded", "TooManyRequests", "Throttling"}
_PASSING = _THROTTLED | {"InternalError", "RequestTimeout", "ConditionalRequestConflict", "OperationAborted"}
_FAILED_CONDITION = {"PreconditionFailed", "412"}
_TAKEN = {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}
_UNDONE = (S3Error, ServerError, InvalidResponseError, urllib3.exceptions.HTTPError)
_UNREADABLE = (ElementTree.ParseError, ValueError)
"""What reading an answer raises that is not what its status and type say: a gateway's page, or half of an answer."""
_FIXES = {
    "AuthorizationHeaderMalformed": "Set AWS_REGION to the bucket's region.",
    "RequestTimeTooSkewed": "Set this machine's clock.",
    "SignatureDoesNotMatch": "Check AWS_SECRET_ACCESS_KEY.",
    "InvalidAccessKeyId": "Check AWS_ACCESS_KEY_ID, and that AWS_ENDPOINT_URL is the store it is for.",
    "InvalidToken": "Check AWS_SESSION_TOKEN: temporary keys are good with their token only.",
    "ExpiredToken": "Get new temporary keys.",
    "NoSuchBucket": "Make the bucket, or check ASYNCGRPO_BUCKET.",
}
"""What helps against an S3 error that another try does not mend."""

T = TypeVar("T")


@dataclass(frozen=True)
class BucketSettings:
    """Where the bucket is and what opens it. `url` is `s3://bucket` or `s3://bucket/prefix`."""

    url: str
    endpoint: str
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    region: str = "us-east-1"
    ca_file: str | None = None
    """PEM file of the authorities that the endpoint's certificate is checked against; None: those of `certifi`."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "BucketSettings":
        """Settings from `ASYNCGRPO_BUCKET` and the AWS SDKs' own variables (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`,
        ...).

        Raises:
            ConfigError: naming the variable that is missing or malformed.
        """
        for name in ("ASYNCGRPO_BUCKET", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            if not environ.get(name):
                raise ConfigError(f"{name} is not set: every role reaches the bucket through it. Set it.")
        endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or "https://s3.amazonaws.com"
        return cls(
            url=environ["ASYNCGRPO_BUCKET"],
            endpoint=endpoint,
            access_key=environ["AWS_ACCESS_KEY_ID"],
            secret_key=environ["AWS_SECRET_ACCESS_KEY"],
            session_token=environ.get("AWS_SESSION_TOKEN") or None,
            region=environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1",
            ca_file=environ.get("AWS_CA_BUNDLE") or environ.get("SSL_CERT_FILE") or None,
        )

    def environment(self) -> dict[str, str]:
        """The variables of `from_env` that hold no secret."""
        where = {"ASYNCGRPO_BUCKET": self.url, "AWS_ENDPOINT_URL": self.endpoint, "AWS_REGION": self.region}
        return where | ({"AWS_CA_BUNDLE": self.ca_file} if self.ca_file else {})

    def secrets(self) -> dict[str, str]:
        """The variables of `from_env` that do."""
        keys = {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}
        return keys | ({"AWS_SESSION_TOKEN": self.session_token} if self.session_token else {})


def _trusting(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(
            f"AWS_CA_BUNDLE (or SSL_CERT_FILE) = {ca_file!r}: no certificates can be read there ({error}). Unset it, "
            "or name a PEM file of this machine."
        ) from error


class Entry(NamedTuple):
    """An object as a listing shows it."""

    etag: str
    size: int
    modified: datetime | None


class Bucket:
    """A bucket, or the part of it below a prefix. Synchronous and thread-safe.

    Every call is tried again after throttling, 5xx, connection errors and answers that cannot be read, until `retry_s`
    is over. `throttled` counts the answers that asked for a slower pace.
    """

    def __init__(self, settings: BucketSettings, retry_s: float = RETRY_S) -> None:
        where, endpoint = urlsplit(settings.url), urlsplit(settings.endpoint)
        if where.scheme != "s3" or not where.netloc:
            raise ConfigError(f"ASYNCGRPO_BUCKET = {settings.url!r}: expected s3://bucket or s3://bucket/prefix.")
        if endpoint.scheme not in ("http", "https") or not endpoint.netloc:
            raise ConfigError(f"AWS_ENDPOINT_URL = {settings.endpoint!r}: expected http(s)://host[:port][/path].")
        self.settings = settings
        self.retry_s = retry_s
        self.throttled = 0
        self._lock = threading.Lock()
        # An endpoint may have a path (https://s3.hf.co/<namespace>): minio-py takes none, so the path's first part
        # stands where minio expects the bucket, and the bucket's name starts the key.
        self._root = [part for part in f"{endpoint.path}/{where.netloc}/{where.path}".split("/") if part]
        self._below_bucket = len([part for part in where.path.split("/") if part])
        self._client = Minio(
            endpoint.netloc,
            settings.access_key,
            settings.secret_key,
            session_token=settings.session_token,
            secure=endpoint.scheme == "https",
            region=settings.region,
            http_client=urllib3.PoolManager(
                timeout=urllib3.Timeout(connect=CONNECT_S, read=READ_S),
                maxsize=16,
                retries=False,
                # Not `ca_certs`: the file would be read again for every connection (60 ms measured).
                ssl_context=_trusting(settings.ca_file or certifi.where()),
            ),
        )

    @classmethod
    def from_env(cls, environ: Mapping[str, str], retry_s: float = RETRY_S) -> "Bucket":
        """The bucket that the environment names. See `BucketSettings.from_env`."""
        return cls(BucketSettings.from_env(environ), retry_s)

    def create(self) -> None:
        """Makes the bucket itself, if it is not there."""
        region = self.settings.region
        place = f"<LocationConstraint>{region}</LocationConstraint>" if region not in ("us-east-1", "auto") else ""
        body = f"<CreateBucketConfiguration>{place}</CreateBucketConfiguration>".encode() if place else None
        try:
            self._retried(lambda: self._execute_on_bucket("PUT", body=body), f"create {self.settings.url}")
        except S3Error as error:
            if error.code not in _TAKEN:
                raise

    def ensure(self) -> None:
        """Makes the bucket itself unless it is there. Where it is, keys that may make none will do."""
        try:
            self.get("runs")
        except NotFound:
            return
        except BucketError as error:
            if not (isinstance(error.__cause__, S3Error) and error.__cause__.code == "NoSuchBucket"):
                raise
            self.create()

    def put(self, key: str, data: bytes) -> str:
        """Writes an object, over an older one if there is any; returns its etag, as `entries` has it."""
        response = self._retried(lambda: self._send("PUT", key, body=data), f"put {key}")
        return str(response.headers.get("etag", "")).strip('"')

    def put_new(self, key: str, data: bytes) -> bool:
        """Writes an object unless the key is taken; False if it is, by other bytes.

        An answer that got lost and a second try that then meets the first one's bytes counts as written, so callers
        that race put something of their own (a random nonce) into `data`.
        """
        return self._conditional(key, data, {"If-None-Match": "*"})

    def put_if(self, key: str, data: bytes, etag: str) -> bool:
        """Writes an object over the one with this `etag`; False if it has changed since, or is gone."""
        try:
            return self._conditional(key, data, {"If-Match": etag})
        except NotFound:
            return False

    def get(self, key: str) -> bytes:
        """The object's bytes.

        Raises:
            NotFound: no object under the key.
        """
        return self.get_tagged(key)[0]

    def get_tagged(self, key: str) -> tuple[bytes, str]:
        """The object's bytes and its etag, for `put_if`."""
        response = self._retried(lambda: self._send("GET", key), f"get {key}")
        return response.data, response.headers.get("etag", "")

    def get_json(self, key: str, within_s: float = 0.0) -> dict[str, Any]:
        """The JSON object under the key. Bytes that are none (a gateway's page, or nothing, with status 200) are no
        answer: every object that is read so was written as one. `within_s`: see `get_shown`."""
        return self._shown(lambda: self.get_json_tagged(key)[0], within_s)

    def get_json_tagged(self, key: str) -> tuple[dict[str, Any], str]:
        """The same and its etag, for `put_if`."""

        def read() -> tuple[dict[str, Any], str]:
            response = self._send("GET", key)
            found = json.loads(response.data)
            if not isinstance(found, dict):
                raise ValueError("no JSON object")
            return found, response.headers.get("etag", "")

        return self._retried(read, f"get {key}")

    def get_shown(self, key: str, within_s: float = SHOWN_S) -> bytes:
        """The bytes of an object that was written for sure, though the bucket may show it late.

        Raises:
            NotFound: it does not show it within `within_s`.
        """
        return self._shown(lambda: self.get(key), within_s)

    def age_s(self, key: str) -> float:
        """Whole seconds since the object was written, by the bucket's own clock: `Date` less `Last-Modified`.

        Raises:
            NotFound: no object under the key.
        """

        def read() -> float:
            headers = self._send("GET", key).headers
            now, written = (parsedate_to_datetime(headers.get(name, "")) for name in ("date", "last-modified"))
            return (now - written).total_seconds()

        return self._retried(read, f"get {key}")

    def put_file(self, key: str, path: Path) -> str:
        """Writes a file's content, in parts when it is large; returns its etag."""
        if path.stat().st_size <= MULTIPART_BYTES:
            return self.put(key, path.read_bytes())
        bucket, name = self._place(key)
        written = self._retried(
            lambda: self._client.fput_object(bucket, name, str(path), part_size=MULTIPART_BYTES), f"put {key}"
        )
        return str(written.etag)

    def get_file(self, key: str, path: Path) -> None:
        """Writes the object's bytes to `path`, which appears whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")

        def fetch() -> None:
            response = self._send("GET", key, preload_content=False)
            try:
                with part.open("wb") as file:
                    for chunk in response.stream(1 << 20):
                        file.write(chunk)
            finally:
                response.close()
                response.release_conn()

        try:
            self._retried(fetch, f"get {key}")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def list(self, prefix: str) -> list[str]:
        """All keys that start with `prefix`, sorted."""
        return sorted(self.entries(prefix))

    def entries(self, prefix: str) -> dict[str, Entry]:
        """The same keys with what the bucket says of them. Goes on while a page says it is truncated, be it empty."""
        entries: dict[str, Entry] = {}
        token: str | None = None
        below = "/".join(self._root[-self._below_bucket :]) + "/" if self._below_bucket else ""
        while True:
            query: dict[str, Any] = {"list-type": "2", "prefix": below + prefix, "encoding-type": "url"}
            if token:
                query["continuation-token"] = token

            def page(query: dict[str, Any] = query) -> Any:
                return parse_list_objects(self._execute_on_bucket("GET", query_params=query))

            objects, truncated, token, _ = self._retried(page, f"list {prefix}")
            for each in objects:
                key = str(each.object_name).removeprefix(below)
                entries[key] = Entry(str(each.etag), each.size or 0, each.last_modified)
            if not (truncated and token):
                return entries

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects; a key that is not there is no error."""
        for key in keys:
            self._retried(lambda key=key: self._send("DELETE", key), f"delete {key}")  # type: ignore[misc]

    def _shown(self, get: Callable[[], T], within_s: float) -> T:
        deadline = time.monotonic() + within_s
        while True:
            try:
                return get()
            except NotFound:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(SHOWN_POLL_S)

    def _place(self, key: str) -> tuple[str, str]:
        parts = key.split("/")
        # SeaweedFS, as an example, keeps a backslash as a slash: two keys would be one object.
        if not key or "\\" in key or any(part in ("", ".", "..") for part in parts):
            raise BucketError(
                f"key {key!r}: a key has non-empty parts between '/', none of them '.' or '..', and no backslash."
            )
        whole = [*self._root, *parts]
        return whole[0], "/".join(whole[1:])

    def _send(self, method: str, key: str, **kwargs: Any) -> Any:
        bucket, name = self._place(key)
        return self._client._execute(method, bucket, name, **kwargs)

    def _execute_on_bucket(self, method: str, **kwargs: Any) -> Any:
        bucket, *more = self._root[: len(self._root) - self._below_bucket]
        return self._client._execute(method, bucket, "/".join(more) or None, **kwargs)

    def _conditional(self, key: str, data: bytes, condition: dict[str, str]) -> bool:
        try:
            self._retried(lambda: self._send("PUT", key, body=data, headers=dict(condition)), f"put {key}")
            return True
        except S3Error as error:
            if error.code not in _FAILED_CONDITION:
                raise
        try:
            return self.get(key) == data
        except NotFound:
            return False

    def _retried(self, call: Callable[[], T], what: str) -> T:
        deadline = time.monotonic() + self.retry_s
        pause = FIRST_PAUSE_S
        while True:
            try:
                return call()
            except (*_UNDONE, *_UNREADABLE) as error:
                reason = self._passing(error, what)
                if time.monotonic() + pause > deadline:
                    raise BucketError(
                        f"{what}: the bucket at {self.settings.endpoint} did not answer as it should for "
                        f"{self.retry_s:.0f} s. Last: {reason}"
                    ) from error
                log.debug("%s: %s; trying again", what, reason)
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, LONGEST_PAUSE_S)

    def _passing(self, error: Exception, what: str) -> str:
        """Says why the call failed, if another try may help; else raises what the caller should see."""
        if isinstance(error, S3Error):
            if error.code in ("NoSuchKey", "404"):
                raise NotFound(what.partition(" ")[2]) from error
            if error.code in _FAILED_CONDITION | _TAKEN:
                raise error
            status = error.response.status if error.response else 0
            if error.code in _THROTTLED or status == 503:
                with self._lock:
                    self.throttled += 1
            elif error.code not in _PASSING and (status < 500 or status == 501):
                words = f"{what}: the bucket at {self.settings.endpoint} refused it: {error.code}: {error.message}"
                raise BucketError(f"{words} {_FIXES.get(str(error.code), '')}".rstrip()) from error
            return f"{error.code}: {error.message}"
        if isinstance(error, ServerError | InvalidResponseError):
            # Answers without an XML body: a HEAD-like 503, or a gateway's page in front of the store.
            status = error.status_code if isinstance(error, ServerError) else error._code
            if status == 412:
                raise S3Error(None, "PreconditionFailed", None, None, None, None) from error  # type: ignore[arg-type]
            if status == 404:
                raise NotFound(what.partition(" ")[2]) from error
            if status in (429, 503):
                with self._lock:
                    self.throttled += 1
            elif status < 500:
                raise BucketError(f"{what}: the bucket at {self.settings.endpoint} answered status {status}") from error
            return f"status {status}"
        return f"{type(error).__name__}: {error}"
