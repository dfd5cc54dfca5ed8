import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

import asyncgrpo
from jobs import packages, replica, versions
from jobs.bucket import Bucket
from jobs.bundle import app_dir
from jobs.errors import ConfigError
from jobs.recipe import JobSettings, load
from jobs.spec import VLLM_SERVER, ModelRef, RunSpec, spec_key
from tests.conftest import MotoBucket
from tests.environments import environment

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("version", ["1.14.2", "1.15.0", "1.16.0"])
def test_what_the_matrix_runs_is_supported(version: str) -> None:
    assert versions.check_trl(version) is versions.TRL[version]


@pytest.mark.parametrize("version", ["1.13.0", "1.14.1", "1.16.1", "1.18.0", "1.16.0.dev0"])
def test_another_trl_is_refused_by_name(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"bin/python: trl {version} is not supported.*1\.14\.2, 1\.15\.0, 1"):
        versions.check_trl(version, "env/bin/python")


def test_a_missing_trl_or_vllm_says_which_to_install() -> None:
    with pytest.raises(ConfigError, match=r"TRL is missing\. Install one of trl 1\.14\.2"):
        versions.check_trl(None)
    with pytest.raises(ConfigError, match=r"vLLM is missing\. Install vllm 0\.22 to 0\.31"):
        versions.check_vllm(None)


@pytest.mark.parametrize("version", ["0.22.0", "0.24.0", "0.31.0", "0.31.0+cpu", "0.31.1rc1"])
def test_a_supported_vllm(version: str) -> None:
    versions.check_vllm(version)


@pytest.mark.parametrize("version", ["0.21.0", "0.9.2", "0.32.0", "1.0.0", "0.1.dev1+g123", "nightly"])
def test_another_vllm_is_refused_by_name(version: str) -> None:
    with pytest.raises(ConfigError) as refused:
        versions.check_vllm(version)
    assert f"vllm {version} is not supported. Install one of 0.22 to 0.31" in str(refused.value)


def test_what_each_trl_needs_on_a_cpu() -> None:
    """The matrix runs these; here is only that nobody changes one without noticing."""
    needs = {name: (trl.kernel_by_name, trl.asks_for_peak_flops, trl.triton_only) for name, trl in versions.TRL.items()}
    assert needs == {"1.14.2": (True, False, False), "1.15.0": (True, True, True), "1.16.0": (False, True, False)}


@pytest.mark.parametrize(
    ("image", "refused"),
    [
        (JobSettings().image, None),
        ("vllm/vllm-openai:v0.24.0", None),
        ("vllm/vllm-openai:v0.21.0", "0.21.0"),
        ("docker.io/vllm/vllm-openai:v0.32.0", "0.32.0"),
        ("vllm/vllm-openai:latest", None),
        ("me/vllm-openai:v0.1.0", None),
    ],
)
def test_the_tag_of_an_official_image_is_looked_at(image: str, refused: str | None) -> None:
    if refused is None:
        versions.check_image("jobs.image", image)
        return
    with pytest.raises(ConfigError, match=rf"jobs\.image = '{image}': vllm {refused} is not supported"):
        versions.check_image("jobs.image", image)


@pytest.mark.parametrize("pin", ["trl==1.13.0", "trl[peft] == 1.13.0"])
def test_a_pin_of_another_trl_is_refused(pin: str) -> None:
    versions.check_packages("jobs.trainer_packages", JobSettings().trainer_packages)
    versions.check_packages("jobs.trainer_packages", ["trl-extras==1.13.0", "trl"])
    with pytest.raises(ConfigError, match=r"jobs\.trainer_packages: .*trl 1\.13\.0 is not supported"):
        versions.check_packages("jobs.trainer_packages", ["peft==0.21.2", pin])


def test_two_lists_that_pip_gets_as_one_agree() -> None:
    versions.check_together("a", ["peft==1", "trl", "x-y==2"], "b", ["trl==1.16.0", "X_Y==2", "datasets==3"])
    with pytest.raises(ConfigError, match=r"a have x-y==2, and b has x-y==3: .* Give them the same version\."):
        versions.check_together("a", ["x_y[z]==2"], "b", ["X-y == 3"])


def test_each_version_is_pinned_in_a_lock() -> None:
    locks = {path.name: path.read_text().splitlines() for path in (ROOT / "requirements").glob("*.txt")}
    newest = list(versions.TRL)[-1]
    assert f"trl=={newest}" in locks["cpu.txt"] and f"trl=={newest}" in locks["gpu.txt"]
    for version in list(versions.TRL)[:-1]:
        assert f"trl=={version}" in [line.split(" ")[0] for line in locks[f"trl-{version}.txt"]]


def test_emulate_refuses_the_environment_of_an_image_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    python = environment(tmp_path / "env", trl="1.13.0")
    image = ["--image", f"mine:*={python}", "--set", "jobs.trainer_image=mine:1"]
    result = CliRunner().invoke(asyncgrpo.main, ["emulate", "digit", "--engine", "sim", *image])
    assert result.exit_code == 2
    assert f"{python}: trl 1.13.0 is not supported. Install one of 1.14.2, 1.15.0, 1.16.0" in result.output
    assert not Path("runs").exists()


def test_a_trainer_with_another_trl_ends_and_says_so(tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_bytes(RunSpec("run", load("digit"), ModelRef("path", "model", "model")).to_json())
    environ = {"PYTHONPATH": str(app_dir()), "ASYNCGRPO_SPEC_FILE": str(spec), "ASYNCGRPO_OUTPUT_DIR": str(tmp_path)}
    command = [environment(tmp_path / "env", trl="1.13.0"), "-m", "jobs.train"]
    ended = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "trl 1.13.0 is not supported. Install one of 1.14.2, 1.15.0, 1.16.0" in ended.stderr


def test_a_replica_with_another_vllm_ends_and_says_so(moto_bucket: MotoBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunSpec("run", load("digit"), ModelRef("path", "model", "model"), engine="vllm", engine_module=VLLM_SERVER)
    Bucket.from_env(moto_bucket.environ).put(spec_key("run"), run.to_json())
    monkeypatch.setattr(packages, "installed", lambda name: {"vllm": "0.21.0"}[name])
    with pytest.raises(ConfigError, match=r"vllm 0\.21\.0 is not supported\. Install one of 0\.22 to 0\.31"):
        replica.run({**moto_bucket.environ, "ASYNCGRPO_RUN": "run"})
