"""A reward server in the whole loop: asked by the trainer's Job with a token that nobody else gets to see."""

from pathlib import Path

import pytest

from jobs.reward_server import TOKEN
from tests.e2e.test_emulate import QUICK, emulate
from tests.test_reward_server import grading, requests

pytestmark = pytest.mark.e2e


def test_a_run_is_graded_by_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "rs-secret")
    with grading(token="rs-secret") as url:
        reward = [
            "--set",
            f"reward.functions=['jobs.rewards:digit', '{url}/digit']",
            "--set",
            "reward.weights=[0.5, 0.5]",
        ]
        status, summary, words = emulate(
            tmp_path, "digit", *QUICK, "--steps", "4", "--run", "graded", *reward, "--json"
        )
        assert status == 0 and summary is not None, words
        asked = [request for request in requests(url) if request["path"] == "/digit"]
    assert len(asked) >= 4 * 32 / 8 and {request["authorization"] for request in asked} == {"Bearer rs-secret"}
    assert all(len(request["body"]["completions"]) == len(request["body"]["prompts"]) == 8 for request in asked)
    assert summary["reward_last"] is not None and "reward errors" not in words
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"README.md", "adapter_model.safetensors"} <= {path.name for path in files}
    assert all(b"rs-secret" not in path.read_bytes() for path in files) and "rs-secret" not in words


def test_a_server_that_is_not_there_is_found_before_anything_starts(tmp_path: Path, free_port: int) -> None:
    reward = f"reward.functions=['http://127.0.0.1:{free_port}/score']"
    status, summary, words = emulate(tmp_path, "digit", "--set", reward, timeout_s=30)
    assert (status, summary) == (2, None) and not (tmp_path / "runs").exists()
    assert f"reward.functions[0] = 'http://127.0.0.1:{free_port}/score': nobody answers there" in words
