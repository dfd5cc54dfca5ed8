"""What the bucket's client promises, against every store: moto, moto in the manner of others, and other servers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from emulator.bucket_programs import PROGRAMS
from jobs import bucket as bucket_module
from jobs import doctor
from jobs.bucket import Bucket, BucketSettings
from jobs.errors import BucketError, NotFound
from tests import conftest, stores

NUMBERS = count(1)
ODD = ["a b", "a+b", "a%2Bb", "a%20b", "a#b", "a?b", "a=b", "a&b;c", "\u00fc", "u\u0308", "~a*'()", "\u4e2d/\U0001f600"]


@pytest.fixture(scope="module", params=stores.STORES)
def settings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, moto_endpoint: str
) -> Iterator[BucketSettings]:
    plain = lambda: conftest.new_bucket(moto_endpoint)  # noqa: E731
    with stores.serve(request.param, tmp_path_factory.mktemp("tls"), plain) as settings:
        yield settings


@pytest.fixture
def bucket(settings: BucketSettings, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A prefix of its own, so that no test sees another's keys."""
    monkeypatch.setattr(bucket_module, "FIRST_PAUSE_S", 0.02)
    return Bucket(replace(settings, url=f"{settings.url}/test {next(NUMBERS)}/x"), retry_s=10)


def test_put_get_list_delete(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("runs/a/x", b"1")
    (tmp_path / "file").write_bytes(b"22")
    bucket.put_file("runs/a/y", tmp_path / "file")
    bucket.put("runs/b/z", b"")
    assert bucket.list("runs/a/") == ["runs/a/x", "runs/a/y"]
    assert bucket.list("") == ["runs/a/x", "runs/a/y", "runs/b/z"]
    assert bucket.get("runs/b/z") == b""
    bucket.get_file("runs/a/y", tmp_path / "deep" / "copy")
    assert (tmp_path / "deep" / "copy").read_bytes() == b"22"
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "copy"]
    bucket.delete(["runs/a/x", "runs/a/nothing"])
    with pytest.raises(NotFound, match="runs/a/x"):
        bucket.get("runs/a/x")
    with pytest.raises(NotFound):
        bucket.get_file("runs/a/x", tmp_path / "gone")
    assert not (tmp_path / "gone").exists()


def test_the_top_of_the_bucket_and_a_prefix_in_it(settings: BucketSettings, bucket: Bucket) -> None:
    name = f"top {next(NUMBERS)}"
    top = Bucket(settings, retry_s=10)
    top.put(f"{name}/a", b"1")
    below = Bucket(replace(settings, url=f"{settings.url}/{name}"), retry_s=10)
    assert below.list("") == ["a"] and below.get("a") == b"1"
    assert f"{name}/a" in top.list("")
    top.create()  # it is there
    assert top.get(f"{name}/a") == b"1"


def test_a_name_is_taken_once(bucket: Bucket) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda i: bucket.put_new("attempts/1", str(i).encode()), range(8)))
    assert sum(won) == 1
    assert bucket.get("attempts/1") == str(won.index(True)).encode()
    assert bucket.put_new("attempts/1", str(won.index(True)).encode())  # a repeat whose first answer got lost


def test_an_object_is_replaced_only_as_it_was_read(bucket: Bucket) -> None:
    bucket.put("k", b"1")
    _, etag = bucket.get_tagged("k")
    written = bucket.put("k2", b"22")
    assert {key: entry[:2] for key, entry in bucket.entries("k").items()} == {
        "k": (etag.strip('"'), 1),
        "k2": (written, 2),
    }
    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(lambda i: bucket.put_if("k", b"new %d" % i, etag), range(4)))
    assert sum(won) == 1
    assert bucket.get("k") == b"new %d" % won.index(True)
    assert not bucket.put_if("nothing", b"3", etag)
    with pytest.raises(NotFound):
        bucket.get("nothing")


def test_the_age_of_an_object_is_told_by_the_bucket(bucket: Bucket) -> None:
    bucket.put("k", b"1")
    assert 0 <= bucket.age_s("k") < 30


def test_a18_keys_come_back_as_they_are(bucket: Bucket) -> None:
    names = [f"k/{name}" for name in ODD]
    for name in names:
        bucket.put(name, name.encode())
    assert [bucket.get(name) for name in names] == [name.encode() for name in names]
    assert bucket.list("k/") == sorted(names)
    assert bucket.list("k/a+") == ["k/a+b"]
    bucket.delete(names[:2])
    assert bucket.list("k/") == sorted(names[2:])


def test_a17_more_than_a_page_of_keys(bucket: Bucket, request: pytest.FixtureRequest) -> None:
    is_program = request.node.callspec.params["settings"] in PROGRAMS
    keys = [f"many/{i:04}" for i in range(1001 if is_program else 101)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: bucket.put(key, b""), keys))
    assert bucket.list("many/") == keys
    if not is_program:
        bucket.delete(bucket.list("many/"))
        assert bucket.list("many/") == []


def test_large_files_go_in_parts(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "MULTIPART_BYTES", 5 << 20)
    data = bytes(range(256)) * (11 << 12)
    (tmp_path / "large").write_bytes(data)
    written = bucket.put_file("large", tmp_path / "large")
    assert bucket.get("large") == data
    etag = bucket.get_tagged("large")[1]
    assert etag.endswith('-3"')  # three parts
    assert written == bucket.entries("large")["large"].etag == etag.strip('"')
    assert bucket.put_if("large", b"small", etag)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"secret_key": "wrong-secret"}, "Check AWS_SECRET_ACCESS_KEY"),
        ({"access_key": "AKSTRANGER"}, "Check AWS_ACCESS_KEY_ID"),
        ({"url": "s3://no-such-bucket"}, "check ASYNCGRPO_BUCKET"),
    ],
)
def test_what_a_store_refuses_is_told_with_the_fix(
    settings: BucketSettings, request: pytest.FixtureRequest, wrong: dict[str, str], words: str
) -> None:
    store = request.node.callspec.params["settings"]
    if store == "moto" and "url" not in wrong:
        pytest.skip("moto alone lets everybody in")
    if store == "seaweedfs" and "url" in wrong:
        pytest.skip("SeaweedFS makes the bucket for its administrator")
    with pytest.raises(BucketError, match=words):
        Bucket(replace(settings, **wrong), retry_s=1).put("k", b"")


def test_a_region_that_the_keys_are_not_for(settings: BucketSettings, request: pytest.FixtureRequest) -> None:
    elsewhere = Bucket(replace(settings, region="ap-south-1"), retry_s=1)
    if request.node.callspec.params["settings"] in ("hub", "hub over tls", "aws", "r2"):
        with pytest.raises(BucketError, match=f"expecting {settings.region!r}.*Set AWS_REGION"):
            elsewhere.put("k", b"")
    else:
        elsewhere.put("region", b"")


def test_the_doctor_finds_nothing_wrong(settings: BucketSettings) -> None:
    environ = settings.environment() | settings.secrets()
    assert [finding for finding in doctor.check_bucket(environ, None) if not finding.ok] == []
