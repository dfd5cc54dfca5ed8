import io
import re
from typing import Any

from jobs.launch import Glance
from jobs.live import PlainView, TableView, line, shown, view


def glance(step: int, elapsed_s: float, **progress: Any) -> Glance:
    replicas = [
        {"name": "0", "state": "ready", "adapters": [2, 3], "in_flight": 4, "tokens": 1000},
        {"name": "1", "state": "backfilling", "adapters": [], "in_flight": 0, "tokens": 0},
        {"name": "2", "state": "gone", "adapters": [1]},
    ]
    metrics = {"reward": 0.5, "ratio": 1.0001, "sample/staleness_mean": 1.5, "rollout/generated_tok_s": 2345.6}
    common = {
        "state": "training", "step": step, "max_steps": 11, "first_step_at": 100.0,
        "updated_at": 100.0 + 2 * (step - 1),
        "metrics": metrics, "proxy": {"replicas": replicas, "completions": {"parked": 2}},
    }  # fmt: skip
    return Glance(common | progress, {}, elapsed_s)


def test_what_is_shown() -> None:
    now = shown(glance(6, 42.0))
    assert (now.stage, now.step, now.max_steps, now.reward, now.parked) == ("training", 6, 11, 0.5, 2)
    assert now.left_s == 10.0  # 5 steps took 10 s, 5 are left
    assert [(row.name, row.state, row.version) for row in now.replicas] == [
        ("0", "ready", "v3"),
        ("1", "backfilling", "base"),
    ]
    assert (
        line(now)
        == "step 6/11  reward 0.500  ratio 1.0001  staleness 1.5  2,346 tokens/s  parked 2  0:v3 1:base  0:10 left"
    )


def test_rewards_that_raise_are_shown_with_their_words() -> None:
    now = shown(glance(6, 42.0, reward_errors=3, reward_error="m:f: KeyError: 'x'"))
    assert "reward errors 3 (m:f: KeyError: 'x')" in line(now)


def test_before_there_is_anything() -> None:
    now = shown(Glance({}, {}, 1.0))
    assert (now.stage, now.step, now.reward, now.left_s, now.replicas) == ("starting", 0, None, None, [])
    starting = shown(glance(0, 1.0, state="starting", first_step_at=None, metrics={}))
    assert starting.stage == "starting: 1 of 3 replicas ready"


def test_plain_lines_come_for_stages_the_first_and_the_last_step() -> None:
    stream = io.StringIO()
    with view(stream) as plain:
        assert isinstance(plain, PlainView)
        for step, state in (
            (0, "starting"),
            (0, "starting"),
            (1, "training"),
            (2, "training"),
            (11, "done"),
        ):
            plain.show(glance(step, 5.0, state=state))
    lines = [text.split("] ")[1].split("  ")[0] for text in stream.getvalue().splitlines()]
    assert lines == ["starting: 1 of 3 replicas ready", "step 1/11", "step 11/11", "done"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_table() -> None:
    stream = Terminal()
    with view(stream) as table:
        assert isinstance(table, TableView)
        table.show(glance(6, 3661.0))
    text = " ".join(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).split())
    assert "backfilling" in text and "1:01:01" in text and "reward 0.500" in text
