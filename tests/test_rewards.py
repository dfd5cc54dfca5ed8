import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jobs import rewards
from jobs.errors import ConfigError
from jobs.math_check import Checker, boxed, normalized


def said(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.fixture(autouse=True)
def checker() -> Iterator[None]:
    yield
    rewards._checker.close()


def test_digit_is_the_share_of_sevens() -> None:
    assert rewards.digit(completions=said("7777", "7a", "", "abc")) == [1.0, 0.5, 0.0, 0.0]
    assert rewards.digit(completions=["77", "x7"]) == [1.0, 0.5]


def test_add_wants_the_exact_answer() -> None:
    assert rewards.add(completions=said("12", "12 ", "3"), answer=["12", "12", "4"]) == [1.0, 0.0, 0.0]


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
