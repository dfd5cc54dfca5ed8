"""Answers are compared token by token, and their logprobs up to the first that differs."""

from typing import Any

from bench.same import Comparison, compare


def answer(tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}


def test_logprobs_count_as_far_as_tokens_are_equal() -> None:
    ours = [answer([1, 2, 3], [-1.0, -2.0, -3.0]), answer([1, 2, 3], [-1.0, -2.0, -3.0]), answer([7], [-1.0])]
    theirs = [answer([1, 2, 3], [-1.0, -2.0, -3.5]), answer([1, 4, 3], [-1.0005, -9.0, -9.0]), answer([8], [-2.0])]
    assert compare(ours, theirs) == Comparison(answers=3, equal_tokens=1, compared=4, beyond=1, largest=0.5)


def test_equal_answers() -> None:
    same = [answer([1, 2], [-1.0, -2.0])] * 2
    assert compare(same, same) == Comparison(answers=2, equal_tokens=2, compared=4, beyond=0, largest=0.0)
