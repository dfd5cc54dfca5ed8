import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo

import httpx
import pytest
from click.testing import CliRunner

import asyncgrpo
from emulator.serve import Emulator
from jobs import doctor, packages
from jobs.bucket import Bucket
from jobs.doctor import Finding


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    with Emulator() as emulator:
        yield emulator


def findings(emulator: Emulator, **changed: str) -> dict[str, Finding]:
    environ = {**emulator.environment(), **changed}
    return {each.check: each for each in [*doctor.check_hub(environ, None), *doctor.check_bucket(environ, None)]}


def test_all_is_well(emulator: Emulator) -> None:
    result = CliRunner().invoke(asyncgrpo.main, ["doctor", "--json"], env=emulator.environment())
    found = {each["check"]: each for each in json.loads(result.stdout)}
    assert result.exit_code == 0, result.output
    assert {
        "token",
        "clock",
        "jobs",
        "flavors",
        "quota",
        "bucket",
        "gpus",
        "torch",
        "vllm",
        "trl",
        "peft",
        "fuse",
        "port",
    } == set(found)
    assert found["token"]["ok"] and found["jobs"]["ok"] and "h200" in found["flavors"]["detail"]
    assert Bucket(emulator.bucket).list("doctor/") == [], "it leaves nothing in the bucket"


def test_the_quota_of_calls() -> None:
    with Emulator(quota_calls=60) as emulator:
        quota = findings(emulator)["quota"]
        assert quota.ok and " of 60 calls left for " in quota.detail
        for _ in range(10):
            httpx.get(f"{emulator.endpoint}/api/whoami-v2", headers={"authorization": f"Bearer {emulator.token}"})
        quota = findings(emulator)["quota"]
        assert quota.ok is False and quota.fix.startswith("wait ")


def test_a20_the_effective_addressing_style_and_region_are_shown(emulator: Emulator) -> None:
    shown = findings(emulator)["bucket"]
    assert shown.ok and "path style, region us-east-1" in shown.detail
    wrong = findings(emulator, AWS_REGION="eu-central-1")["bucket"]
    assert not wrong.ok and "region eu-central-1" in wrong.detail and "expecting 'us-east-1'" in wrong.detail


@pytest.mark.parametrize(("skew_s", "ok"), [(0, True), (-300, False), (300, False)])
def test_the_clock_is_compared_with_the_hubs(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, skew_s: int, ok: bool
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + timedelta(seconds=skew_s)

    monkeypatch.setattr(doctor, "datetime", Clock)
    found = doctor.check_clock(emulator.endpoint)
    assert found.ok is ok, found


def test_a_token_that_the_hub_refuses(emulator: Emulator) -> None:
    token = findings(emulator, HF_TOKEN="hf_wrong")["token"]
    assert token.ok is False and "settings/tokens" in token.fix and "hf_wrong" not in str(token)


def test_a_bucket_that_cannot_be_used(emulator: Emulator) -> None:
    missing = findings(emulator, ASYNCGRPO_BUCKET="s3://no-such-bucket")["bucket"]
    assert missing.ok is False and "write" in missing.detail
    assert findings(emulator, AWS_ACCESS_KEY_ID="")["bucket"].ok is False


def test_a_store_without_conditional_writes(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(self: Bucket, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True

    monkeypatch.setattr(Bucket, "put_new", put)
    bad = findings(emulator)["bucket"]
    assert bad.ok is False and "If-None-Match does not work" in bad.detail


@pytest.mark.parametrize(("package", "words"), [("trl", "Install one of 1.14.2"), ("vllm", "Install one of 0.22 to")])
def test_a_version_that_is_not_supported_is_bad(package: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = packages.here()
    found = replace(here, versions={**here.versions, package: "9.9"})
    monkeypatch.setattr(packages, "here", lambda: found)
    bad = [each for each in doctor.check_machine() if each.ok is False]
    assert [each.check for each in bad] == [package]
    assert bad[0].detail == "9.9" and f"{package} 9.9 is not supported. {words}" in bad[0].fix


def test_what_is_bad_is_told_with_its_fix(emulator: Emulator) -> None:
    result = CliRunner().invoke(
        asyncgrpo.main, ["doctor", "--bucket", "s3://no"], env={**emulator.environment(), "HF_TOKEN": "x"}
    )
    assert result.exit_code == 2 and "BAD  token" in result.output and "FIX:" in result.output
