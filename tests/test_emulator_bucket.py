import threading

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from emulator.bucket import MotoServer
from emulator.moto_server import refusal
from jobs.bucket import Bucket, BucketSettings
from jobs.errors import BucketError, NotFound


@pytest.fixture(scope="module")
def server():
    moto = MotoServer()
    moto.start()
    yield moto
    moto.stop()


@pytest.fixture
def bucket(server):
    yield Bucket(server.settings, retry_s=5.0)
    server.refuse(count=0)
    server.disturb()


def test_of_many_conditional_puts_exactly_one_wins(bucket):
    won = []
    barrier = threading.Barrier(16)

    def claim(index):
        barrier.wait()
        if bucket.put_new("race/claim", b"%d" % index):
            won.append(index)

    threads = [threading.Thread(target=claim, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert bucket.get("race/claim") == b"%d" % won[0]


def test_compare_and_set(bucket):
    bucket.put("cas", b"1")
    _, etag = bucket.get_tagged("cas")
    assert bucket.put_if("cas", b"2", etag)
    assert not bucket.put_if("cas", b"3", etag)
    assert bucket.get("cas") == b"2"


def test_more_than_a_page_of_keys(bucket):
    for index in range(1001):
        bucket.put(f"many/{index:04}", b"")
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


def test_another_access_key_is_refused(server):
    settings = server.settings
    stranger = BucketSettings(settings.url, settings.endpoint, "AKSTRANGER", settings.secret_key)
    with pytest.raises(BucketError, match="InvalidAccessKeyId"):
        Bucket(stranger, retry_s=1.0).put("a", b"")


def test_clients_that_rely_on_more_than_the_hub_gives_are_refused(server):
    settings = server.settings
    keys = {"aws_access_key_id": settings.access_key, "aws_secret_access_key": settings.secret_key}
    plain = Config(request_checksum_calculation="when_required", response_checksum_validation="when_required")
    careful = boto3.client("s3", endpoint_url=settings.endpoint, region_name="us-east-1", config=plain, **keys)
    careful.put_object(Bucket="asyncgrpo", Key="boto", Body=b"1")
    assert careful.get_object(Bucket="asyncgrpo", Key="boto")["Body"].read() == b"1"
    assert careful.list_objects_v2(Bucket="asyncgrpo", Prefix="boto", Delimiter="/")["KeyCount"] == 1
    default = boto3.client("s3", endpoint_url=settings.endpoint, region_name="us-east-1", **keys)
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


def test_refusal_takes_presigned_urls():
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/b/k", "QUERY_STRING": "X-Amz-Credential=AK%2F2026%2Fus"}
    assert refusal(environ, "AK") is None
    assert refusal(environ, "OTHER")[0] == 403
    assert refusal({**environ, "QUERY_STRING": ""}, "AK")[0] == 403


def test_two_servers_share_nothing():
    one, two = MotoServer(), MotoServer()
    Bucket(one.start()).put("a", b"1")
    try:
        assert Bucket(two.start()).list("") == []
        assert one.settings.access_key != two.settings.access_key
    finally:
        one.stop()
        two.stop()
    assert one.process.returncode == two.process.returncode == 0
