import json
import sys
from pathlib import Path

import pytest

from jobs import modules, preflight, recipe
from jobs.errors import ConfigError
from jobs.recipe import Recipe
from jobs.rewards import resolve

MINE = "def brevity(completions, **_):\n    return [1 / (1 + len(str(each))) for each in completions]\n"
TOML = """
[model]
id = "tiny:digit"
dtype = "auto"
[dataset]
load = "jobs.tiny:digit_prompts"
[reward]
functions = ["jobs.rewards:digit", "mine_own:brevity"]
[replica.vllm]
max_lora_rank = 8
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine_own.py").write_text(MINE)
    (tmp_path / "mine.toml").write_text(TOML)
    return tmp_path


def test_a_file_beside_the_recipe_travels_in_it(folder: Path) -> None:
    chosen = recipe.load(str(folder / "mine.toml"))
    assert chosen.sources == {"mine_own": MINE}
    there = Recipe.from_dict(json.loads(json.dumps(chosen.to_dict())))
    with modules.installed(there.sources):
        assert resolve("mine_own:brevity")(completions=["abc"]) == [0.25]
    assert "mine_own" not in sys.modules
    preflight.check(chosen, local=True)


def test_a_file_in_the_current_directory_does_so_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    chosen = recipe.load("digit", overrides=["reward.functions=['mine_own:brevity']"])
    assert list(chosen.sources) == ["mine_own"]
    preflight.check(chosen, local=True)


def test_what_is_installed_where_the_trainer_runs_stays_there(folder: Path) -> None:
    assert recipe.load("digit").sources == {}
    assert recipe.load("digit", overrides=["reward.functions=['only.there:f', 'https://host/f']"]).sources == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def other(): ...\n_hidden = 1\nfrom a import b as c\n", r"has no brevity\. It has: c, other\."),
        ("def brevity(:\n", r"mine_own\.py is no Python in line 1"),
    ],
)
def test_what_cannot_work_is_refused_wherever_the_trainer_runs(folder: Path, text: str, words: str) -> None:
    (folder / "mine_own.py").write_text(text)
    with pytest.raises(ConfigError, match=r"reward\.functions\[1\] = 'mine_own:brevity'.*" + words):
        recipe.load(str(folder / "mine.toml"))


def test_sources_are_no_field_of_a_file(folder: Path) -> None:
    (folder / "mine.toml").write_text(TOML + "[sources]\nmine_own = 'text'\n")
    with pytest.raises(ConfigError, match="unknown field sources"):
        recipe.load(str(folder / "mine.toml"))
