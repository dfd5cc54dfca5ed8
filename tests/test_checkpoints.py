from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import checkpoints
from jobs.bucket import Bucket
from jobs.errors import ConfigError
from tests.conftest import MotoBucket

KEY = "runs/run/checkpoints/checkpoint-{}/{}"


@pytest.fixture
def bucket(moto_bucket: MotoBucket) -> Bucket:
    return Bucket.from_env(moto_bucket.environ)


def saved(directory: Path, step: int) -> Path:
    path = directory / f"checkpoint-{step}"
    path.mkdir(parents=True)
    for name in (*checkpoints.NEEDED, *checkpoints.WHOLE):
        (path / name).write_bytes(f"{name} at {step}".encode())
    (path / "sub").mkdir()
    (path / "sub" / "more.bin").write_bytes(b"more")
    return path


def test_a_checkpoint_comes_back_as_it_was(bucket: Bucket, tmp_path: Path) -> None:
    assert checkpoints.find_latest(bucket, "run") is None
    original = saved(tmp_path, 50)
    assert checkpoints.upload(bucket, "run", original) == 50
    found = checkpoints.find_latest(bucket, "run")
    assert found is not None and found.step == 50 and not found.skipped
    copy = checkpoints.fetch(bucket, "run", 50, tmp_path / "new")
    files = {path.relative_to(original): path.read_bytes() for path in original.rglob("*") if path.is_file()}
    assert {path.relative_to(copy): path.read_bytes() for path in copy.rglob("*") if path.is_file()} == files


TORN: dict[str, Callable[[Bucket], None]] = {
    "trainer_state.json is missing": lambda b: b.delete([KEY.format(150, "trainer_state.json")]),
    "rollout_state.json is missing": lambda b: b.delete([KEY.format(150, "rollout_state.json")]),
    "optimizer.pt has 0 bytes": lambda b: b.put(KEY.format(150, "optimizer.pt"), b""),
    "adapter_model.safetensors has 3 bytes": lambda b: b.put(KEY.format(150, "adapter_model.safetensors"), b"ada"),
    "adapter_config.json has other bytes": lambda b: b.put(
        KEY.format(150, "adapter_config.json"), b"ADAPTER_CONFIG.JSON AT 150"
    ),
    "never finished": lambda b: b.delete([KEY.format(150, "complete.json")]),
    "more.bin is missing": lambda b: b.delete([KEY.format(150, "sub/more.bin")]),
}


@pytest.mark.parametrize("why", TORN)
def test_a25_resume_passes_over_a_torn_checkpoint_and_says_why(bucket: Bucket, tmp_path: Path, why: str) -> None:
    for step in (100, 150):
        checkpoints.upload(bucket, "run", saved(tmp_path, step))
    TORN[why](bucket)
    before = bucket.list("runs/")
    found = checkpoints.find_latest(bucket, "run")
    assert found is not None and found.step == 100
    assert why in found.skipped[150]
    assert bucket.list("runs/") == before


def test_shards_of_several_processes_are_a_checkpoint_too(bucket: Bucket, tmp_path: Path) -> None:
    for step in (50, 100):
        path = saved(tmp_path, step)
        (path / "optimizer.pt").unlink()
        for name in (*checkpoints.SHARDED, "optimizer_0/__1_0.distcp"):
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(name.encode())
        checkpoints.upload(bucket, "run", path)
    bucket.delete([KEY.format(100, "optimizer_0/.metadata")])
    found = checkpoints.find_latest(bucket, "run")
    assert found is not None and found.step == 50 and found.skipped == {100: "optimizer_0/.metadata is missing"}
    assert (checkpoints.fetch(bucket, "run", 50, tmp_path / "new") / "optimizer_0" / "__1_0.distcp").exists()


def test_a25_with_no_complete_one_there_is_no_silent_fresh_start(bucket: Bucket, tmp_path: Path) -> None:
    checkpoints.upload(bucket, "run", saved(tmp_path, 150))
    TORN["never finished"](bucket)
    with pytest.raises(
        ConfigError, match=r"none of its checkpoints is complete \(checkpoint-150: its upload never finished"
    ):
        checkpoints.find_latest(bucket, "run")


def test_a_list_of_files_cannot_leave_its_folder(bucket: Bucket, tmp_path: Path) -> None:
    checkpoints.upload(bucket, "run", saved(tmp_path, 50))
    bucket.put(KEY.format(50, "complete.json"), b'{"files": {"../../x": {"size": 1, "sha256": ""}}}')
    with pytest.raises(ConfigError, match="leaves its folder"):
        checkpoints.fetch(bucket, "run", 50, tmp_path / "new")
