import json
import logging
from pathlib import Path
from typing import Any

import pytest

from jobs import plan, preflight, recipe, script
from jobs.errors import ConfigError
from jobs.launch import Launch
from jobs.recipe import Recipe
from jobs.site import HUB, Site

SEVENS = Path(__file__).with_name("scripts") / "sevens.toml"
BARE = '[model]\nid = "tiny:digit"\n[trainer]\nscript = "train.py"\n'


def bare(folder: Path, text: str, *overrides: str, more: str = "") -> Recipe:
    """A recipe that says no more than it must, with a script of this text."""
    (folder / "train.py").write_text(text)
    (folder / "bare.toml").write_text(BARE + more)
    return recipe.load(str(folder / "bare.toml"), None, overrides)


def test_a_script_travels_with_the_recipe() -> None:
    found = recipe.load(str(SEVENS))
    assert found.script is not None and found.script.text == SEVENS.with_suffix(".py").read_text()
    assert (found.script.name, found.script.args) == ("sevens.py", ["--steps", "30", "--save"])
    assert found.trainer == {"save_strategy": "steps", "save_steps": 4}
    assert (found.dataset, found.reward) == (None, None)
    assert Recipe.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_the_path_is_relative_to_the_file_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(f"name = {name!r}")
        (tmp_path / name / "recipe.toml").write_text(BARE)
    (tmp_path / "a" / "absolute.toml").write_text(f'[trainer]\nscript = "{tmp_path}/b/train.py"\n')
    monkeypatch.chdir(tmp_path / "a")

    def loaded(*arguments: Any) -> str:
        found = recipe.load(*arguments).script
        assert found is not None
        return found.text[-2]

    assert loaded("../b/recipe.toml") == "b"
    assert loaded("recipe.toml", "../b/recipe.toml") == "b"
    assert loaded("recipe.toml", "absolute.toml") == "b"
    assert loaded("../b/recipe.toml", None, ["trainer.script=train.py"]) == "a"


WRONG = {
    "trainer.script=none.py": r"trainer\.script = 'none\.py' cannot be read: .*No such file.* relative to the recipe's",
    "trainer.script=broken.py": r"trainer\.script = 'broken\.py': no Python in line 2",
    "trainer.script=3": r"trainer\.script = 3: expected the path",
    "trainer.script_args=['--steps', 3]": r"trainer\.script_args = .*expected a list of texts",
    "dataset.load=m:f": r"dataset: trainer\.script brings its own",
    "reward.functions=['m:f']": r"reward: trainer\.script brings its own",
}


@pytest.mark.parametrize("override", WRONG)
def test_what_cannot_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("steps = 3\ndef (\n")
    with pytest.raises(ConfigError, match=WRONG[override]):
        bare(tmp_path, "", override)


def test_a_recipe_without_script_needs_what_a_script_brings(tmp_path: Path) -> None:
    (tmp_path / "none.toml").write_text('[model]\nid = "m"\n')
    with pytest.raises(ConfigError, match=r"dataset is missing \(or name a trainer\.script"):
        recipe.load(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match=r"script_args = .*there is no trainer\.script"):
        recipe.load("digit", None, ["trainer.script_args=['x']"])
    (tmp_path / "none.toml").write_text('[model]\nid = "m"\n[script]\nname = "train.py"\ntext = ""\n')
    with pytest.raises(ConfigError, match=r"unknown field script \(did you mean trainer\.script"):
        recipe.load(str(tmp_path / "none.toml"))


STATED: dict[str, tuple[Any, ...]] = {
    "": ({}, {}, None, False),
    "AsyncGRPOConfig(max_steps=3, learning_rate=1e-3, seed=SEED)": (
        {"max_steps": 3, "learning_rate": 1e-3},
        {},
        None,
        False,
    ),
    "AsyncGRPOConfig(max_steps=3); AsyncGRPOConfig(max_steps=4)": ({}, {}, None, False),
    "peft.LoraConfig(r=32, target_modules='all-linear')": ({}, {"r": 32, "target_modules": "all-linear"}, None, False),
    "LoraConfig(lora_alpha=4)": ({}, {"r": 8, "lora_alpha": 4}, None, False),
    "LoraConfig(r=RANK, use_dora=True)": ({}, {"use_dora": True}, None, False),
    "LoraConfig(lora_alpha=4, **more)": ({}, {"lora_alpha": 4}, None, False),
    "AsyncGRPOTrainer(model='m', args=args)": ({}, {}, "m", True),
    "AsyncGRPOTrainer(model='m', peft_config=None)": ({}, {}, "m", True),
    "AsyncGRPOTrainer(model=MODEL, peft_config=adapter)": ({}, {}, None, False),
    "AsyncGRPOTrainer(**everything)": ({}, {}, None, False),
    "AsyncGRPOTrainer(m, f, a, d, p, c, o, LoraConfig(r=4))": ({}, {"r": 4}, None, False),
}


@pytest.mark.parametrize("text", STATED)
def test_what_can_be_read_off_a_script(text: str) -> None:
    found = script.stated(text)
    assert (found.config, found.adapter, found.model, found.full) == STATED[text]


def test_dependencies_are_those_of_the_inline_metadata() -> None:
    text = (
        '#!/usr/bin/env python\n# /// script\n# dependencies = [\n#     "trl",\n#     "x==1",\n# ]\n# ///\nimport x\n'
    )
    assert script.dependencies(text) == ["trl", "x==1"]
    assert script.dependencies("# dependencies = ['x']\n") == []
    with pytest.raises(ConfigError, match=r"metadata .* is no TOML"):
        script.dependencies("# /// script\n# dependencies = [\n# ///\n")


FULL = "AsyncGRPOTrainer(model='tiny:digit', args=AsyncGRPOConfig(max_staleness=6, max_steps=9))"
WITH_ADAPTER = "AsyncGRPOTrainer('m', peft_config=LoraConfig({}), args=AsyncGRPOConfig(max_staleness=6))"


def test_slots_follow_from_what_the_script_says_unless_the_recipe_says_it(tmp_path: Path) -> None:
    adapted = bare(tmp_path, WITH_ADAPTER.format("r=20"))
    flags = plan.resolve(adapted).replica.vllm
    assert (flags["max_loras"], flags["max_lora_rank"]) == (8, 32)
    flags = plan.resolve(bare(tmp_path, FULL, "trainer.max_staleness=1", "lora.r=4")).replica.vllm
    assert (flags["max_loras"], flags["max_lora_rank"]) == (3, 8)
    computed = WITH_ADAPTER.format("r=rank()")
    with pytest.raises(ConfigError, match=r"max_lora_rank is missing: trainer\.script brings an adapter"):
        plan.resolve(bare(tmp_path, computed))
    assert plan.resolve(bare(tmp_path, computed, "replica.vllm.max_lora_rank=64")).replica.vllm["max_lora_rank"] == 64


def test_the_plan_says_what_the_recipe_overrules(tmp_path: Path) -> None:
    chosen = bare(tmp_path, FULL, "lora.r=4", "trainer.max_steps=3", "trainer.script_args=['--fast']")
    derived = plan.derived(plan.resolve(chosen), None)
    assert (derived["script"], derived["overruled"]) == ("train.py --fast", "max_steps 9 -> 3")
    assert (derived["max_loras"], derived["syncs"]) == (8, 3)


REFUSED = {
    (FULL,): r"trainer\.script trains without an adapter.*only adapters travel: add \[lora\]",
    (WITH_ADAPTER.format("r=8, use_dora=True"),): "use_dora = True",
    (WITH_ADAPTER.format("r=8"), "replica.vllm.max_loras=7"): r"max_loras = 7: .*max_staleness = 6",
    (WITH_ADAPTER.format("r=16"), "replica.vllm.max_lora_rank=8"): "rank 16 is greater than max_lora_rank 8",
    ("AsyncGRPOConfig(max_completion_length=9)", "lora.r=8", "replica.vllm.max_model_len=9"): "no token is left",
    ("x = 1", "lora.r=8", "trainer.output_dir=here"): r"trainer\.output_dir cannot be set",
    ("# /// script\n# x\n# ///\n", "lora.r=8"): "metadata",
    ("# /// script\n# dependencies = ['trl==1.18.0']\n# ///\n", "lora.r=8"): r"dependencies of train\.py: .*1\.18\.0",
    ("# /// script\n# dependencies = ['trl==1.15.0']\n# ///\n", "lora.r=8"): (
        r"dependencies of train\.py have trl==1\.15\.0, and jobs\.trainer_packages has trl==1\.16\.0"
    ),
    ("AsyncGRPOConfig(hub_token='hf_x')", "lora.r=8"): r"hub_token in trainer\.script: it would lie open",
    ("", "lora.r=8", "replica.vllm.data_parallel_size=2"): r"data_parallel_size = 2: TRL then syncs merged weights",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path, case: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=REFUSED[case]):
        preflight.check(plan.resolve(bare(tmp_path, *case)), local=True)


def test_a_script_may_report_elsewhere_and_another_model_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = bare(tmp_path, "AsyncGRPOTrainer(model='some/model')", "lora.r=8", "trainer.report_to=none")
    with caplog.at_level(logging.WARNING):
        preflight.check(plan.resolve(chosen), local=True)
    assert "train.py trains 'some/model'" in caplog.text and "model.id = 'tiny:digit'" in caplog.text


def test_jobs_install_what_the_script_asks_for(tmp_path: Path, moto_bucket: Any) -> None:
    from jobs.bucket import BucketSettings

    text = '# /// script\n# dependencies = ["trackio"]\n# ///\n'
    chosen = bare(tmp_path, text, "lora.r=8", "jobs.trainer_packages=[]")
    site = Site(HUB, "", "somebody", BucketSettings.from_env(moto_bucket.environ))
    command = Launch(site, chosen, "run", "vllm", None, 0).plans(Path("asyncgrpo.pyz"), "0" * 64)["trainer"].command
    assert command[:2] == ["bash", "-c"] and " trackio && exec " in command[2]
