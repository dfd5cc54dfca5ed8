import json
import threading

import pytest

from jobs import lease
from jobs.bucket import Bucket, BucketSettings
from jobs.errors import BucketError
from jobs.lease import LeaseWatch
from tests.conftest import MotoBucket


def test_a_lease_counts_from_the_last_change_seen() -> None:
    watch = LeaseWatch(lease_s=10, started_at=0)
    assert watch.verdict(10) is None and watch.verdict(10.1) is not None  # never seen
    watch.observe(b'{"state": "held", "beat": "1"}', 9)
    assert watch.verdict(19) is None
    watch.observe(b'{"state": "held", "beat": "1"}', 18)  # the same as before renews nothing
    watch.observe(None, 18.5)
    assert "not renewed for 10 s" in str(watch.verdict(19.1))
    watch.observe(b'{"state": "held", "beat": "2"}', 19.1)
    assert watch.verdict(29) is None


@pytest.mark.parametrize("content", [b"", b"<html>maintenance</html>", b"[]", b"null", b"\xff"])
def test_what_is_no_lease_is_no_sign_of_life(content: bytes) -> None:
    watch = LeaseWatch(lease_s=10, started_at=0)
    for at, told in ((0, b'{"state": "held", "beat": "1"}'), (5, content), (8, b'{"state": "held", "beat": "1"}')):
        watch.observe(told, at)
        assert watch.verdict(at) is None
    watch.observe(content, 10.1)
    assert "not renewed for 10 s" in str(watch.verdict(10.1))


def test_a_lease_that_cannot_be_read_expires_and_is_neither_kept_nor_ended(moto_bucket: MotoBucket) -> None:
    bucket = Bucket.from_env(moto_bucket.environ, retry_s=0.01)
    bucket.put(lease.lease_key("r"), b"")
    reasons: list[str] = []
    lease.watch(bucket, "r", 0.3, threading.Event(), reasons.append)
    assert reasons == ["the run's lease was not renewed for 0 s"]
    for look in (lease.keep, lease.ended):
        with pytest.raises(BucketError, match=r"get runs/r/lease\.json"):
            look(bucket, "r")


def test_a_run_that_ended_ends_its_replicas_at_once() -> None:
    watch = LeaseWatch(lease_s=1000, started_at=0)
    watch.observe(b'{"state": "ended"}', 1)
    assert watch.verdict(1) == "the run has ended"


def test_watching_a_bucket(moto_bucket: MotoBucket) -> None:
    bucket = Bucket.from_env(moto_bucket.environ)
    lease.renew(bucket, "r")
    reasons: list[str] = []
    stop = threading.Event()
    thread = threading.Thread(target=lease.watch, args=(bucket, "r", 0.6, stop, reasons.append))
    thread.start()
    thread.join(5)
    assert reasons == ["the run's lease was not renewed for 1 s"]
    lease.end(bucket, "r")
    lease.watch(bucket, "r", 0.6, stop, reasons.append)
    assert reasons[1:] == ["the run has ended"]
    stop.set()
    lease.watch(bucket, "r", 0.6, stop, reasons.append)
    assert len(reasons) == 2


def test_a_lease_that_is_shown_late_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [b'{"state": "ended"}'] * 2 + [b'{"state": "held"}']
    bucket = Bucket(BucketSettings("s3://b", "http://127.0.0.1:1", "key", "secret"))
    monkeypatch.setattr(lease, "SHOWN_POLL_S", 0.0)
    monkeypatch.setattr(bucket, "get_json", lambda _: json.loads(shown.pop(0)))
    assert lease.ended(bucket, "run")
    assert not lease.ended(bucket, "run", within_s=60)


def test_a_renewal_that_fails_is_not_the_last() -> None:
    stop, calls = threading.Event(), []

    def keep() -> None:
        calls.append(len(calls))
        if len(calls) == 3:
            stop.set()
        raise (BucketError("away"), ZeroDivisionError, BucketError("away"))[len(calls) - 1]

    lease.keep_on(keep, 0.01, stop)
    assert calls == [0, 1, 2]


def test_a_lease_that_was_ended_is_not_kept(moto_bucket: MotoBucket) -> None:
    bucket = Bucket(BucketSettings.from_env(moto_bucket.environ))
    assert lease.keep(bucket, "run"), "there was none"
    before = bucket.get(lease.lease_key("run"))
    assert lease.keep(bucket, "run") and bucket.get(lease.lease_key("run")) != before
    assert not lease.ended(bucket, "run")
    lease.end(bucket, "run")
    assert lease.ended(bucket, "run") and not lease.keep(bucket, "run")
    assert json.loads(bucket.get(lease.lease_key("run")))["state"] == "ended"
