import asyncio
import json
import math
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from jobs import journal, scoring
from jobs.errors import ConfigError, RunFailed
from jobs.recipe import Reward
from jobs.scoring import Scoring, from_settings


def said(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def picky(completions: list[Any], scale: list[float], **_: Any) -> list[float | None]:
    if any(c[0]["content"] == "boom" for c in completions):
        raise RuntimeError("boom it is")
    return [len(c[0]["content"]) * s for c, s in zip(completions, scale, strict=True)]


async def picky_later(completions: list[Any], **columns: Any) -> list[float | None]:
    await asyncio.sleep(0)
    return picky(completions, **columns)


class Stateful:
    async def __call__(self, completions: list[Any], **_: Any) -> list[float | None]:
        return [1.0 for _ in completions]


def one_each(completions: list[Any], **_: Any) -> list[float | None]:
    return [1.0 for _ in completions]


def undecided(completions: list[Any], **_: Any) -> list[float | None]:
    return [None for _ in completions]


def unusable(completions: list[Any], **_: Any) -> list[float | None]:
    raise ConfigError("the data set has no column `answer`")


def too_few(completions: list[Any], **_: Any) -> list[float | None]:
    return [1.0]


def infinite(completions: list[Any], **_: Any) -> list[float | None]:
    return [math.inf if c[0]["content"] == "boom" else 1.0 for c in completions]


@pytest.fixture(autouse=True)
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(journal.OUTPUT_DIR, str(tmp_path))
    return tmp_path / "metrics.jsonl"


def errors(told: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []


def rewards(scores: Scoring, *texts: str, **columns: Any) -> list[list[float | None]]:
    """What TRL gets: it calls all functions at once, with the very same lists."""
    columns = {"completions": said(*texts), "scale": [1.0] * len(texts), **columns}

    async def call() -> list[list[float | None]]:
        return await asyncio.gather(*(column(**columns) for column in scores.columns))

    found = asyncio.run(call())
    assert scores._groups == {}
    return found


@pytest.mark.parametrize("function", [picky, picky_later])
def test_a_sample_that_raises_costs_only_itself_and_is_told(told: Path, function: Any) -> None:
    assert rewards(Scoring([function], [1.0]), "ab", "boom", "abc", scale=[1.0, 1.0, 2.0]) == [[2.0, None, 6.0]]
    (line,) = errors(told)
    assert (line["event"], line["function"], line["count"]) == ("reward_error", function.__name__, 1)
    assert line["error"] == "RuntimeError: boom it is"


def test_a_sample_on_which_one_function_fails_is_scored_by_none() -> None:
    """TRL would take what failed for 0 and add the rest: the sample would look worse than its group."""
    both = Scoring([one_each, picky_later], [0.5, 2.0])
    assert rewards(both, "ab", "boom", "abc") == [[0.5, None, 0.5], [4.0, None, 6.0]]


def test_what_a_function_leaves_open_others_may_score() -> None:
    assert rewards(Scoring([undecided, one_each], [1.0, 1.0]), "a", "b") == [[None, None], [1.0, 1.0]]


def test_trl_sees_coroutine_functions_by_their_own_names() -> None:
    from trl.trainer.utils import get_callable_name, is_async_callable

    columns = Scoring([picky, picky_later, Stateful()], [1.0] * 3).columns
    assert all(is_async_callable(column) for column in columns)
    assert [get_callable_name(column) for column in columns] == ["picky", "picky_later", "Stateful"]
    assert [column.waits for column in columns] == [False, True, True]


def test_what_trl_is_given_can_be_pickled_and_weighs() -> None:
    columns = pickle.loads(pickle.dumps(Scoring([picky, one_each], [0.5, 3.0]).columns))
    assert columns[0]._scoring is columns[1]._scoring
    assert rewards(columns[0]._scoring, "abcd") == [[2.0], [3.0]]


def test_a_plain_function_is_called_once_at_a_time_outside_the_loop() -> None:
    seen: list[tuple[int, int]] = []
    inside = threading.Semaphore(0)

    def watched(completions: list[Any], **_: Any) -> list[float | None]:
        inside.release()
        seen.append((inside._value, threading.get_ident()))
        inside.acquire()
        return [1.0 for _ in completions]

    async def main() -> None:
        (column,) = Scoring([watched], [1.0]).columns
        await asyncio.gather(*(column(completions=said("a")) for _ in range(20)))

    asyncio.run(main())
    assert len(seen) == 20 and all(count == 1 and ident != threading.get_ident() for count, ident in seen)


def test_a_wrong_number_of_rewards_is_an_error_and_not_a_shift(told: Path) -> None:
    assert rewards(Scoring([too_few], [1.0]), "a") == [[1.0]]
    assert rewards(Scoring([too_few], [1.0]), "a", "b") == [[1.0, 1.0]]  # one by one it is right


def test_a_reward_that_is_no_finite_number_is_an_error(told: Path) -> None:
    assert rewards(Scoring([infinite], [1.0]), "a", "boom") == [[1.0, None]]
    assert errors(told)[0]["error"] == "ValueError: returned inf: a reward is a finite number, or None"


def test_an_impossible_setting_ends_the_run() -> None:
    with pytest.raises(ConfigError, match="no column"):
        rewards(Scoring([unusable], [1.0]), "a", "b")


def test_many_errors_do_not_flood_the_journal_and_are_all_counted(told: Path) -> None:
    scores = Scoring([picky], [1.0])
    for _ in range(100):
        rewards(scores, "boom", "a")
    assert [line["count"] for line in errors(told)] == [*[1] * 10, 10, 20, 40]


def test_a_reward_that_always_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MOST_FAILED_IN_A_ROW", 4)
    scores = Scoring([picky], [1.0])
    assert rewards(scores, "boom", "boom", "boom") == [[None] * 3]
    assert rewards(scores, "fine") == [[4.0]]
    assert rewards(scores, "boom", "boom", "boom") == [[None] * 3]
    with pytest.raises(RunFailed, match=r"reward picky: failed for 4 samples in a row.*RuntimeError: boom it is"):
        rewards(scores, "boom", "boom")


def test_functions_of_a_recipe() -> None:
    found = from_settings(Reward(["jobs.rewards:digit", "http://127.0.0.1:9/score"], [1.0, 0.5], timeout_s=7))
    assert [column.__name__ for column in found.columns] == ["digit", "127.0.0.1:9/score"]
    with pytest.raises(ConfigError, match=r"reward\.functions\[1\] = 'nope'"):
        from_settings(Reward(["jobs.rewards:digit", "nope"]))
