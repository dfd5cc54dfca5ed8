from dataclasses import replace
from pathlib import Path

import pytest

from jobs import packages, preflight, recipe
from jobs.errors import ConfigError
from jobs.recipe import Recipe
from jobs.roster import Role
from tests.environments import environment


@pytest.fixture
def digit() -> Recipe:
    return recipe.load("digit")


@pytest.mark.parametrize("name", ["digit", "add"])
def test_the_built_in_recipes_pass(name: str) -> None:
    preflight.check(recipe.load(name), local=True)


WRONG = {
    "replica.count=0": r"replica\.count = 0: expected a whole number of at least 1",
    "replica.engines=-1": r"replica\.engines = -1: at least 1",
    "reward.functions=[]": r"reward\.functions is empty",
    "reward.weights=[1.0, 2.0]": r"reward\.weights has 2 numbers for 1 functions",
    "reward.functions=['jobs.rewards:nothing']": r"reward\.functions\[0\] = .*jobs\.rewards:nothing",
    "reward.functions=['no.such.module:f']": r"no\.such\.module",
    "reward.functions=['http:///score']": r"reward\.functions\[0\] = 'http:///score': expected http\(s\)://host",
    "reward={functions=['http://127.0.0.1:9/'], timeout_s=75}": r"timeout_s = 75: a group may take 300 s .* = 300\.",
    "reward.functions=['http://127.0.0.1:9/']": r"reward\.functions\[0\] = 'http://127.0.0.1:9/': nobody answers",
    "dataset.load=jobs.tiny:nothing": r"dataset\.load",
    "replica.vllm.data_parallel_size=2": r"data_parallel_size = 2: TRL then syncs merged weights over NCCL",
    "lora.r=0": r"r = 0: the rank is a whole number of at least 1",
    "lora.r=9": r"r = 9: LoRA rank 9 is greater than max_lora_rank 8 .* --max-lora-rank 16",
    "lora.r=1000": r"r = 1000: LoRA rank 1000 is greater",
    "replica.vllm.max_lora_rank=12": r"replica\.vllm\.max_lora_rank = 12: vLLM takes one of 1, 8, 16",
    "lora.target_modules=['lm_head']": "'lm_head'",
    "lora.target_modules=[]": r"lora\.target_modules = \[\]: .* learns nothing\. Name modules, .* 'all-linear'",
    "lora.target_modules=['']": r"lora\.target_modules = \[''\]: an adapter of no module",
    "lora.target_modules=": r"lora\.target_modules = '': an adapter of no module",
    "model.dtype=float99": r"model\.dtype = 'float99': expected one of auto, bfloat16, float16, float32",
    "model.id=": r"model\.id = '': name a model of the Hub \(organization/name\), or a directory",
    "model.id=/nope/x": r"model\.id = '/nope/x': no such directory\..* --set to the current directory",
    "model.id=./nomodel": r"model\.id = '\./nomodel': no such directory",
    "model.id=../nomodel": r"model\.id = '\.\./nomodel': no such directory",
    "model.id=~/nomodel/x": r"model\.id = '~/nomodel/x': no such directory",
    f"model.id={'x' * 300}": r"model\.id = 'x{300}': neither a directory nor",
    "model.id=organization/name/": r"model\.id = 'organization/name/': neither a directory nor",
    "model.id=~nobody-of-this-name/x": r"model\.id = '~nobody-of-this-name/x': no such directory",
    "model.id=jobs": r"model\.id = 'jobs': there is no config\.json in this directory",
    "model.id=/etc/hosts": r"model\.id = '/etc/hosts': no such directory",
    "model.id=build/no/model": r"model\.id = 'build/no/model': neither a directory nor what a model is called on the",
    "jobs.trainer_packages=['trl==1.16.0', '!!']": r"jobs\.trainer_packages\[1\] = '!!': pip cannot read this",
    "jobs.trainer_packages=['']": r"jobs\.trainer_packages\[0\] = '': pip cannot read this as a package\. Write name",
    "replica.vllm.max_loras=5": r"max_loras = 5: trainer\.max_staleness = 4 .* takes 6.*lower max_staleness to 3",
    "replica.vllm.max_cpu_loras=3": r"max_cpu_loras = 3: it must be at least max_loras = 6",
    "trainer.max_completion_length=256": r"max_completion_length = 256: with replica\.vllm\.max_model_len = 256",
    "trainer.learnig_rate=1.0": r"trainer\.learnig_rate is no field .*did you mean learning_rate",
    "jobs.image=vllm/vllm-openai:v0.21.0": r"jobs\.image = .*: vllm 0\.21\.0 is not supported",
    "jobs.trainer_packages=['trl==1.13.0']": r"jobs\.trainer_packages: .*trl 1\.13\.0 is not supported",
    "trainer.hub_token=hf_x": r"trainer\.hub_token: it would lie open in the run's specification",
    "trainer.output_dir=x": r"trainer\.output_dir cannot be set",
}


@pytest.mark.parametrize("override", WRONG)
def test_what_cannot_work_is_refused_by_name(digit: Recipe, override: str) -> None:
    with pytest.raises(ConfigError, match=WRONG[override]):
        preflight.check(recipe.override(digit, override), local=True)


def test_a_count_that_no_recipe_said_is_looked_at(digit: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"replica\.count = 0: at least 1 is needed"):
        preflight.check_replicas(replace(digit, replica=replace(digit.replica, count=0)))


@pytest.mark.parametrize(
    "override",
    [
        "model.id=Qwen/Qwen2.5-Math-1.5B",
        "model.id=gpt2",
        "model.dtype=float16",
        "jobs.trainer_packages=['a[b]>=1; python_version > \"3\"', 'git+https://h/x@y', './x.whl', '--pre', 'b @ https://h/b.whl']",
    ],
)
def test_what_hub_and_pip_may_know_is_not_refused(digit: Recipe, override: str) -> None:
    preflight.check(recipe.override(digit, override), local=False)


def test_a_directory_with_a_model_is_one_from_the_current_directory(
    digit: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "build" / "work" / "model").mkdir(parents=True)
    (tmp_path / "build" / "work" / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for model in ("build/work/model", "./build/work/model", str(tmp_path / "build/work/model")):
        preflight.check_model(recipe.override(digit, f"model.id={model}"))


def test_a_package_of_a_script_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text('# /// script\n# dependencies = ["fine", "!!"]\n# ///\n')
    (tmp_path / "mine.toml").write_text('[model]\nid = "tiny:digit"\n[lora]\n[trainer]\nscript = "train.py"\n')
    with pytest.raises(ConfigError, match=r"dependencies of train\.py\[1\] = '!!': pip cannot read this"):
        preflight.check(recipe.load(str(tmp_path / "mine.toml")), local=False)


def test_a02_six_slots_are_enough_for_a_staleness_of_four(digit: Recipe) -> None:
    preflight.check_adapter(recipe.override(digit, "replica.vllm.max_loras=6"))
    with pytest.raises(ConfigError, match=r"max_loras = 5.*max_staleness = 4"):
        preflight.check_adapter(recipe.override(digit, "replica.vllm.max_loras=5"))


ROLES: list[tuple[Role, str]] = [
    ("trainer", "torch"),
    ("trainer", "trl"),
    ("trainer", "peft"),
    ("replica", "torch"),
    ("replica", "vllm"),
]


@pytest.mark.parametrize(("role", "package"), ROLES)
def test_a_missing_package_comes_with_the_command_that_installs_it(role: Role, package: str) -> None:
    here = packages.here()
    lacking = replace(here, folders={name: path for name, path in here.folders.items() if name != package})
    with pytest.raises(ConfigError, match=f"the package {package} is missing where the {role} runs.*build.sh"):
        preflight.check_environment({"trainer": here, "replica": here, role: lacking})


@pytest.mark.parametrize(
    ("role", "package", "words"),
    [
        ("trainer", "trl", r"trl 9\.9 is not supported\. Install one of 1\.14\.2, 1\.15\.0"),
        ("replica", "vllm", r"vllm 9\.9 is not supported\. Install one of 0\.22 to 0\.31"),
    ],
)
def test_another_version_is_refused_where_it_matters(
    digit: Recipe, tmp_path: Path, role: Role, package: str, words: str
) -> None:
    python = str(environment(tmp_path / "env", **{package: "9.9"}))
    other: Role = "replica" if role == "trainer" else "trainer"
    with pytest.raises(ConfigError, match=f"{python}: {words}"):
        preflight.check(digit, local=True, pythons={role: python})
    preflight.check_environment({role: packages.here(), other: packages.of(python)})


def test_the_trainers_own_trl_says_which_fields_there_are(digit: Recipe, tmp_path: Path) -> None:
    python = environment(tmp_path / "env", trl=packages.here().versions["trl"] or "")
    (package,) = tmp_path.glob("env/lib/python*/site-packages/trl")
    (package / "trainer").mkdir()
    (package / "trainer" / "base_config.py").write_text("class Config:\n    only_there: int = 0\n")
    chosen = recipe.override(digit, "trainer.only_there=1")
    with pytest.raises(ConfigError, match=r"trainer\.only_there is no field"):
        preflight.check(chosen, local=True)
    assert "only_there" in preflight.trainer_fields(packages.of(str(python)))


def test_launching_elsewhere_asks_nothing_of_this_environment(digit: Recipe) -> None:
    preflight.check(replace(digit, reward=replace(digit.reward, functions=["only.there:f"])), local=False)


def test_a_reward_server_has_to_be_where_a_job_finds_it(digit: Recipe) -> None:
    for host in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0"):
        with pytest.raises(ConfigError, match="is the trainer's own machine when a Job asks there"):
            preflight.check_servers(recipe.override(digit, f"reward.functions=['http://{host}:9/']"), here=False)
    (words,) = preflight.check_servers(
        recipe.override(digit, "reward.functions=['http://nowhere.invalid/']"), here=False
    )
    assert words.startswith("seen from here, not from the trainer's Job: reward.functions[0] =")
