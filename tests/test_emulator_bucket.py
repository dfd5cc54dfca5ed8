"""moto's server in a process of its own, with the front before it. What every store has to do: test_bucket_suite.py."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from minio import time as minio_time

from emulator import tls
from emulator.bucket import MotoServer
from emulator.profiles import PROFILES
from jobs import bucket as bucket_module
from jobs.bucket import Bucket
from jobs.errors import BucketError, NotFound

PLAIN = Config(request_checksum_calculation="when_required", response_checksum_validation="when_required")


@pytest.fixture(scope="module")
def server():
    moto = MotoServer()
    moto.start()
    yield moto
    moto.stop()


@pytest.fixture(scope="module", params=PROFILES)
def profiled(request):
    moto = MotoServer(request.param)
    moto.start()
    yield moto
    moto.stop()


@pytest.fixture
def bucket(server):
    yield Bucket(server.settings, retry_s=5.0)
    server.refuse(count=0)
    server.disturb()


def boto(settings, config=PLAIN):
    return boto3.client(
        "s3",
        endpoint_url=settings.endpoint,
        region_name=settings.region,
        config=config.merge(Config(s3={"addressing_style": "path"}, signature_version="s3v4")),
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=settings.secret_key,
        aws_session_token=settings.session_token,
    )


def test_of_many_conditional_puts_exactly_one_wins(bucket):
    won = []
    barrier = threading.Barrier(16)

    def claim(index):
        barrier.wait()
        if bucket.put_new("race/claim", b"%d" % index):
            won.append(index)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(claim, range(16)))
    assert len(won) == 1
    assert bucket.get("race/claim") == b"%d" % won[0]


def test_a_thousand_keys_are_a_page(bucket):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: bucket.put(f"many/{index:04}", b""), range(1001)))
    assert len(bucket.list("many/")) == 1001


def test_throttling_is_answered_as_s3_does(server, bucket):
    server.refuse(count=3)
    bucket.put("throttled", b"x")
    assert bucket.throttled == 3


def test_objects_are_seen_late_but_claimed_at_once(server, bucket):
    server.disturb(lag_s=30.0)
    assert bucket.put_new("late/a", b"1")
    with pytest.raises(NotFound):
        bucket.get("late/a")
    assert bucket.list("late/") == []
    server.disturb(lag_s=0.0)
    assert bucket.list("late/") == ["late/a"]
    assert not bucket.put_new("late/a", b"2")
    assert bucket.get("late/a") == b"1"


def test_another_clients_every_call_is_let_in(profiled):
    client = boto(profiled.settings)
    client.put_object(Bucket="asyncgrpo", Key="bo to+/k", Body=b"1")
    assert client.get_object(Bucket="asyncgrpo", Key="bo to+/k")["Body"].read() == b"1"
    assert client.list_objects_v2(Bucket="asyncgrpo", Prefix="bo", Delimiter="/")["KeyCount"] == 1
    url = client.generate_presigned_url("get_object", {"Bucket": "asyncgrpo", "Key": "bo to+/k"})
    assert Bucket(profiled.settings)._client._http.request("GET", url).data == b"1"
    assert client.list_buckets()["Buckets"][0]["Name"] == "asyncgrpo"


def test_clients_that_rely_on_more_than_the_hub_gives_are_refused(server):
    careful, default = boto(server.settings), boto(server.settings, Config())
    careful.put_object(Bucket="asyncgrpo", Key="boto", Body=b"1")
    for attempt in (
        lambda: default.put_object(Bucket="asyncgrpo", Key="boto", Body=b"2"),  # adds a checksum nobody asked for
        lambda: careful.put_object(Bucket="asyncgrpo", Key="boto", Body=b"2", Metadata={"a": "b"}),
        lambda: careful.list_objects(Bucket="asyncgrpo"),
        lambda: careful.list_objects_v2(Bucket="asyncgrpo", Delimiter="-"),
        lambda: careful.get_object(Bucket="asyncgrpo", Key="boto", IfMatch='"x"'),
    ):
        with pytest.raises(ClientError, match="NotImplemented"):
            attempt()
    assert careful.get_object(Bucket="asyncgrpo", Key="boto")["Body"].read() == b"1"
    outside = replace(server.settings, endpoint=server.settings.endpoint.removesuffix("/local"))
    with pytest.raises(BucketError, match="NoSuchBucket"):
        Bucket(outside, retry_s=1).get("a/b")


def test_namespaces_of_the_hub_share_nothing(server):
    other = replace(server.settings, endpoint=server.settings.endpoint.replace("/local", "/team"))
    Bucket(other).create()
    Bucket(other).put("theirs", b"1")
    assert Bucket(other).list("") == ["theirs"]
    with pytest.raises(NotFound):
        Bucket(server.settings).get("theirs")


def test_a_clock_that_is_wrong(profiled, monkeypatch):
    now = minio_time.utcnow
    monkeypatch.setattr(minio_time, "utcnow", lambda: now() + timedelta(minutes=20))
    with pytest.raises(BucketError, match=r"RequestTimeTooSkewed: .*Set this machine's clock\."):
        Bucket(profiled.settings, retry_s=1).put("k", b"")


def test_temporary_keys_need_their_token():
    moto = MotoServer("aws")
    settings = moto.start()
    try:
        for token in (None, "expired"):
            with pytest.raises(BucketError, match=r"InvalidToken.*AWS_SESSION_TOKEN"):
                Bucket(replace(settings, session_token=token), retry_s=1).put("k", b"")
        Bucket(settings).put("k", b"")
    finally:
        moto.stop()


def test_in_aws_manner_a_conditional_put_may_conflict_and_is_tried_again(monkeypatch):
    monkeypatch.setattr(bucket_module, "FIRST_PAUSE_S", 0.01)
    moto = MotoServer("aws")
    bucket = Bucket(moto.start(), retry_s=5)
    conflicts, send = [], bucket._client._execute

    def count(*args, **kwargs):
        try:
            return send(*args, **kwargs)
        except bucket_module.S3Error as error:
            conflicts.append(error.code)
            raise

    monkeypatch.setattr(bucket._client, "_execute", count)
    try:
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda i: bucket.put_new("k", bytes([i]) * 2_000_000), range(8)))
        assert sum(won) == 1
        assert "ConditionalRequestConflict" in conflicts
    finally:
        moto.stop()


def test_in_minios_manner_nothing_lies_below_an_object():
    moto = MotoServer("minio")
    bucket = Bucket(moto.start(), retry_s=1)
    try:
        bucket.put("a", b"")
        with pytest.raises(BucketError, match="XMinioParentIsObject"):
            bucket.put("a/b/c", b"")
    finally:
        moto.stop()


def test_https_and_dotted_buckets(tmp_path):
    moto = MotoServer(bucket="dotted.name", certificate=tls.issue(tmp_path / "one"))
    settings = moto.start()
    try:
        for host in ("127.0.0.1", "localhost"):
            bucket = Bucket(replace(settings, endpoint=settings.endpoint.replace("127.0.0.1", host)), retry_s=5)
            bucket.put(host, b"1")
            assert host in bucket.list("")
        moto.refuse(count=1)  # the emulator's own calls trust it too
        bucket.get(host)
        assert bucket.throttled == 1
        stranger = replace(settings, ca_file=str(tls.issue(tmp_path / "two").authorities))
        for wrong in (stranger, replace(settings, ca_file=None)):
            with pytest.raises(BucketError, match="CERTIFICATE_VERIFY_FAILED"):
                Bucket(wrong, retry_s=0.2).get("k")
    finally:
        moto.stop()


def test_two_servers_share_nothing():
    one, two = MotoServer(), MotoServer()
    Bucket(one.start()).put("a", b"1")
    try:
        assert Bucket(two.start()).list("") == []
        assert one.settings.access_key != two.settings.access_key
        assert not re.search(one.settings.secret_key, " ".join(one.process.args))
    finally:
        one.stop()
        two.stop()
    assert one.process.returncode == two.process.returncode == 0
