import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from jobs import bucket as bucket_module
from jobs.bucket import Bucket, BucketSettings
from jobs.errors import BucketError, ConfigError
from tests.conftest import MotoBucket

SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


@pytest.fixture
def bucket(moto_bucket: MotoBucket) -> Bucket:
    return Bucket.from_env(moto_bucket.environ, retry_s=5)


@pytest.mark.parametrize("key", ["", "a//b", "/a", "a/", "a/../b", ".", "a\\b"])
def test_a18_a_key_that_would_alias_is_refused(bucket: Bucket, key: str) -> None:
    with pytest.raises(BucketError, match="non-empty parts"):
        bucket.put(key, b"")


def test_a17_an_empty_page_that_says_there_is_more_is_not_the_end(store: str) -> None:
    def page(keys: list[str], more: str) -> tuple[int, bytes, str]:
        contents = "".join(f"<Contents><Key>{key}</Key><Size>1</Size></Contents>" for key in keys)
        token = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{more}</NextContinuationToken>" if more else ""
        name = "<Name>plain</Name><EncodingType>url</EncodingType>"
        return (
            200,
            f"<?xml version='1.0'?><ListBucketResult>{name}{contents}{token}</ListBucketResult>".encode(),
            "application/xml",
        )

    Store.script = [page(["a"], "t1"), page([], "t2"), page(["b%2Bc"], "")]
    assert Bucket(settings(store)).list("") == ["a", "b+c"]
    assert ["continuation-token=t" in path for path in Store.paths] == [False, True, True]


class Store(BaseHTTPRequestHandler):
    """An S3 server that fails as scripted: (status, body, content type) for each of the next requests, then 200."""

    script: ClassVar[list[tuple[int, bytes, str]]] = []
    headers_seen: ClassVar[list[dict[str, str]]] = []
    paths: ClassVar[list[str]] = []

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        Store.headers_seen.append({key.lower(): value for key, value in self.headers.items()})
        Store.paths.append(self.path)
        status, body, kind = Store.script.pop(0) if Store.script else (200, b"data", "text/plain")
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_DELETE = answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def store() -> Iterator[str]:
    Store.script, Store.headers_seen, Store.paths = [], [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def settings(endpoint: str, url: str = "s3://plain") -> BucketSettings:
    return BucketSettings(url, endpoint, "key", "secret")


@pytest.mark.parametrize("body, kind", [(SLOW_DOWN, "application/xml"), (b"", ""), (b"<html>busy</html>", "text/html")])
def test_a19_throttling_is_waited_out_and_counted(
    store: str, body: bytes, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "FIRST_PAUSE_S", 0.001)
    bucket = Bucket(settings(store))
    for call in (lambda: bucket.put("k", b"x"), lambda: bucket.get("k"), lambda: bucket.delete(["k"])):
        Store.script = [(503, body, kind)] * 6
        call()
        assert Store.script == []
    assert bucket.throttled == 18


PAGE = b"<html><body>Service Unavailable<br></body></html>"
UNREADABLE = {
    "a page that says it is XML": (503, PAGE, "application/xml"),
    "XML cut short": (503, SLOW_DOWN[:50], "application/xml"),
    "a page in latin-1": (502, "<html>hôte indisponible</html>".encode("latin-1"), "text/html"),
}
NO_ANSWERS = {
    "no bytes": (200, b"", "application/json"),
    "a page": (200, PAGE, "text/html"),
    "a page that is XML": (200, b"<html><body></body></html>", "application/xml"),
    "a JSON list": (200, b"[]", "application/json"),
    "bytes": (200, b"\xff\xfe\xfd", "application/json"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_an_error_that_cannot_be_read_is_tried_again(store: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "FIRST_PAUSE_S", 0.001)
    bucket = Bucket(settings(store))
    for call in (lambda: bucket.put("k", b"x"), lambda: bucket.put_new("k", b"x"), lambda: bucket.get("k")):
        Store.script = [UNREADABLE[what]] * 3
        call()
        assert Store.script == []
    Store.script = [UNREADABLE[what]] * 1000
    with pytest.raises(BucketError, match=r"get k: the bucket at .* did not answer as it should"):
        Bucket(settings(store), retry_s=0.01).get("k")


@pytest.mark.parametrize("what", NO_ANSWERS)
def test_a_listing_or_an_object_that_cannot_be_read_is_asked_for_again(
    store: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "FIRST_PAUSE_S", 0.001)
    bucket = Bucket(settings(store))
    listing = b"<ListBucketResult><Name>plain</Name><Contents><Key>a</Key><Size>1</Size></Contents></ListBucketResult>"
    Store.script = [NO_ANSWERS[what]] * 2 + [(200, listing, "application/xml")]
    assert bucket.list("") == ["a"]
    Store.script = [NO_ANSWERS[what]] * 2 + [(200, b'{"a": 1}', "application/json")]
    assert bucket.get_json("k") == {"a": 1}
    Store.script = [NO_ANSWERS[what]] * 1000
    with pytest.raises(BucketError, match="get k: the bucket at"):
        Bucket(settings(store), retry_s=0.01).get_json("k")


def test_a19_throttling_without_end_is_a_bounded_clear_failure(store: str) -> None:
    Store.script = [(503, SLOW_DOWN, "application/xml")] * 1000
    with pytest.raises(BucketError, match=r"get k: the bucket at .* for 0 s\. Last: SlowDown: Please reduce"):
        Bucket(settings(store), retry_s=0.3).get("k")


def test_a_server_that_is_not_there_is_a_clear_failure(free_port: int) -> None:
    with pytest.raises(BucketError, match="Connection refused"):
        Bucket(settings(f"http://127.0.0.1:{free_port}"), retry_s=0.2).get("k")


def test_a_refusal_is_not_tried_again(store: str) -> None:
    denied = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>No.</Message></Error>"
    Store.script = [(403, denied, "application/xml")] * 3
    with pytest.raises(BucketError, match="refused it: AccessDenied: No"):
        Bucket(settings(store)).put("k", b"")
    assert len(Store.script) == 2


def test_a16_no_checksum_headers_are_sent(store: str) -> None:
    bucket = Bucket(settings(store))
    bucket.put("k", b"x")
    bucket.get("k")
    for headers in Store.headers_seen:
        assert not [
            name for name in headers if name.startswith(("x-amz-checksum", "x-amz-trailer", "x-amz-meta", "x-amz-sdk"))
        ]
        assert headers.get("content-encoding") is None


@pytest.mark.parametrize("name", ["plain", "dotted.name"])
@pytest.mark.parametrize("path", ["", "/namespace"])
def test_a20_custom_endpoints_are_addressed_by_path(store: str, name: str, path: str) -> None:
    bucket = Bucket(settings(store.replace("127.0.0.1", "localhost") + path, f"s3://{name}/pre"))
    bucket.put("k", b"x")
    Store.script = [
        (200, b"<?xml version='1.0'?><ListBucketResult><Name>x</Name></ListBucketResult>", "application/xml")
    ]
    bucket.list("runs/")
    assert Store.paths[0] == f"{path}/{name}/pre/k"
    assert Store.paths[1].startswith(f"{path}/{name}?") and "prefix=pre%2Fruns%2F" in Store.paths[1]
    assert "us-east-1" in Store.headers_seen[0]["authorization"]


def test_settings_come_from_the_environment_and_hide_secrets(moto_bucket: MotoBucket) -> None:
    found = BucketSettings.from_env({**moto_bucket.environ, "AWS_REGION": "auto", "AWS_SESSION_TOKEN": "hidden-token"})
    assert found.region == "auto"
    assert BucketSettings.from_env({**found.environment(), **found.secrets()}) == found
    assert "test-secret" not in repr(found) and "hidden-token" not in repr(found)
    assert not set(found.environment()) & set(found.secrets())
    for name in ("ASYNCGRPO_BUCKET", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        with pytest.raises(ConfigError, match=f"{name} is not set"):
            BucketSettings.from_env({key: value for key, value in moto_bucket.environ.items() if key != name})
    for wrong in ("bucket", "http://bucket", "s3://"):
        with pytest.raises(ConfigError, match="expected s3://bucket"):
            Bucket(settings("http://127.0.0.1:1", wrong))
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL"):
        Bucket(settings("127.0.0.1:1"))


def test_a_file_of_authorities_that_is_not_there_is_named() -> None:
    environ = {"ASYNCGRPO_BUCKET": "s3://b", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    with pytest.raises(ConfigError, match=r"AWS_CA_BUNDLE .* = '/nowhere.pem': no certificates can be read there"):
        Bucket.from_env({**environ, "AWS_CA_BUNDLE": "/nowhere.pem"})
