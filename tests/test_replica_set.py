"""The replica set: records in a real bucket and names given by hand."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import pytest

from jobs import replica_set
from jobs.bucket import Bucket
from jobs.errors import ConfigError
from jobs.http import group_url
from jobs.publish import Publisher
from jobs.replica_set import ReplicaSet, check
from tests.conftest import MotoBucket
from tests.engines import KEY
from tests.fleets import until

PREFIX = "runs/run/replicas"


def record(index: int, *urls: str) -> bytes:
    return json.dumps({"index": index, "job_id": "job", "urls": urls}).encode()


def test_the_set_follows_the_bucket(
    moto_bucket: MotoBucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replica_set, "LOOK_S", 0.01)
    bucket = Bucket.from_env(moto_bucket.environ, retry_s=5)
    told: list[dict[str, str]] = []

    async def main() -> None:
        publisher = Publisher(bucket, "run", 1, KEY, Path())
        replicas = ReplicaSet(bucket, "run", publisher, {"r0": "http://named:1/"}, told.append)
        looking = asyncio.create_task(replicas.run())
        await until(lambda: told == [{"r0": "http://named:1"}])
        await publisher.in_thread(lambda: bucket.put(f"{PREFIX}/0.json", record(0, "https://a.hf.jobs/")))
        await until(lambda: told[-1] == {"0": "https://a.hf.jobs", "r0": "http://named:1"})
        await publisher.in_thread(lambda: bucket.put(f"{PREFIX}/1.json", record(1, "http://b:1", "http://b:2")))
        two = {"0": "https://a.hf.jobs", "1.0": "http://b:1", "1.1": "http://b:2"}
        await until(lambda: told[-1] == {**two, "r0": "http://named:1"})
        replicas.name({})
        assert told[-1] == two
        for broken in (b"{", b"[]", record(2, "file:///etc/passwd"), json.dumps({"index": 2, "urls": 5}).encode()):
            await publisher.in_thread(lambda data=broken: bucket.put(f"{PREFIX}/2.json", data))  # type: ignore[misc]
            caplog.clear()
            await until(lambda: "2.json is no replica's record" in caplog.text)
        await publisher.in_thread(lambda: bucket.put(f"{PREFIX}/0.json", record(0, "https://new.hf.jobs")))
        await until(lambda: told[-1]["0"] == "https://new.hf.jobs")
        await publisher.in_thread(lambda: bucket.delete([f"{PREFIX}/1.json"]))
        await until(lambda: told[-1] == {"0": "https://new.hf.jobs"})
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await publisher.close()

    asyncio.run(main())
    assert all(one != two for one, two in pairwise(told)), "told twice of the same set"


def test_aliases_of_a_network_group_are_names_for_its_members_alone(
    moto_bucket: MotoBucket, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = Bucket.from_env(moto_bucket.environ, retry_s=5)
    bucket.put(f"{PREFIX}/0.json", record(0, group_url("replica-0-1", 8000), group_url("replica-0-1", 8001)))
    publisher = Publisher(bucket, "run", 1, KEY, Path())
    member = ReplicaSet(bucket, "run", publisher, {}, lambda urls: None, group_prefix="g-5-")
    assert member._look() == {"0.0": "http://g-5-replica-0-1:8000", "0.1": "http://g-5-replica-0-1:8001"}
    assert ReplicaSet(bucket, "run", publisher, {}, lambda urls: None)._look() == {}
    assert "HF_NETWORK_GROUP_PREFIX is not set" in caplog.text


@pytest.mark.parametrize("url", ["", "a:80", "ftp://a", "http://", "http://user:secret@a", "http://a?token=1"])
def test_what_is_no_server_s_url(url: str) -> None:
    with pytest.raises(ConfigError, match="is no URL of a server"):
        check({"0": url})
