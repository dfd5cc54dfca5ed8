from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jobs import attempts, folders, lease
from jobs.attempts import Superseded, Voice
from jobs.bucket import Bucket
from tests.conftest import MotoBucket


def test_each_start_of_a_trainer_gets_a_number_of_its_own(moto_bucket: MotoBucket) -> None:
    bucket = Bucket.from_env(moto_bucket.environ)
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: attempts.claim(bucket, "run"), range(8)))
    assert sorted(claimed) == list(range(1, 9))
    assert attempts.claim(bucket, "run") == 9
    assert attempts.claim(bucket, "other") == 1


def test_only_the_newest_attempt_speaks_for_the_run(moto_bucket: MotoBucket, tmp_path: Path) -> None:
    bucket = Bucket.from_env(moto_bucket.environ)
    (tmp_path / "file").write_bytes(b"x")
    first = Voice(bucket, "run", attempts.claim(bucket, "run"))
    etag = first.put("key", b"its own")
    writes: list[Callable[[], object]] = [
        lambda: first.put("key", b"late"),
        lambda: first.put_if("key", b"late", etag),
        lambda: first.put_new("new", b"late"),
        lambda: first.put_file("new", tmp_path / "file"),
        lambda: folders.send(first, "new", tmp_path),
        lambda: lease.keep(first, "run"),
        lambda: lease.end(first, "run"),
    ]
    assert not first.superseded
    second = Voice(bucket, "run", attempts.claim(bucket, "run"))
    before = bucket.entries("")
    for write in writes:
        with pytest.raises(Superseded, match="attempt 1 of run run was taken for dead: attempt 2"):
            write()
    assert first.superseded and bucket.entries("") == before
    assert second.put("key", b"said") and not second.superseded
