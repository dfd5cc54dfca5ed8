import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jobs.adapter_store import UNUSED_S, AdapterNotVisible, AdapterRejected, AdapterStore, Mount, Stored
from jobs.bucket import Bucket
from jobs.manifest import CONFIG_FILE, FILES, WEIGHTS_FILE, Manifest, manifest_key
from tests.adapters import write_adapter
from tests.conftest import MotoBucket
from tests.engines import KEY, publish

WIRE = "run.1.v1"
WHERE = manifest_key("run", 1, 1)
PREFIX = "runs/run/adapters/1/v1"


class Counting:
    """A bucket whose reads are counted."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.files = 0

    def get(self, key: str) -> bytes:
        return self.bucket.get(key)

    def get_file(self, key: str, path: Path) -> None:
        self.files += 1
        self.bucket.get_file(key, path)


@pytest.fixture
def bucket(moto_bucket: MotoBucket) -> Bucket:
    return Bucket.from_env(moto_bucket.environ, retry_s=1.0)


def store(root: Path, source: "Bucket | Mount | Counting", wait_s: float = 0.0) -> AdapterStore:
    return AdapterStore(root, source, KEY, wait_s)


def test_an_adapter_arrives_as_it_was_published(bucket: Bucket, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    publish(bucket, adapter, WIRE)
    stored = store(tmp_path / "store", bucket).fetch(WIRE, WHERE)
    for name in FILES:
        assert (stored.directory / name).read_bytes() == (adapter / name).read_bytes()
    assert stored.manifest.wire_name == WIRE
    assert sorted(p.name for p in stored.directory.parent.iterdir()) == [f".{WIRE}.lock", WIRE]


@pytest.mark.parametrize(
    ("wire", "key"),
    [
        ("../../etc", WHERE),
        ("run.1.v1/..", WHERE),
        ("trl-policy-v1", WHERE),
        (WIRE, "runs/run/adapters/1/v2/manifest.json"),
        (WIRE, "runs/run/adapters/1/v1/../v1/manifest.json"),
        (WIRE, "/etc/passwd"),
        (WIRE, ""),
    ],
)
def test_names_and_keys_stay_in_their_prefix(bucket: Bucket, tmp_path: Path, wire: str, key: str) -> None:
    publish(bucket, write_adapter(tmp_path / "adapter"), WIRE)
    with pytest.raises(AdapterRejected):
        store(tmp_path / "store", bucket).fetch(wire, key)


def test_a_manifest_of_another_run_or_version_is_rejected(bucket: Bucket, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    publish(bucket, adapter, WIRE, key="0" * 64)
    with pytest.raises(AdapterRejected, match="not signed with this run's key"):
        store(tmp_path / "store", bucket).fetch(WIRE, WHERE)
    publish(bucket, adapter, "run.1.v2")
    bucket.put(WHERE, bucket.get(manifest_key("run", 1, 2)))
    with pytest.raises(AdapterRejected, match=r"is that of run\.1\.v2"):
        store(tmp_path / "store", bucket).fetch(WIRE, WHERE)
    bucket.put(WHERE, b"[]")
    with pytest.raises(AdapterRejected, match="not an adapter's manifest"):
        store(tmp_path / "store", bucket).fetch(WIRE, WHERE)


def test_changed_bytes_are_rejected_and_leave_nothing(bucket: Bucket, tmp_path: Path) -> None:
    publish(bucket, write_adapter(tmp_path / "adapter"), WIRE)
    bucket.put_file(f"{PREFIX}/{WEIGHTS_FILE}", write_adapter(tmp_path / "other", seed=9) / WEIGHTS_FILE)
    with pytest.raises(AdapterRejected, match="is not what its manifest says"):
        store(tmp_path / "store", bucket).fetch(WIRE, WHERE)
    assert [p.name for p in (tmp_path / "store").iterdir()] == [f".{WIRE}.lock"]


def test_what_is_missing_may_come_later(bucket: Bucket, tmp_path: Path) -> None:
    adapters = store(tmp_path / "store", bucket)
    with pytest.raises(AdapterNotVisible):
        adapters.fetch(WIRE, WHERE)
    publish(bucket, write_adapter(tmp_path / "adapter"), WIRE)
    weights = bucket.get(f"{PREFIX}/{WEIGHTS_FILE}")
    bucket.delete([f"{PREFIX}/{WEIGHTS_FILE}"])
    with pytest.raises(AdapterNotVisible, match=WEIGHTS_FILE):
        adapters.fetch(WIRE, WHERE)
    bucket.put(f"{PREFIX}/{WEIGHTS_FILE}", weights)
    assert adapters.fetch(WIRE, WHERE).manifest.wire_name == WIRE


def test_a_fetch_waits_for_what_lags(bucket: Bucket, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    late = threading.Timer(0.3, publish, (bucket, adapter, WIRE))
    late.start()
    try:
        assert store(tmp_path / "store", bucket, wait_s=10.0).fetch(WIRE, WHERE).manifest.wire_name == WIRE
    finally:
        late.join()


def test_a_name_keeps_its_digest_for_ever(bucket: Bucket, tmp_path: Path) -> None:
    publish(bucket, write_adapter(tmp_path / "adapter"), WIRE)
    adapters = store(tmp_path / "store", bucket)
    first = adapters.fetch(WIRE, WHERE)
    publish(bucket, write_adapter(tmp_path / "other", seed=9), WIRE)
    with pytest.raises(AdapterRejected, match="for ever"):
        adapters.fetch(WIRE, WHERE)
    first.manifest.verify_files(first.directory)


def test_what_is_here_survives_the_bucket(bucket: Bucket, tmp_path: Path) -> None:
    publish(bucket, write_adapter(tmp_path / "adapter"), WIRE)
    adapters = store(tmp_path / "store", bucket)
    first = adapters.fetch(WIRE, WHERE)
    bucket.delete(bucket.list(PREFIX))
    assert adapters.fetch(WIRE, WHERE) == first


def used_by_two(bucket: Bucket, tmp_path: Path) -> tuple[AdapterStore, AdapterStore, Stored]:
    """Two engines' stores on one directory, and the adapter that both of them use."""
    publish(bucket, write_adapter(tmp_path / "adapter"), WIRE)
    first, second = (store(tmp_path / "store", bucket) for _ in range(2))
    for each in (first, second):
        each.use(WIRE)
        stored = each.fetch(WIRE, WHERE)
    return first, second, stored


def test_weights_go_when_the_last_engine_has_unloaded_them(bucket: Bucket, tmp_path: Path) -> None:
    first, second, stored = used_by_two(bucket, tmp_path)
    first.release(WIRE, 0.0)
    first.release("run.1.v9", UNUSED_S)
    assert stored.whole, "the second engine uses them"
    second.release(WIRE, 0.0)
    second.release("run.1.v9", UNUSED_S - 0.1)
    assert stored.whole, "a request may still be on its way out"
    second.release("run.1.v9", UNUSED_S)
    assert [path.name for path in stored.directory.iterdir()] == ["manifest.json"]
    assert first.held(WIRE) == stored and not stored.whole

    first.use(WIRE)
    assert first.fetch(WIRE, WHERE) == stored and stored.whole, "fetched again"
    first.release("run.1.v9", 10 * UNUSED_S)
    assert stored.whole


def test_each_engine_has_its_time_to_let_go_of_weights(bucket: Bucket, tmp_path: Path) -> None:
    first, second, stored = used_by_two(bucket, tmp_path)
    first.release(WIRE, 0.0)
    second.release(WIRE, UNUSED_S - 1)
    first.release("run.1.v9", UNUSED_S)
    assert stored.whole, "the second engine has unloaded them just now"
    second.release("run.1.v9", 2 * UNUSED_S - 1)
    assert not stored.whole


def test_a_name_keeps_its_digest_when_its_weights_have_gone(bucket: Bucket, tmp_path: Path) -> None:
    publish(bucket, write_adapter(tmp_path / "adapter"), WIRE)
    adapters = store(tmp_path / "store", bucket)
    adapters.use(WIRE)
    adapters.fetch(WIRE, WHERE)
    adapters.release(WIRE, 0.0)
    adapters.release("run.1.v9", UNUSED_S)
    publish(bucket, write_adapter(tmp_path / "other", seed=9), WIRE)
    with pytest.raises(AdapterRejected, match="for ever"):
        adapters.fetch(WIRE, WHERE)
    bucket.delete(bucket.list(PREFIX))
    with pytest.raises(AdapterNotVisible):
        adapters.fetch(WIRE, WHERE)


def test_concurrent_loads_fetch_once(bucket: Bucket, tmp_path: Path) -> None:
    publish(bucket, write_adapter(tmp_path / "adapter"), WIRE)
    counting = Counting(bucket)
    stores = [store(tmp_path / "store", counting) for _ in range(2)]
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda s=each: found.append(s.fetch(WIRE, WHERE).directory)) for each in stores * 8
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "store" / WIRE] * 16
    assert counting.files == len(FILES)


def test_engines_of_one_job_fetch_once(bucket: Bucket, moto_bucket: MotoBucket, tmp_path: Path) -> None:
    """Two processes on one directory: the second finds what the first has brought."""
    publish(bucket, write_adapter(tmp_path / "adapter"), WIRE)
    script = (
        "import os, sys; from pathlib import Path; from jobs.adapter_store import AdapterStore\n"
        "from jobs.bucket import Bucket\n"
        "class B(Bucket):\n"
        "    def get_file(self, key, path):\n"
        "        print('fetched', flush=True)\n"
        "        super().get_file(key, path)\n"
        f"AdapterStore(Path({str(tmp_path / 'store')!r}), B.from_env(os.environ), {KEY!r}).fetch({WIRE!r}, {WHERE!r})\n"
    )
    environ = {**moto_bucket.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", script]
    processes = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=30)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert "".join(outputs).count("fetched") == len(FILES)


def test_a_mount_may_tear_lag_and_reorder(bucket: Bucket, tmp_path: Path) -> None:
    """Each state that a mount can show on the way is "not yet"; the same damage is final where objects are whole."""
    adapter = write_adapter(tmp_path / "adapter")
    publish(bucket, adapter, WIRE)
    whole = {name: bucket.get(f"{PREFIX}/{name}") for name in (*FILES, "manifest.json")}
    shown = tmp_path / "mount" / PREFIX
    adapters = store(tmp_path / "store", Mount(tmp_path / "mount"))

    def show(**files: bytes) -> None:
        shown.mkdir(parents=True, exist_ok=True)
        for path in shown.iterdir():
            path.unlink()
        for name, data in files.items():
            (shown / name).write_bytes(data)

    for state in (
        {},
        {"manifest.json": whole["manifest.json"]},
        {**whole, "manifest.json": whole["manifest.json"][:50]},
        {**whole, WEIGHTS_FILE: whole[WEIGHTS_FILE][:-1]},
        {**whole, CONFIG_FILE: b""},
        {name: whole[name] for name in FILES},
    ):
        show(**state)
        with pytest.raises(AdapterNotVisible):
            adapters.fetch(WIRE, WHERE)
    show(**whole)
    assert adapters.fetch(WIRE, WHERE).manifest == Manifest.from_json(whole["manifest.json"])
    forged = json.loads(whole["manifest.json"]) | {"rank": 4}
    show(**{**whole, "manifest.json": json.dumps(forged).encode()})
    with pytest.raises(AdapterRejected):
        store(tmp_path / "store2", Mount(tmp_path / "mount")).fetch(WIRE, WHERE)
