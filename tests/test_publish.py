"""Versions in a real bucket: written once, signed, marked, read back."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from emulator.bucket import MotoServer
from jobs.bucket import Bucket
from jobs.errors import ConfigError, NotFound
from jobs.manifest import Manifest
from jobs.publish import NOTES, Published, Publisher
from jobs.version import REMEMBERED_VERSIONS, VersionRefused, VersionState
from tests.adapters import write_adapter
from tests.conftest import MotoBucket
from tests.engines import KEY

PREFIX = "runs/run/adapters/2"


def with_publisher(
    bucket: MotoBucket, folder: Path, work: Callable[[Publisher], Awaitable[None]], key: str = KEY
) -> Bucket:
    """Does the work with a publisher whose trainer saves below `folder`; returns the bucket."""
    store = Bucket.from_env(bucket.environ, retry_s=5)

    async def main() -> None:
        folder.mkdir(exist_ok=True)
        publisher = Publisher(store, "run", 2, key, folder)
        try:
            await work(publisher)
        finally:
            await publisher.close()

    asyncio.run(main())
    return store


async def publish(publisher: Publisher, folder: Path, version: int, seed: int | None = None) -> Published:
    path = str(write_adapter(folder / f"v{version}", seed=version if seed is None else seed))
    return await publisher.upload(await publisher.describe(version, path, "tiny", 8), path)


def test_a_version_is_files_and_a_signed_manifest(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def work(publisher: Publisher) -> None:
        published = await publish(publisher, tmp_path, 1)
        assert published.publish_s is not None
        assert (publisher.count, publisher.bytes) == (1, published.manifest.size)

    bucket = with_publisher(moto_bucket, tmp_path, work)
    names = ["adapter_config.json", "adapter_model.safetensors", "manifest.json"]
    assert bucket.list(PREFIX) == [f"{PREFIX}/v1/{name}" for name in names]
    manifest = Manifest.from_json(bucket.get(f"{PREFIX}/v1/manifest.json"))
    assert manifest.verify_signature(KEY)
    assert (manifest.wire_name, manifest.base_model, manifest.rank) == ("run.2.v1", "tiny", 8)
    manifest.verify_files(tmp_path / "v1")


def test_the_same_again_is_success_and_anything_else_is_not(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def once(publisher: Publisher) -> None:
        await publish(publisher, tmp_path, 1)

    async def again(publisher: Publisher) -> None:
        await publish(publisher, tmp_path, 1)
        with pytest.raises(VersionRefused, match=r"run\.2\.v1 is in the bucket with digest"):
            await publish(publisher, tmp_path, 1, seed=9)

    bucket = with_publisher(moto_bucket, tmp_path, once)
    before = bucket.get(f"{PREFIX}/v1/manifest.json")
    with_publisher(moto_bucket, tmp_path, again)
    assert bucket.get(f"{PREFIX}/v1/manifest.json") == before


def test_recovery_reads_states_in_the_order_of_publishing(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def before(publisher: Publisher) -> None:
        for version in (1, 2, 9, 10):
            await publish(publisher, tmp_path, version)
        publisher.mark("run.2.v1", VersionState.RETIRED)
        publisher.mark("run.2.v2", VersionState.FAILED, "out of slots")
        publisher.mark("run.2.v9", VersionState.RETIRED)
        publisher.unmark("run.2.v9")
        publisher.mark("other.1.v1", VersionState.RETIRED)

    async def after(publisher: Publisher) -> None:
        found = [(p.manifest.version, p.state, p.words) for p in await publisher.recover()]
        assert found == [
            (1, VersionState.RETIRED, None),
            (2, VersionState.FAILED, "out of slots"),
            (9, VersionState.LIVE, None),
            (10, VersionState.LIVE, None),
        ]

    bucket = with_publisher(moto_bucket, tmp_path, before)
    assert not [key for key in bucket.list("") if "other" in key], "another run's books were written"
    bucket.put(f"{PREFIX}/v11/adapter_config.json", b"{}")  # no manifest: never published
    with_publisher(moto_bucket, tmp_path, after)
    with_publisher(moto_bucket, tmp_path / "another machine", after)


def test_recovery_passes_over_what_is_forged(
    tmp_path: Path, moto_bucket: MotoBucket, caplog: pytest.LogCaptureFixture
) -> None:
    async def before(publisher: Publisher) -> None:
        for version in (1, 2, 3):
            await publish(publisher, tmp_path, version)

    async def after(publisher: Publisher) -> None:
        assert [published.manifest.version for published in await publisher.recover()] == [3]

    bucket = with_publisher(moto_bucket, tmp_path, before)
    manifest = json.loads(bucket.get(f"{PREFIX}/v1/manifest.json"))
    bucket.put(f"{PREFIX}/v1/manifest.json", json.dumps(manifest | {"rank": 4}).encode())
    bucket.put(f"{PREFIX}/v2/manifest.json", bucket.get(f"{PREFIX}/v3/manifest.json"))
    with_publisher(moto_bucket, tmp_path / "another machine", after)
    assert caplog.text.count("is not signed with this run's key for that name") == 2


def test_a_restart_on_the_same_machine_does_not_need_the_bucket(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def before(publisher: Publisher) -> None:
        for version in (1, 2, 3, 10):
            await publish(publisher, tmp_path, version)
        publisher.mark("run.2.v1", VersionState.RETIRED)
        publisher.mark("run.2.v2", VersionState.FAILED, "out of slots")
        publisher.mark("run.2.v3", VersionState.RETIRED)
        publisher.unmark("run.2.v3")

    async def after(publisher: Publisher) -> None:
        found = await publisher.recover()
        assert [(p.manifest.version, p.state, p.words) for p in found] == [
            (1, VersionState.RETIRED, None),
            (2, VersionState.FAILED, "out of slots"),
            (3, VersionState.LIVE, None),
            (10, VersionState.LIVE, None),
        ]
        assert publisher.bytes >= sum(p.manifest.size for p in found)
        counts.append(publisher.count)
        publisher._note(found[0].manifest.to_json()[:50])  # killed while it wrote

    counts: list[int] = []
    with_publisher(moto_bucket, tmp_path, before)
    away = replace(moto_bucket, environ={**moto_bucket.environ, "ASYNCGRPO_BUCKET": "s3://not-there"})
    for _ in range(2):
        with_publisher(away, tmp_path, after)
    assert counts == [4, 4]
    forged = json.loads((tmp_path / NOTES).read_bytes().splitlines()[1]) | {"version": 11}
    foreign = forged | {"attempt": 1}
    with (tmp_path / NOTES).open("a") as notes:
        notes.write(f"\n{json.dumps(forged)}\n{json.dumps(foreign)}")
    with_publisher(away, tmp_path, after)


def test_a_publish_that_was_cut_off_is_taken_up_though_the_bucket_shows_it_late(tmp_path: Path) -> None:
    moto = MotoServer()
    settings = moto.start()
    try:
        moto.disturb(lag_s=1.0)
        bucket = MotoBucket(moto.bucket, settings.endpoint, {**settings.environment(), **settings.secrets()})

        async def before(publisher: Publisher) -> None:
            await publish(publisher, tmp_path, 1)

        async def after(publisher: Publisher) -> None:
            assert await publisher.recover() == []
            started = time.monotonic()
            again = await publish(publisher, tmp_path, 1)
            assert time.monotonic() - started > 0.5, "the bucket shows it already"
            assert (again.manifest.version, publisher.count) == (1, 1)

        with_publisher(bucket, tmp_path, before)
        (tmp_path / NOTES).unlink()  # killed just before it wrote them
        with_publisher(bucket, tmp_path, after)
    finally:
        moto.stop()


def test_recovery_reads_only_the_newest(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    count = REMEMBERED_VERSIONS + 3

    async def before(publisher: Publisher) -> None:
        path = str(write_adapter(tmp_path / "any"))
        for version in range(1, count + 1):
            manifest = await publisher.describe(version, path, "tiny", 8)
            data = manifest.sign(KEY).to_json()
            await publisher.in_thread(
                lambda key=f"{PREFIX}/v{version}/manifest.json", data=data: publisher.bucket.put(key, data)
            )

    async def after(publisher: Publisher) -> None:
        assert [p.manifest.version for p in await publisher.recover()] == list(range(4, count + 1))

    with_publisher(moto_bucket, tmp_path, before)
    with_publisher(moto_bucket, tmp_path, after)


def test_a_proxy_behind_takes_over_what_is_signed(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def front(publisher: Publisher) -> None:
        await publish(publisher, tmp_path, 1)

    async def behind(publisher: Publisher) -> None:
        published = await publisher.adopt("run.2.v1", f"{PREFIX}/v1/manifest.json")
        assert published.manifest.wire_name == "run.2.v1"
        with pytest.raises(ConfigError, match="is not where the manifest"):
            await publisher.adopt("run.2.v2", f"{PREFIX}/v1/manifest.json")
        with pytest.raises(ConfigError, match="is not where the manifest"):
            await publisher.adopt("../../etc", "runs/../etc/manifest.json")
        with pytest.raises(NotFound):
            await publisher.adopt("run.2.v2", f"{PREFIX}/v2/manifest.json")

    async def stranger(publisher: Publisher) -> None:
        with pytest.raises(ConfigError, match="is not signed"):
            await publisher.adopt("run.2.v1", f"{PREFIX}/v1/manifest.json")

    with_publisher(moto_bucket, tmp_path, front)
    with_publisher(moto_bucket, tmp_path, behind)
    with_publisher(moto_bucket, tmp_path, stranger, key="0" * 64)
