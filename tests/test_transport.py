"""Transport `mount`: written by S3, read from a directory that follows the bucket late and in pieces."""

import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from emulator.live_mount import Lag, LiveMount
from jobs.adapter_store import AdapterNotVisible, AdapterStore, Mount
from jobs.bucket import Bucket, BucketSettings
from jobs.errors import ConfigError
from jobs.launch import MOUNT_DIR, Launch
from jobs.manifest import FILES, manifest_key
from jobs.site import Site
from tests.adapters import write_adapter
from tests.conftest import MotoBucket
from tests.engines import KEY, publish
from tests.test_launch import recipe

OWN = BucketSettings("s3://b/p", "https://s3.hf.co/me", "k", "s")
SITE = Site("https://huggingface.co", "token", "me", OWN)


def test_replicas_see_the_bucket_where_their_environment_says() -> None:
    launch = Launch(SITE, recipe(), "run", "vllm", None, 0, "mount")
    plans = launch.plans(Path("x"), "abc")
    archive, bucket = plans["replica"].volumes
    assert (bucket.type, bucket.source, bucket.path, bucket.mount_path) == ("bucket", "me/b", "p", MOUNT_DIR)
    assert bucket.read_only and archive.mount_path != MOUNT_DIR
    assert plans["replica"].environment["ASYNCGRPO_MOUNT"] == MOUNT_DIR
    assert len(plans["trainer"].volumes) == 1 and "ASYNCGRPO_MOUNT" not in plans["trainer"].environment
    elsewhere = Launch(replace(SITE, namespace="team"), recipe(), "run", "vllm", None, 0, "mount")
    assert {volume.source for volume in elsewhere.plans(Path("x"), "abc")["replica"].volumes} == {"me/b"}
    whole = Launch(replace(SITE, bucket=replace(OWN, url="s3://b")), recipe(), "run", "vllm", None, 0, "mount")
    assert whole.plans(Path("x"), "abc")["replica"].volumes[1].path is None


def test_a_bucket_that_the_hub_cannot_mount_is_refused() -> None:
    site = replace(SITE, bucket=replace(OWN, endpoint="https://x.r2.cloudflarestorage.com"))
    with pytest.raises(ConfigError, match=r"--transport mount: .*AWS_ENDPOINT_URL.*Use --transport s3"):
        Launch(site, recipe(), "run", "vllm", None, 0, "mount").plans(Path("x"), "abc")


def test_each_version_is_read_whole_though_the_mount_lags(moto_bucket: MotoBucket, tmp_path: Path) -> None:
    """Eight versions, each file of them seen in its own time: what a replica loads is what was published."""
    settings = BucketSettings.from_env(moto_bucket.environ)
    bucket = Bucket(settings, retry_s=5)
    mount = LiveMount(settings, tmp_path / "mount", writable=False, lag=Lag(0.15, 0.1), seed=random.randrange(99))
    mount.fill()
    stop = threading.Event()

    def follow() -> None:
        while not stop.wait(0.01):
            mount.step()

    follower = threading.Thread(target=follow)
    follower.start()
    store = AdapterStore(tmp_path / "store", Mount(mount.directory), KEY, wait_s=0.05)
    late = 0
    try:
        for version in range(1, 9):
            wire, key = f"run.1.v{version}", manifest_key("run", 1, version)
            adapter = write_adapter(tmp_path / wire, seed=version)
            publish(bucket, adapter, wire)
            deadline = time.monotonic() + 10
            while True:
                try:
                    stored = store.fetch(wire, key)
                    break
                except AdapterNotVisible:
                    late += 1
                    assert time.monotonic() < deadline
            assert [(stored.directory / name).read_bytes() for name in FILES] == [
                (adapter / name).read_bytes() for name in FILES
            ]
    finally:
        stop.set()
        follower.join()
    assert late >= 8  # the proxy's retries: none came at once


def test_a05_what_never_comes_is_told_at_the_deadline(moto_bucket: MotoBucket, tmp_path: Path) -> None:
    settings = BucketSettings.from_env(moto_bucket.environ)
    mount = LiveMount(settings, tmp_path / "mount", writable=False, lag=Lag(1e6, 0))
    mount.fill()
    publish(Bucket(settings, retry_s=5), write_adapter(tmp_path / "adapter"), "run.1.v1")
    mount.step()
    store = AdapterStore(tmp_path / "store", Mount(mount.directory), KEY, wait_s=0.2)
    began = time.monotonic()
    with pytest.raises(AdapterNotVisible, match="manifest"):
        store.fetch("run.1.v1", manifest_key("run", 1, 1))
    assert 0.1 <= time.monotonic() - began < 2
    assert not list((tmp_path / "store").glob("run*"))
