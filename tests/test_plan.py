import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certifi
import datasets
import pytest
from click.testing import CliRunner

import asyncgrpo
from emulator.jobs_state import parse_labels, parse_spec
from emulator.serve import Emulator
from jobs import launcher, sanity
from jobs import recipe as recipes
from jobs.bucket import BucketSettings
from jobs.errors import ConfigError
from jobs.launch import Launch, installing
from jobs.plan import derived, resolve
from jobs.preflight import check
from jobs.site import Site


def load(*overrides: str) -> Any:
    return resolve(recipes.load("sanity", None, overrides))


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    with Emulator() as emulator:
        yield emulator


def run(emulator: Emulator, *args: str, env: dict[str, str | None] | None = None) -> Any:
    return CliRunner().invoke(asyncgrpo.main, ["launch", *args], env={**emulator.environment(), **(env or {})})


@pytest.mark.parametrize(("rank", "served"), [(1, 1), (2, 8), (8, 8), (12, 16), (33, 64), (512, 512)])
def test_the_engines_serve_the_next_rank_there_is(rank: int, served: int) -> None:
    assert load(f"lora.r={rank}").replica.vllm["max_lora_rank"] == served


def test_a_rank_that_no_engine_serves() -> None:
    with pytest.raises(ConfigError, match=r"lora.r = 513: vLLM serves ranks up to 512"):
        load("lora.r=513")


@pytest.mark.parametrize("staleness", [0, 1, 4, 9])
def test_slots_follow_from_staleness(staleness: int) -> None:
    flags = load(f"trainer.max_staleness={staleness}").replica.vllm
    assert (flags["max_loras"], flags["max_cpu_loras"]) == (staleness + 2, 4 * (staleness + 2))


def test_what_a_recipe_says_itself_stays() -> None:
    flags = load("replica.vllm.max_loras=9", "replica.vllm.dtype=float16").replica.vllm
    assert (flags["max_loras"], flags["dtype"], flags["max_cpu_loras"]) == (9, "float16", 36)


def test_resolving_twice_changes_nothing() -> None:
    assert resolve(load()) == load()


def test_a02_too_few_slots_or_too_small_a_rank_are_named_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_loras = 5.*max_staleness = 4.*6"):
        check(load("replica.vllm.max_loras=5"), local=False)
    check(load("replica.vllm.max_loras=6"), local=False)
    with pytest.raises(ConfigError, match=r"12.*8"):
        check(load("lora.r=12", "replica.vllm.max_lora_rank=8"), local=False)


def test_values_that_follow() -> None:
    assert derived(load(), 2) | {"token_budget": 0} == {
        "trainer_processes": 2,
        "completions_per_step": 128,
        "prompts_per_step": 16.0,
        "max_inflight_tasks": 384,
        "max_staleness": 4,
        "max_loras": 6,
        "max_lora_rank": 1,
        "max_cpu_loras": 24,
        "max_model_len": 4096,
        "longest_prompt_tokens": 1096,
        "token_budget": 0,
        "engines": 2,
        "syncs": 125,
        "versions_served_at_once": 6,
        "lease_s": 600,
    }
    assert derived(load("trainer.max_inflight_tasks=-1"), 2)["max_inflight_tasks"] == 512
    assert derived(load("trainer.max_steps=-1"), 2)["syncs"] is None, "it ends by epochs"


def test_the_plan_of_the_published_run(emulator: Emulator) -> None:
    result = run(emulator, "sanity", "--dry-run", "--run", "first")
    assert result.exit_code == 0, result.output
    assert "--max-loras 6" in result.stdout and "h200x2" in result.stdout and "100.00" in result.stdout
    assert emulator.token not in result.output
    plan = json.loads(run(emulator, "sanity", "--dry-run", "--json").stdout)
    prices = {job["role"]: (job["count"], job["usd_per_hour"], job["usd_to_timeout"]) for job in plan["jobs"]}
    assert prices == {"trainer": (1, 10.0, 50.0), "replica": (2, 10.0, 50.0)}
    assert (plan["usd_per_hour"], plan["usd_to_timeout"]) == (20.0, 100.0)
    assert plan["jobs"][1]["ports"] == [8000]
    assert not list(emulator.runner.table.list(emulator.owner.name, [], {})), "nothing was started"


def test_the_plan_of_a_network_group(emulator: Emulator) -> None:
    name = "n" * 60
    group = ("sanity", "--dry-run", "--set", "jobs.network=group", "--set", "replica.engines=2", "--run", name)
    for job in json.loads(run(emulator, *group, "--json").stdout)["jobs"]:
        spec = {"command": ["x"], "dockerImage": "x", "network": {"group": job["network_group"]}}
        assert parse_spec(spec).network == {"group": job["network_group"], "aliases": []}
        assert job["network_group"].startswith("n" * 30) and job["ports"] == (
            [8000, 8001] if job["role"] == "replica" else []
        )
    assert f"network group  {'n' * 30}" in run(emulator, *group).stdout
    result = run(emulator, "sanity", "--dry-run", "--set", "jobs.network=vpn")
    assert result.exit_code == 2 and "expected one of 'exposed', 'group'" in result.output


def test_the_trainer_may_have_an_image_of_its_own(emulator: Emulator) -> None:
    plan = json.loads(run(emulator, "sanity", "--dry-run", "--json", "--set", "jobs.trainer_image=me/trl:1").stdout)
    assert {job["role"]: job["image"] for job in plan["jobs"]} == {
        "trainer": "me/trl:1",
        "replica": "vllm/vllm-openai:v0.31.0",
    }


def test_a_flavor_that_does_not_exist_is_refused_before_anything_starts(emulator: Emulator) -> None:
    result = run(emulator, "sanity", "--set", "jobs.replica_flavor=h100")
    assert result.exit_code == 2 and "jobs.replica_flavor = 'h100'" in result.output and "h200x8" in result.output


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.id=/nope/x", "model.id = '/nope/x': no such directory"),
        ("trainer.max_staleness=x", 'trainer.max_staleness = "x": expected a whole number'),
        ("replica.vllm.max_model_len=x", 'replica.vllm.max_model_len = "x": expected a whole number'),
        ("replica.vllm.tensor_parallel_size=x", 'replica.vllm.tensor_parallel_size = "x": expected a whole number'),
        ("replica.count=0", "replica.count = 0: expected a whole number of at least 1"),
    ],
)
def test_a_plan_of_what_cannot_be_is_one_message(emulator: Emulator, setting: str, words: str) -> None:
    result = run(emulator, "sanity", "--dry-run", "--set", setting)
    assert result.exit_code == 2 and words in result.output


def test_a_plan_needs_neither_token_nor_bucket(emulator: Emulator) -> None:
    nothing = dict.fromkeys(("HF_TOKEN", "ASYNCGRPO_BUCKET", "AWS_ACCESS_KEY_ID"))
    result = run(emulator, "sanity", "--dry-run", "--json", env={**nothing, "HF_HOME": "/nonexistent"})
    assert result.exit_code == 0 and json.loads(result.stdout)["usd_per_hour"] is None
    assert "HF_TOKEN is not set" in result.stderr


def test_a22_a_run_may_have_any_name_and_its_labels_are_valid(emulator: Emulator) -> None:
    for name in ("lr 4e-5, run #2", "n" * 130):
        result = run(emulator, "sanity", "--dry-run", "--json", "--run", name)
        plan = json.loads(result.stdout)
        assert f"run {name!r} is called {plan['run']}" in result.stderr
        labels = plan["jobs"][0]["labels"]
        assert labels["asyncgrpo-run"] == plan["run"] and len(plan["run"]) <= 63
        assert re.fullmatch("Qwen-Qwen2-5-Math-1-5B-[0-9a-f]{12}", labels["asyncgrpo-model"])
        assert parse_labels(labels) == labels


def test_the_answers_of_the_data_set_are_where_the_reward_looks() -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": "1+1?"}],
            "reward_model": {"ground_truth": "2", "style": "rule"},
            "x": 1,
        }
    ]
    found = sanity.with_answers(datasets.Dataset.from_list(rows))
    assert found.column_names == ["prompt", "answer"] and found[0]["answer"] == "2"
    assert found[0]["prompt"][0]["content"] == "1+1?"


def test_engines_that_need_more_gpus_than_the_flavor_has_are_refused(emulator: Emulator, tmp_path: Path) -> None:
    """As the Hub's Jobs are planned: the emulator's run on this machine, whatever their flavor."""
    hardware = Site.from_env(emulator.environment()).hub().list_jobs_hardware()
    site = Site("https://huggingface.co", "hf_x", "me", BucketSettings("s3://b", "https://s3.hf.co/me", "k", "s"))
    chosen = load("replica.vllm.tensor_parallel_size=4", f"model.id={tmp_path}")
    with pytest.raises(ConfigError, match=r"= 4: .* a replica has 1\. Choose a larger jobs\.replica_flavor"):
        launcher._for_machine(chosen, site, hardware)
    fitting = recipes.override(chosen, "jobs.replica_flavor=h200x4")
    assert launcher._for_machine(fitting, site, hardware).replica.engines == 1


def test_no_file_of_this_machine_is_named_to_jobs_of_the_hub(emulator: Emulator) -> None:
    bucket = BucketSettings("s3://b", "https://s3.hf.co/me", "k", "s", ca_file=certifi.where())
    far = Launch(Site("https://huggingface.co", "hf_x", "me", bucket), load(), "r", "vllm", None, 0)
    near = Launch(Site(emulator.endpoint, "hf_x", "me", bucket), load(), "r", "vllm", None, 0)
    assert "AWS_CA_BUNDLE" not in far.plans(Path("asyncgrpo.pyz"), "0")["trainer"].environment
    assert near.plans(None, "0")["trainer"].environment["AWS_CA_BUNDLE"] == certifi.where()


@pytest.mark.parametrize(("failures", "status"), [(0, 0), (3, 0), (4, 1)])
def test_a_registry_that_is_away_is_asked_again(tmp_path: Path, failures: int, status: int) -> None:
    python = f"""echo "$@" >> asked; [ "$1" = then ] && exit 0; [ $(grep -c pip asked) -gt {failures} ]"""
    for name, text in (("python3", python), ("sleep", 'echo "slept $1" >> asked')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    command = installing(["trl==1.16.0", "a[b]>=1"], ["python3", "then", "a b"])
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    asked = (tmp_path / "asked").read_text().splitlines()
    pip = "-m pip install --quiet --break-system-packages trl==1.16.0 a[b]>=1"
    slept = [line for line in asked if line.startswith("slept")]
    assert (done.returncode, asked.count(pip)) == (status, min(failures, 3) + 1)
    assert len(slept) == min(failures, 3) and slept == ["slept 5", "slept 30", "slept 120"][: len(slept)]
    assert (asked[-1] == "then a b") == (status == 0)
    assert ("bake an image" in done.stderr) == (status == 1)
