import asyncio
import json
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import journal, rewards
from jobs.errors import ConfigError
from jobs.math_check import Checker, boxed, normalized


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


def unusable(completions: list[Any], **_: Any) -> list[float | None]:
    raise ConfigError("the data set has no column `answer`")


def too_few(completions: list[Any], **_: Any) -> list[float | None]:
    return [1.0]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(journal.OUTPUT_DIR, str(tmp_path))
    return tmp_path / "metrics.jsonl"


@pytest.fixture(autouse=True)
def checker() -> Iterator[None]:
    yield
    rewards._checker.close()


def errors(told: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []


def test_digit_is_the_share_of_sevens() -> None:
    assert rewards.digit(completions=said("7777", "7a", "", "abc")) == [1.0, 0.5, 0.0, 0.0]
    assert rewards.digit(completions=["77", "x7"]) == [1.0, 0.5]


def test_add_wants_the_exact_answer() -> None:
    assert rewards.add(completions=said("12", "12 ", "3"), answer=["12", "12", "4"]) == [1.0, 0.0, 0.0]


def test_a_sample_that_raises_costs_only_itself_and_is_told(told: Path) -> None:
    guarded = rewards.guard(picky)
    assert guarded(completions=said("ab", "boom", "abc"), scale=[1.0, 1.0, 2.0]) == [2.0, None, 6.0]
    (line,) = errors(told)
    assert (line["event"], line["function"], line["count"]) == ("reward_error", "picky", 1)
    assert line["error"] == "RuntimeError: boom it is"


def test_a_coroutine_function_is_guarded_as_one(told: Path) -> None:
    from trl.trainer.utils import get_callable_name, is_async_callable

    guarded = rewards.guard(picky_later)
    assert is_async_callable(guarded) and get_callable_name(guarded) == "picky_later"
    assert not is_async_callable(rewards.guard(picky))
    assert asyncio.run(guarded(completions=said("ab", "boom"), scale=[1.0, 1.0])) == [2.0, None]
    assert errors(told)[0]["function"] == "picky_later"
    assert asyncio.run(rewards.guard(Stateful())(completions=said("a"))) == [1.0]


def test_a_guard_can_be_pickled_and_weighs() -> None:
    guarded = pickle.loads(pickle.dumps(rewards.guard(picky, weight=0.5)))
    assert guarded(completions=said("abcd"), scale=[1.0]) == [2.0]


def test_a_wrong_number_of_rewards_is_an_error_and_not_a_shift(told: Path) -> None:
    assert rewards.guard(too_few)(completions=said("a")) == [1.0]
    assert rewards.guard(too_few)(completions=said("a", "b")) == [1.0, 1.0]  # one by one it is right


def test_an_impossible_setting_ends_the_run() -> None:
    with pytest.raises(ConfigError, match="no column"):
        rewards.guard(unusable)(completions=said("a", "b"))


def test_many_errors_do_not_flood_the_journal(told: Path) -> None:
    guarded = rewards.guard(picky)
    for _ in range(100):
        guarded(completions=said("boom"), scale=[1.0])
    assert [line["count"] for line in errors(told)] == [*range(1, 11), 16, 32, 64]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("jobs.rewards", "expected module:function"),
        ("no.such:thing", "ModuleNotFoundError"),
        ("jobs.rewards:digits", "has no digits. It has:.*digit"),
        (":f", "expected module:function"),
    ],
)
def test_what_cannot_be_resolved_is_named(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        rewards.resolve(name, "reward.functions[0]")
    assert str(caught.value).startswith(f"reward.functions[0] = {name!r}")


def test_resolve_gives_the_function() -> None:
    assert rewards.resolve("jobs.rewards:digit") is rewards.digit


# Three right, three wrong, and one gold answer that nobody can parse.
ANSWERS = [
    (r"so it is \boxed{\frac{1}{2}}.", "0.5", 1.0),
    (r"\boxed{3} no: \boxed{1000}", "1,000", 1.0),
    (r"<think>hm</think> $\boxed{x^2+1}$", r"$1+x^2$", 1.0),
    (r"\boxed{3}", "4", 0.0),
    ("it is 5", "5", 0.0),
    (r"<think>maybe \boxed{5}", "5", 0.0),
    (r"\boxed{4}", "no formula at all", None),
]


def test_math_in_a_worker_thread_is_as_in_the_main_thread() -> None:
    texts, golds, right = zip(*ANSWERS, strict=True)
    scored: list[Any] = []
    worker = threading.Thread(target=lambda: scored.extend(rewards.math(completions=said(*texts), answer=list(golds))))
    worker.start()
    worker.join()
    assert scored == list(right)
    assert rewards.math(completions=said(*texts), answer=list(golds)) == list(right)


def test_math_reads_a_whole_solution_and_wants_a_gold_column() -> None:
    assert rewards.math(completions=said(r"\boxed{12}"), solution=[r"Since $3 \cdot 4$ is \boxed{12}."]) == [1.0]
    with pytest.raises(ConfigError, match="`answer` or `solution`"):
        rewards.math(completions=said("1"))


def test_math_that_takes_too_long_is_an_error_and_ends_its_process() -> None:
    checker = Checker(deadline_s=0.01)  # less than its start takes
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"more than 0\.01 s"):
        checker.score("1", "1")
    assert time.monotonic() - begun < 5


def test_math_outlives_its_process() -> None:
    checker = Checker()
    assert checker.score("2", "2") == 1.0
    assert checker._child is not None
    checker._child.kill()
    checker._child.wait()
    assert checker.score("2", "3") == 0.0
    checker.close()


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed{1} and \boxed{\frac{2}{3}}", r"\frac{2}{3}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} then \boxed{\frac{2", None),
        ("none", None),
    ],
)
def test_the_last_box_counts(text: str, content: str | None) -> None:
    assert boxed(text) == content


def test_what_never_changes_the_value_is_taken_away() -> None:
    assert normalized(r"$\left( \dfrac{1}{2} \right)$.") == r"( \frac{1}{2} )"
    assert normalized(r"\leftarrow") == r"\leftarrow"
