from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from emulator.bucket import MotoServer
from jobs import model_fetch
from jobs.bucket import Bucket
from jobs.errors import ConfigError, NotFound, RunFailed
from jobs.model_fetch import digest, hub_environment, obtain
from jobs.spec import ModelRef
from tests.conftest import MotoBucket


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    (directory / "sub").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "sub/vocab.txt"):
        (directory / name).write_text(name * 100)
    return directory


def publish(bucket: Bucket, model: Path) -> ModelRef:
    prefix = f"models/{digest(model)}"
    for path in model.rglob("*"):
        if path.is_file():
            bucket.put_file(f"{prefix}/{path.relative_to(model)}", path)
    return ModelRef("bucket", prefix, "tiny")


def test_a_model_comes_through_the_bucket_once(moto_bucket: MotoBucket, model: Path, tmp_path: Path) -> None:
    bucket = Bucket.from_env(moto_bucket.environ)
    ref = publish(bucket, model)
    environ = {"ASYNCGRPO_CACHE": str(tmp_path / "cache")}
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: obtain(ref, bucket, environ), range(4)))
    (directory,) = found
    assert digest(Path(directory)) == digest(model)
    assert (Path(directory) / "sub/vocab.txt").read_text() == "sub/vocab.txt" * 100
    bucket.delete(bucket.list("models/"))
    assert obtain(ref, bucket, environ) == directory


def test_a_bucket_may_show_a_model_late(model: Path, tmp_path: Path) -> None:
    moto = MotoServer()
    bucket = Bucket(moto.start())
    try:
        moto.disturb(lag_s=1.0)
        ref = publish(bucket, model)
        assert bucket.list("") == [], "it is shown already"
        directory = obtain(ref, bucket, {"ASYNCGRPO_CACHE": str(tmp_path / "cache")})
        assert digest(Path(directory)) == digest(model)
        bucket.put("run", b"new")
        with pytest.raises(NotFound):
            bucket.get_shown("run", 0.1)
        assert bucket.get_shown("run") == b"new"
    finally:
        moto.stop()


def test_a_damaged_model_is_not_used(
    moto_bucket: MotoBucket, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_fetch, "SHOWN_S", 0.0)
    bucket = Bucket.from_env(moto_bucket.environ)
    ref = publish(bucket, model)
    bucket.put(f"{ref.source}/config.json", b"{}")
    environ = {"ASYNCGRPO_CACHE": str(tmp_path / "cache")}
    for _ in range(2):
        with pytest.raises(RunFailed, match="damaged"):
            obtain(ref, bucket, environ)
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_other_models_are_named_as_they_are(moto_bucket: MotoBucket, model: Path) -> None:
    bucket = Bucket.from_env(moto_bucket.environ)
    assert obtain(ModelRef("hub", "org/model", "org/model"), bucket, {}) == "org/model"
    assert obtain(ModelRef("path", str(model), "m"), bucket, {}) == str(model)
    with pytest.raises(ConfigError, match=r"config\.json"):
        obtain(ModelRef("path", str(model / "sub"), "m"), bucket, {})


def test_models_and_data_sets_come_from_the_hub_that_has_them() -> None:
    job = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_TOKEN": "of the emulator", "HF_HOME": "/home/me/hf"}
    assert hub_environment(job) == job
    emulated = hub_environment({**job, "ASYNCGRPO_HUB": "https://hub.example"})
    assert emulated["HF_ENDPOINT"] == "https://hub.example" and emulated["HF_HOME"] == "/home/me/hf"
    assert "HF_TOKEN" not in emulated
