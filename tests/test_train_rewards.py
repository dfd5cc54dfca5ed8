"""Rewards in the real TRL: several with weights, plain, asynchronous and a server's, against the simulated engine."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.test_reward_server import grading
from tests.test_train import WAIT_S, Training, cache, engine, train  # noqa: F401 (fixtures)


async def shortness_later(completions: list[Any], **_: Any) -> list[float | None]:
    await asyncio.sleep(0)
    return [1 / (1 + len(completion[0]["content"])) for completion in completions]


def test_plain_asynchronous_and_served_rewards_add_up_by_their_weights(train: Callable[..., Training]) -> None:  # noqa: F811
    with grading() as url:
        functions = ["jobs.rewards:digit", f"{__name__}:shortness_later", f"{url}/digit"]
        training = train("trainer.max_steps=3", f"reward.functions={functions}", "reward.weights=[1.0, 0.5, 2.0]")
        assert training.process.wait(WAIT_S) == 0, training.log.read_text()[-4000:]
    names = [f"rewards/{name}" for name in ("digit", "shortness_later", f"{url.removeprefix('http://')}/digit")]
    steps = training.steps()
    assert len(steps) == 3
    for step in steps:
        digit, _, served = parts = [step[name] for name in names]
        assert step["reward"] == pytest.approx(sum(parts), abs=1e-4) and served == pytest.approx(2 * digit, abs=1e-4)
    assert any(step["reward_std"] > 0 for step in steps)
    assert "HTTP Request" not in training.log.read_text()


def test_a_file_of_ones_own_is_there_with_the_trainer(
    train: Callable[..., Training],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine_own.py").write_text(
        "import jobs.rewards\n\ndef double(**columns):\n    return [2 * x for x in jobs.rewards.digit(**columns)]\n"
    )
    training = train("trainer.max_steps=2", "reward.functions=['jobs.rewards:digit', 'mine_own:double']")
    Path("mine_own.py").unlink()
    assert training.process.wait(WAIT_S) == 0, training.log.read_text()[-4000:]
    assert all(
        step["rewards/double"] == pytest.approx(2 * step["rewards/digit"], abs=1e-4) for step in training.steps()
    )


def test_groups_are_scored_side_by_side(train: Callable[..., Training]) -> None:  # noqa: F811
    """The server answers none before the next one asks."""
    with grading() as url:
        training = train("trainer.max_steps=3", f"reward.functions=['{url}/pairs']")
        assert training.process.wait(WAIT_S) == 0, training.log.read_text()[-4000:]
    assert len(training.steps()) == 3
    assert [row for row in training.rows() if row.get("event") == "reward_error"] == []


def test_a_server_that_refuses_ends_the_run_with_the_fix(train: Callable[..., Training]) -> None:  # noqa: F811
    with grading(token="rs-secret") as url:
        training = train("trainer.max_steps=3", f"reward.functions=['{url}/digit']")
        assert training.process.wait(WAIT_S) == 2
    words = training.log.read_text()
    last = words.splitlines()[-1]
    assert last.startswith(f"error: reward.functions[0] = '{url}/digit': status 401") and "rs-secret" not in words
    assert last.endswith("set ASYNCGRPO_REWARD_TOKEN to a token that it takes.")


def test_a_killed_rollout_process_ends_the_run(train: Callable[..., Training]) -> None:  # noqa: F811
    training = train("trainer.max_steps=100000")
    training.wait_for(training.steps)
    (rollouts,) = training.children()
    os.kill(rollouts, signal.SIGKILL)
    assert training.process.wait(WAIT_S) == 1
    assert training.log.read_text().splitlines()[-1].endswith("the rollout process ended with status -9")
