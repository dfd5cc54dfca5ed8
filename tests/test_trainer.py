"""What the supervisor of a trainer Job tells the bucket. Training itself: test_train.py, and the whole loop in e2e/."""

import threading

from jobs import lease
from jobs.bucket import Bucket
from jobs.trainer import Uploads
from tests.conftest import MotoBucket


def test_no_failed_write_ends_the_writes_to_come(moto_bucket: MotoBucket) -> None:
    bucket = Bucket.from_env(moto_bucket.environ, retry_s=0.01)
    bucket.put(lease.lease_key("r"), b"")  # as if the bucket had answered without a body
    uploads, failed = Uploads(bucket), threading.Event()

    def fail() -> None:
        failed.set()
        raise ZeroDivisionError

    uploads.start()
    uploads.call("lease", lambda: lease.keep(bucket, "r"))
    uploads.call("defect", fail)
    assert failed.wait(5)
    uploads.put("after", b"written")
    uploads.close(5)
    assert bucket.get("after") == b"written"
