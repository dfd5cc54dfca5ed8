"""The whole loop through the command line: the real one once, the simulated engine where only plumbing counts."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from jobs import rewards, tiny
from jobs.summary import FIELDS
from tests.conftest import started
from tests.engines import engine_environ, running, vllm_command

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = ROOT / "dist" / "asyncgrpo.pyz"
PROGRAM = [sys.executable, str(ARCHIVE if ARCHIVE.exists() else ROOT / "asyncgrpo.py")]
QUICK = ["--engine", "sim", "--set", "replica.count=2"]

pytestmark = pytest.mark.e2e


def emulate(folder: Path, *arguments: str, timeout_s: float = 240) -> tuple[int, dict[str, Any] | None, str]:
    """Exit status, the summary on stdout if there is any, and stderr."""
    done = subprocess.run(
        [*PROGRAM, "emulate", *arguments], cwd=folder, capture_output=True, text=True, timeout=timeout_s
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


@pytest.fixture(scope="module")
def digit(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, str]:
    """One real run: TRL, PEFT, two vLLM servers, the bucket, Jobs."""
    folder = tmp_path_factory.mktemp("digit")
    status, summary, words = emulate(folder, "digit", "--run", "real", "--json")
    assert status == 0 and summary is not None, words
    return summary, folder / "runs" / "real", words


def test_the_reward_climbs(digit: tuple[dict[str, Any], Path, str]) -> None:
    summary, _, _ = digit
    assert (summary["engine"], summary["replicas"], summary["steps"]) == ("vllm", 2, 120)
    assert summary["reward_first"] <= 0.1 and summary["reward_last"] >= 0.8
    assert 0.8 <= summary["ratio_min"] <= 1 <= summary["ratio_max"] <= 1.2


def test_nothing_is_lost_and_nothing_is_left(digit: tuple[dict[str, Any], Path, str]) -> None:
    summary, _, _ = digit
    assert summary["rollouts"] > 120 * 32 and summary["rollouts_lost"] == 0
    assert (summary["orphans"], summary["replica_deaths"], summary["trainer_resumes"]) == (0, 0, 0)
    assert summary["generation_stall_s"] == 0
    assert summary["adapters_published"] == 121
    assert set(summary["replica_tokens"]) == {"0", "1"}


def test_what_a_run_leaves(digit: tuple[dict[str, Any], Path, str]) -> None:
    summary, folder, words = digit
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert set(FIELDS) <= set(summary)
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((folder / "logs").glob("*.log"))) == 3
    assert str(Path("runs", "real", "summary.json")) in words and "step 120/120" in words


def test_the_adapter_is_what_was_trained_in_transformers_too(digit: tuple[dict[str, Any], Path, str]) -> None:
    import torch
    from huggingface_hub import ModelCard
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    summary, folder, _ = digit
    card = ModelCard.load(folder / "final" / "README.md")
    assert card.data.library_name == "peft" and f"| {summary['reward_last']:.4g} |" in card.text
    base = str(tiny.build("digit"))
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True) for row in some_prompts()]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder / "final"))
    torch.manual_seed(0)
    ids = [prompt if isinstance(prompt, list) else prompt["input_ids"] for prompt in prompts]
    texts = []
    for each in ids:
        tokens = model.generate(torch.tensor([each]), do_sample=True, max_new_tokens=8, top_k=0)
        texts.append(tokenizer.decode(tokens[0, len(each) :], skip_special_tokens=True))
    assert mean(rewards.digit(texts)) >= 0.8, texts


def test_the_adapter_is_what_was_trained_in_vllm_too(
    digit: tuple[dict[str, Any], Path, str], tmp_path: Path, free_port: int
) -> None:
    _, folder, _ = digit
    command = vllm_command(free_port, str(tiny.build("digit")), "--lora-modules", f"final={folder / 'final'}")
    with running(command, engine_environ(tmp_path, {}), free_port, tmp_path / "vllm.log") as engine:
        asked = {"messages": some_prompts()[0]["prompt"], "max_tokens": 8, "n": 16, "seed": 1, "temperature": 1}

        def sevens(model: str) -> float:
            answer = engine.post("/v1/chat/completions", json={**asked, "model": model}).json()
            return mean(rewards.digit([choice["message"]["content"] for choice in answer["choices"]]))

        assert sevens("final") >= 0.8 and sevens("tiny") <= 0.2


def some_prompts() -> list[dict[str, Any]]:
    return [dict(row) for row in tiny.digit_prompts().select(range(16))]


def test_a_killed_replica_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    fault = ["--faults", "kill replica[1] at step 3"]
    status, summary, words = emulate(tmp_path, "digit", *QUICK, "--steps", "60", *fault, "--json")
    assert status == 0 and summary is not None, words
    assert (summary["steps"], summary["rollouts_lost"], summary["orphans"]) == (60, 0, 0)
    assert summary["replica_deaths"] >= 1 and summary["replica_rejoins"] >= 1


def test_a_trainer_that_is_preempted_twice_makes_all_its_steps(tmp_path: Path) -> None:
    """By SIGTERM, after which it saves and leaves, and by SIGKILL, after which it goes on from an older checkpoint."""
    fault = ["--faults", "preempt trainer at step 5; kill trainer at step 14", "--set", "trainer.save_steps=4"]
    status, summary, words = emulate(tmp_path, "digit", *QUICK, "--steps", "24", *fault, "--json")
    assert status == 0 and summary is not None, words
    assert (summary["steps"], summary["attempt"], summary["trainer_resumes"], summary["orphans"]) == (24, 3, 2, 0)
    # All attempts count: each began no earlier than with the version after its checkpoint's.
    assert summary["adapters_published"] >= 25 and summary["rollouts"] > 24 * 32 and summary["rollouts_lost"] == 0


def test_a_killed_proxy_is_a_pause_and_its_counts_stay(tmp_path: Path) -> None:
    fault = ["--faults", "kill proxy at step 6; kill proxy at step 40"]
    status, summary, words = emulate(tmp_path, "digit", *QUICK, "--steps", "60", *fault, "--json")
    assert status == 0 and summary is not None, words
    assert (summary["steps"], summary["adapters_published"], summary["rollouts_lost"]) == (60, 61, 0)
    assert summary["rollouts"] > 60 * 32 and summary["orphans"] == summary["generation_stall_s"] == 0


def test_a_bucket_that_lags_throttles_and_goes_away_stalls_no_sync(tmp_path: Path) -> None:
    fault = ["--faults", "bucket lag 2.5s; bucket 503 5%; bucket away 5s at step 10"]
    status, summary, words = emulate(tmp_path, "digit", *QUICK, "--steps", "20", *fault, "--json")
    assert status == 0 and summary is not None, words
    assert (summary["steps"], summary["rollouts_lost"], summary["orphans"]) == (20, 0, 0)
    assert summary["weight_sync_s_p50"] <= 0.3 and summary["generation_stall_s"] == 0


def test_a_torn_publish_a_hung_proxy_and_a_hub_that_denies_what_it_did(tmp_path: Path) -> None:
    fault = ["--faults", "tear publish v7; hang proxy 300s at step 10; jobs 500-after-create"]
    status, summary, words = emulate(tmp_path, "digit", *QUICK, "--steps", "20", *fault, "--json")
    assert status == 0 and summary is not None, words
    assert (summary["steps"], summary["adapters_published"], summary["rollouts_lost"]) == (20, 21, 0)
    assert summary["orphans"] == summary["replica_deaths"] == 0 and summary["faults"] == fault[1]
    told = "".join(log.read_text() for log in tmp_path.glob("runs/*/logs/*.log"))
    assert told.count("the proxy ended with status -9") == 2 and "the proxy has been silent for 30 s" in told


def test_interrupting_leaves_nothing(tmp_path: Path) -> None:
    command = [*PROGRAM, "emulate", "digit", *QUICK, "--run", "cut"]
    running = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("runs/cut/logs/*.log")):
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, words = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted" in words
    assert started() == {}


def test_killing_the_emulator_leaves_nothing(tmp_path: Path) -> None:
    command = [*PROGRAM, "emulate", "digit", *QUICK, "--run", "dead"]
    running = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("runs/dead/logs/*.log"))) < 3:
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.05)
    running.kill()
    running.wait()
    while started():
        assert time.monotonic() < deadline, started()
        time.sleep(0.05)


WRONG = {
    ("nope",): "recipe 'nope' is unknown",
    ("bad.toml",): "bad.toml is not TOML",
    ("digit", "--set", "trainer.learnig_rate=1"): "did you mean learning_rate",
    ("digit", "--set", "replica.cuont=1"): "did you mean count",
    ("digit", "--replicas", "0"): "at least 1 is needed",
    ("digit", "--steps", "0"): "at least 1 is needed",
    ("digit", "--set", "lora.r=9"): "greater than max_lora_rank 8",
    ("digit", "--set", "replica.vllm.max_loras=5"): "max_loras = 5",
    ("digit", "--set", "reward.functions=['no.module:f']"): "no.module",
    ("digit", "--run", "!"): "1 to 63 characters",
    ("digit", "--faults", "explode"): "is unknown; nearest",
    ("digit", "--bucket", "ftp://x"): "--bucket ftp://x",
    ("digit", "--config", "missing.toml"): "missing.toml",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_bad_input_gets_one_message_and_starts_nothing(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "bad.toml").write_text("[model\n")
    status, summary, words = emulate(tmp_path, *arguments, timeout_s=30)
    assert (status, summary) == (2, None)
    assert WRONG[arguments] in words and "Traceback" not in words
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_serve_prints_the_environment_for_clients(tmp_path: Path) -> None:
    running = subprocess.Popen([*PROGRAM, "emulate", "--serve"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    lines = dict(running.stdout.readline().strip().split("=", 1) for _ in range(7))
    try:
        from huggingface_hub import HfApi

        assert {"HF_ENDPOINT", "HF_TOKEN", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "ASYNCGRPO_BUCKET"} <= set(lines)
        assert HfApi(endpoint=lines["HF_ENDPOINT"], token=lines["HF_TOKEN"]).whoami()["name"] == "local"
    finally:
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 0
        running.stdout.close()


def test_help_of_every_command_has_an_example() -> None:
    def helps(*command: str) -> str:
        done = subprocess.run([*PROGRAM, *command, "--help"], capture_output=True, text=True, env=dict(os.environ))
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = helps().split("Commands:")[1].split()
    for command in ("emulate", "role", "recipes"):
        assert command in listed
        assert "Example" in helps(command)
    for role in ("trainer", "replica", "proxy"):
        assert "Example" in helps("role", role)
