from pathlib import Path
from typing import Any

import pytest

from jobs import recipe
from jobs.errors import ConfigError
from jobs.recipe import Recipe

SMALL = """
[model]
id = "tiny:digit"
[dataset]
load = "jobs.tiny:digit_prompts"
[reward]
functions = ["jobs.rewards:digit"]
[lora]
alpha = 4
[trainer]
max_steps = 3
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


@pytest.mark.parametrize("name", recipe.built_in())
def test_built_in_recipes_are_whole_and_survive_the_bucket(name: str) -> None:
    found = recipe.load(name)
    assert found.name == name and found.description
    assert Recipe.from_dict(found.to_dict()) == found


def test_a_file_a_configuration_and_overrides_apply_in_this_order(small: str, tmp_path: Path) -> None:
    config = tmp_path / "more.toml"
    config.write_text("[trainer]\nmax_steps = 4\nlearning_rate = 0.1\n[replica]\ncount = 5\n")
    found = recipe.load(
        small, str(config), ["replica.count=6", "trainer.note=free text", "lora.target_modules=['q_proj']"]
    )
    assert found.name == "small"
    assert found.trainer == {"max_steps": 4, "learning_rate": 0.1, "note": "free text"}
    assert (found.replica.count, found.lora.alpha, found.lora.target_modules) == (6, 4.0, ["q_proj"])
    assert recipe.override(found, "replica.count=1").replica.count == 1


WRONG: dict[str, Any] = {
    "lora.rank=8": r"unknown field lora\.rank\. Known here: r, alpha",
    "replica.cuont=3": r"unknown field replica\.cuont \(did you mean count\?\)",
    "replica.count=two": r'replica\.count = "two": expected a whole number',
    "replica.count=true": r"replica\.count = true: expected a whole number",
    "replica.count=1.5": r"replica\.count = 1\.5: expected a whole number",
    "lora.alpha=x": r'lora\.alpha = "x": expected a number',
    "proxy.ack=later": r"proxy\.ack = 'later': expected one of 'published', 'first', 'all'",
    "reward.functions=x": r"reward\.functions = 'x': expected a list",
    "reward.functions=[1]": r"reward\.functions\[0\] = 1: expected text",
    "replica=3": r"replica = 3: expected a section",
    "modle.id=x": r"unknown field modle \(did you mean model\?\)",
    "model.id.x=3": "id is a value, not a section",
    "novalue": r"expected section\.field=value",
}


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_field_is_named(small: str, override: str) -> None:
    with pytest.raises(ConfigError, match=WRONG[override]):
        recipe.load(small, None, [override])


def test_what_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recipe 'digitt' is unknown \(did you mean digit\?\)\. Known: add, digit"):
        recipe.load("digitt")
    with pytest.raises(ConfigError, match=r"cannot be read: .*No such file"):
        recipe.load(str(tmp_path / "nothing.toml"))
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(ConfigError, match=r"bad\.toml is not TOML: .*line 1"):
        recipe.load(str(tmp_path / "bad.toml"))
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(ConfigError, match="model is missing"):
        recipe.load(str(tmp_path / "empty.toml"))
