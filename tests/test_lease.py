import threading

from jobs import lease
from jobs.bucket import Bucket
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
