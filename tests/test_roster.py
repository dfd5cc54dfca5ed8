from dataclasses import replace
from typing import Any

import pytest
from huggingface_hub import Volume

from jobs.bucket import Bucket, BucketSettings
from jobs.errors import ConfigError
from jobs.roster import JobPlan, Roster, roster_key
from tests.conftest import MotoBucket
from tests.jobs_info import job

VOLUME = Volume(type="bucket", source="me/b", mount_path="/a", path="p", read_only=True)
PLAN = JobPlan("image:1", ["python3", "x", "role", "replica"], "h200", {"A": "1"}, 60, [VOLUME], [8000])
ROSTER = Roster("run", "https://hub", "me", "7", {"replica": PLAN, "trainer": replace(PLAN, ports=[], volumes=[])})


def planned(**more: Any) -> Any:
    own = {"docker_image": PLAN.image, "command": PLAN.command, "initiator": {"type": "user", "id": "7"}}
    return job("j", **(own | more))


def test_it_comes_back_from_the_bucket_as_it_went_there(moto_bucket: MotoBucket) -> None:
    bucket = Bucket(BucketSettings.from_env(moto_bucket.environ))
    ROSTER.write(bucket, "key")
    assert Roster.read(bucket, "run") == Roster.read(bucket, "run", "key") == ROSTER


def test_who_can_write_the_bucket_cannot_make_others_start_jobs(moto_bucket: MotoBucket) -> None:
    bucket = Bucket(BucketSettings.from_env(moto_bucket.environ))
    ROSTER.write(bucket, "key")
    bucket.put(roster_key("run"), bucket.get(roster_key("run")).replace(b"image:1", b"image:2"))
    with pytest.raises(ConfigError, match="not signed with the key of run run"):
        Roster.read(bucket, "run", "key")


def test_a_run_without_jobs(moto_bucket: MotoBucket) -> None:
    with pytest.raises(ConfigError, match="has no Jobs"):
        Roster.read(Bucket(BucketSettings.from_env(moto_bucket.environ)), "run")


def test_a_job_that_was_started_as_planned_is_owned() -> None:
    assert ROSTER.owns(planned())
    split = PLAN.command
    assert ROSTER.owns(planned(command=split[:2], arguments=split[2:])), "the Hub may tell command and arguments apart"


@pytest.mark.parametrize(
    "changed",
    [
        {"docker_image": "image:2"},
        {"docker_image": None, "space_id": "image:1"},
        {"command": ["sh"]},
        {"flavor": "h200x8"},
        {"initiator": {"type": "user", "id": "8"}},
        {"initiator": {"type": "duplicated-job", "id": "j0"}},
        {"owner": {"id": "1", "name": "other", "type": "org"}},
        {"role": "proxy"},
        {"labels": {"asyncgrpo-run": "run2"}},
        {"labels": {"asyncgrpo-index": "x"}},
    ],
)
def test_one_that_differs_in_anything_is_not(changed: dict[str, Any]) -> None:
    assert not ROSTER.owns(planned(**changed))
