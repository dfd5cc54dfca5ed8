import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest

from jobs import limits, recipe
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


ONE, ZERO = "expected a whole number of at least 1", "expected a whole number of at least 0"
OUT_OF_RANGE = {
    "trainer.max_staleness=x": rf'trainer\.max_staleness = "x": {ZERO}',
    "trainer.max_staleness=-1": rf"trainer\.max_staleness = -1: {ZERO}",
    "trainer.max_staleness=1.5": rf"trainer\.max_staleness = 1\.5: {ZERO}",
    "trainer.max_steps=x": rf'trainer\.max_steps = "x": {ONE}, or -1 to leave it to TRL',
    "trainer.max_steps=true": rf"trainer\.max_steps = true: {ONE}",
    "trainer.max_steps=0": rf"trainer\.max_steps = 0: {ONE}",
    "trainer.max_inflight_tasks=x": rf'trainer\.max_inflight_tasks = "x": {ONE}, or -1 to leave it to TRL',
    "trainer.max_inflight_tasks=0": rf"trainer\.max_inflight_tasks = 0: {ONE}, or -1",
    "trainer.max_completion_length=x": rf'trainer\.max_completion_length = "x": {ONE}',
    "trainer.per_device_train_batch_size=x": rf'trainer\.per_device_train_batch_size = "x": {ONE}',
    "trainer.per_device_train_batch_size=0": rf"trainer\.per_device_train_batch_size = 0: {ONE}",
    "trainer.gradient_accumulation_steps=[2]": rf"trainer\.gradient_accumulation_steps = \[2\]: {ONE}",
    "trainer.num_generations=0": rf"trainer\.num_generations = 0: {ONE}",
    "trainer.weight_sync_steps=0": rf"trainer\.weight_sync_steps = 0: {ONE}",
    "trainer.token_budget=all": r'trainer\.token_budget = "all": expected a whole number\.',
    "trainer.learning_rate=fast": r'trainer\.learning_rate = "fast": expected a finite number of at least 0',
    "trainer.learning_rate=nan": r"trainer\.learning_rate = nan: expected a finite number of at least 0",
    "trainer.learning_rate=inf": r"trainer\.learning_rate = inf: expected a finite number",
    "trainer.learning_rate=-1e-5": r"trainer\.learning_rate = -1e-05: expected a finite number",
    "trainer.temperature=0": r"trainer\.temperature = 0: expected a finite number above 0",
    "trainer.top_p=1.1": r"trainer\.top_p = 1\.1: expected a number above 0 and at most 1",
    "trainer.save_steps=2.5": r"trainer\.save_steps = 2\.5: expected a whole number of steps, or a part of all",
    "trainer.heartbeat_stale_after_s=x": r'heartbeat_stale_after_s = "x": expected a number above 0',
    "replica.vllm.max_model_len=x": rf'replica\.vllm\.max_model_len = "x": {ONE}',
    "replica.vllm.max_model_len=[]": rf"replica\.vllm\.max_model_len = \[\]: {ONE}",
    "replica.vllm.max_model_len=0": rf"replica\.vllm\.max_model_len = 0: {ONE}",
    "replica.vllm.max_loras=x": rf'replica\.vllm\.max_loras = "x": {ONE}',
    "replica.vllm.max_cpu_loras=x": rf'replica\.vllm\.max_cpu_loras = "x": {ONE}',
    "replica.vllm.max_lora_rank=true": rf"replica\.vllm\.max_lora_rank = true: {ONE}",
    "replica.vllm.data_parallel_size=x": rf'replica\.vllm\.data_parallel_size = "x": {ONE}',
    "replica.vllm.tensor_parallel_size=x": rf'replica\.vllm\.tensor_parallel_size = "x": {ONE}',
    "replica.vllm.gpu_memory_utilization=90": r"gpu_memory_utilization = 90: expected a number above 0 and at most 1",
    "reward.weights=[nan]": r"reward\.weights\[0\] = nan: expected a finite number",
    "reward.weights=[1.0, inf]": r"reward\.weights\[1\] = inf: expected a finite number",
    "reward.timeout_s=-1": r"reward\.timeout_s = -1\.0: expected a finite number above 0",
    "lora.dropout=2": r"lora\.dropout = 2\.0: expected a number of at least 0 and below 1",
    "lora.alpha=nan": r"lora\.alpha = nan: expected a finite number above 0",
    "proxy.max_batch=0": rf"proxy\.max_batch = 0: {ONE}",
    "proxy.max_parked=-1": rf"proxy\.max_parked = -1: {ZERO}",
    "proxy.park_timeout_s=0": r"proxy\.park_timeout_s = 0\.0: expected a finite number above 0",
    "jobs.timeout_s=0": rf"jobs\.timeout_s = 0: {ONE}",
    "jobs.lease_s=-5": rf"jobs\.lease_s = -5: {ONE}",
}


@pytest.mark.parametrize("override", OUT_OF_RANGE)
def test_a_number_that_is_none_or_out_of_its_range_is_named(small: str, override: str) -> None:
    with pytest.raises(ConfigError, match=OUT_OF_RANGE[override]):
        recipe.load(small, None, [override])
    with pytest.raises(ConfigError, match=OUT_OF_RANGE[override]):
        recipe.override(recipe.load(small), override)


@pytest.mark.parametrize(
    "override",
    [
        *(
            "trainer.max_steps=-1",
            "trainer.max_inflight_tasks=-1",
            "trainer.max_staleness=0",
            "trainer.token_budget=-1",
        ),
        *("trainer.learning_rate=1", "trainer.learning_rate=0", "trainer.max_grad_norm=inf", "trainer.top_k=-1"),
        *(
            "trainer.save_steps=0.5",
            "trainer.save_steps=20.0",
            "trainer.queue_maxsize=0",
            "trainer.request_timeout=0.5",
        ),
        *("trainer.heartbeat_stale_after_s=inf", "trainer.save_total_limit=0", "reward.weights=[-1]"),
        *("proxy.max_redispatches=0", "replica.vllm.gpu_memory_utilization=1", "replica.vllm.swap_space=x"),
    ],
)
def test_what_trl_and_vllm_take_is_not_refused(small: str, override: str) -> None:
    recipe.load(small, None, [override])


def test_numbers_of_a_script_are_checked_unless_the_recipe_overrules_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("AsyncGRPOConfig(max_staleness=-1, token_budget=None, max_steps=None)\n")
    (tmp_path / "mine.toml").write_text('[model]\nid = "tiny:digit"\n[trainer]\nscript = "train.py"\n')
    mine = str(tmp_path / "mine.toml")
    with pytest.raises(ConfigError, match=rf"max_staleness in trainer\.script = -1: {ZERO}"):
        recipe.load(mine)
    with pytest.raises(ConfigError, match=rf"max_steps in trainer\.script = null: {ONE}"):
        recipe.load(mine, None, ["trainer.max_staleness=2"])
    recipe.load(mine, None, ["trainer.max_staleness=2", "trainer.max_steps=5"])


def test_the_recipe_of_an_older_run_is_still_read(small: str) -> None:
    values = recipe.load(small).to_dict()
    values["proxy"]["max_batch"] = 0
    assert Recipe.from_dict(values).proxy.max_batch == 0


def test_the_limits_are_of_fields_that_there_are() -> None:
    config = pytest.importorskip("trl.experimental.async_grpo").AsyncGRPOConfig
    known = typing.get_type_hints(config)
    assert limits.TRAINER_LIMITS.keys() <= known.keys()
    for name, value in {each.name: each.default for each in dataclasses.fields(config)}.items():
        if name in limits.TRAINER_LIMITS and value is not None:
            limits.TRAINER_LIMITS[name].check(name, value)
    assert {name for name in limits.TRAINER_LIMITS if type(None) in typing.get_args(known[name])} == limits.OPTIONAL
    sections = typing.get_type_hints(Recipe)
    for where in limits.OWN_LIMITS:
        section, _, name = where.partition(".")
        kinds = [kind for kind in (sections[section], *typing.get_args(sections[section])) if kind is not type(None)]
        assert any(name in getattr(kind, "__dataclass_fields__", {}) for kind in kinds), where


def test_pythons_words_for_truth_are_text_to_toml() -> None:
    for where in ("trainer.gradient_checkpointing", "replica.vllm.enforce_eager"):
        with pytest.raises(ConfigError, match=f"{where} = 'False' is text: write false, as TOML does"):
            recipe.load("digit", None, [f"{where}=False"])
        recipe.load("digit", None, [f"{where}=false"])


def test_a_model_beside_the_recipe_is_found_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for model in (here / "both", here / "only-here", there / "both", there / "org" / "model", tmp_path / "home" / "m"):
        model.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def found(given: str, *overrides: str, config: str | None = None) -> str:
        (there / "mine.toml").write_text(SMALL.replace("tiny:digit", given))
        return recipe.load("../there/mine.toml", config, overrides).model.id

    for given in ("both", "./both", "../there/both"):
        assert found(given) == str(there / "both"), given
    assert found("org/model") == str(there / "org" / "model")
    for given in ("only-here", "./only-here", "./nowhere", "Qwen/Qwen2.5-Math-1.5B", "tiny:digit", "", "/nope/x"):
        assert found(given) == given
    assert found("tiny:add", "model.id=./both") == "./both", "one of --set is relative to the current directory"
    assert found("~/m") == found("tiny:add", "model.id=~/m") == str(tmp_path / "home" / "m")
    (there / "more.toml").write_text('[model]\nid = "./both"\n')
    assert found("tiny:add", config="../there/more.toml") == str(there / "both")


def test_a_directory_called_as_a_model_of_a_built_in_recipe_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Qwen" / "Qwen2.5-Math-1.5B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert recipe.load("sanity").model.id == "Qwen/Qwen2.5-Math-1.5B"
