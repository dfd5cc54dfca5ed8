from dataclasses import replace

import pytest

from jobs import preflight, recipe
from jobs.errors import ConfigError
from jobs.recipe import Recipe


@pytest.fixture
def digit() -> Recipe:
    return recipe.load("digit")


@pytest.mark.parametrize("name", ["digit", "add"])
def test_the_built_in_recipes_pass(name: str) -> None:
    preflight.check(recipe.load(name), local=True)


WRONG = {
    "replica.count=0": r"replica\.count = 0: at least 1",
    "replica.engines=-1": r"replica\.engines = -1: at least 1",
    "reward.functions=[]": r"reward\.functions is empty",
    "reward.weights=[1.0, 2.0]": r"reward\.weights has 2 numbers for 1 functions",
    "reward.functions=['jobs.rewards:nothing']": r"reward\.functions\[0\] = .*jobs\.rewards:nothing",
    "reward.functions=['no.such.module:f']": r"no\.such\.module",
    "dataset.load=jobs.tiny:nothing": r"dataset\.load",
    "lora.r=0": r"r = 0: the rank is a whole number of at least 1",
    "lora.r=9": r"r = 9: LoRA rank 9 is greater than max_lora_rank 8 .* --max-lora-rank 16",
    "lora.r=1000": r"r = 1000: LoRA rank 1000 is greater",
    "replica.vllm.max_lora_rank=12": r"replica\.vllm\.max_lora_rank = 12: vLLM takes one of 1, 8, 16",
    "lora.target_modules=['lm_head']": "'lm_head'",
    "replica.vllm.max_loras=5": r"max_loras = 5: trainer\.max_staleness = 4 .* takes 6.*lower max_staleness to 3",
    "replica.vllm.max_cpu_loras=3": r"max_cpu_loras = 3: it must be at least max_loras = 6",
    "trainer.max_completion_length=256": r"max_completion_length = 256: with replica\.vllm\.max_model_len = 256",
    "trainer.learnig_rate=1.0": r"trainer\.learnig_rate is no field .*did you mean learning_rate",
    "trainer.output_dir=x": r"trainer\.output_dir cannot be set",
}


@pytest.mark.parametrize("override", WRONG)
def test_what_cannot_work_is_refused_by_name(digit: Recipe, override: str) -> None:
    with pytest.raises(ConfigError, match=WRONG[override]):
        preflight.check(recipe.override(digit, override), local=True)


def test_a02_six_slots_are_enough_for_a_staleness_of_four(digit: Recipe) -> None:
    preflight.check_adapter(recipe.override(digit, "replica.vllm.max_loras=6"))
    with pytest.raises(ConfigError, match=r"max_loras = 5.*max_staleness = 4"):
        preflight.check_adapter(recipe.override(digit, "replica.vllm.max_loras=5"))


@pytest.mark.parametrize("package", ["vllm", "trl", "peft", "torch"])
def test_a_missing_package_comes_with_the_command_that_installs_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    with pytest.raises(ConfigError, match=f"the package {package} is missing.*build.sh"):
        preflight.check_environment()


def test_another_trl_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.18.0")
    with pytest.raises(ConfigError, match=r"1\.18\.0 is not supported.*1\.14\.2, 1\.15\.0"):
        preflight.check_environment()


def test_launching_elsewhere_asks_nothing_of_this_environment(digit: Recipe) -> None:
    preflight.check(replace(digit, reward=replace(digit.reward, functions=["only.there:f"])), local=False)
