"""The judge, by tables of answers."""

from typing import Any

import pytest

from jobs.proof import PROMPT, Answer, Position, Proof, ProofError, distance, judge, parse, request

BASE: Answer = (Position("1", {"1": -0.5, "2": -1.5, "3": -2.5}), Position("4", {"4": -0.7, "5": -1.0}))


def moved(by: float, answer: Answer = BASE) -> Answer:
    """The same tokens, the likeliest less likely by so much."""
    return tuple(Position(p.token, {**p.logprobs, p.token: p.logprobs[p.token] - by}) for p in answer)


def proof(by: float) -> Proof:
    return Proof(moved(by), BASE)


def completion(**logprobs: Any) -> dict[str, Any]:
    whole = {
        "tokens": ["token_id:1", "token_id:4"],
        "token_logprobs": [-0.5, -0.7],
        "top_logprobs": [{"token_id:1": -0.5, "token_id:2": -1.5}, {"token_id:4": -0.7}],
    }
    return {"choices": [{"finish_reason": "length", "logprobs": whole | logprobs}]}


def test_the_request_fits_any_model() -> None:
    body = request("run.1.v3")
    assert body["model"] == "run.1.v3"
    assert body["temperature"] == 0
    assert max(PROMPT) < 96
    assert len(PROMPT) + body["max_tokens"] <= 32


def test_an_answer_is_read() -> None:
    answer = parse(completion())
    assert answer[0] == Position("token_id:1", {"token_id:1": -0.5, "token_id:2": -1.5})
    assert [position.token for position in answer] == ["token_id:1", "token_id:4"]


@pytest.mark.parametrize(
    "body",
    [
        None,
        {},
        {"choices": []},
        {"choices": [{"finish_reason": "length", "logprobs": None}]},
        completion(token_logprobs=[-0.5]),
        completion(top_logprobs=[None, None]),
        completion(tokens=[], token_logprobs=[], top_logprobs=[]),
        {"choices": [{**completion()["choices"][0], "finish_reason": "abort"}]},
    ],
)
def test_what_is_no_answer(body: Any) -> None:
    with pytest.raises(ProofError):
        parse(body)


def test_distance_is_symmetric_and_sees_the_largest_difference() -> None:
    assert distance(BASE, BASE) == 0
    assert distance(BASE, moved(0.25)) == distance(moved(0.25), BASE) == pytest.approx(0.25)


def test_a_token_that_one_answer_does_not_list_is_below_its_last() -> None:
    a = (Position("1", {"1": -0.1, "2": -3.0}),)
    b = (Position("9", {"9": -0.2, "2": -2.0}),)
    assert distance(a, b) == pytest.approx(2.8)  # token 9: -0.2 against at most -3.0


def test_positions_behind_different_choices_are_not_compared() -> None:
    a = (Position("1", {"1": -1.0, "2": -1.0}), Position("3", {"3": 0.0}))
    b = (Position("2", {"1": -1.0, "2": -1.0}), Position("4", {"4": 0.0}))
    assert distance(a, b) == 0


@pytest.mark.parametrize(
    ("effect", "others", "strength", "dtype", "words"),
    [
        # The adapter does what it should.
        (0.2, [], 0.3, "torch.float32", None),
        (0.2, [0.2], 0.3, "torch.float32", None),
        (2.0, [2.1], 3.0, "torch.bfloat16", None),
        # v1: lora_B is zero.
        (0.0, [], 0.0, "torch.float32", None),
        (0.0, [0.0], 0.0, "torch.bfloat16", None),
        (1e-3, [], 0.0, "torch.float32", None),
        (0.2, [], 0.0, "torch.bfloat16", None),
        (0.2, [], 0.0, "torch.float32", "the adapter is zero and the canary 0.2 from the base model's"),
        # The base model is served: with one engine, too.
        (0.0, [], 0.3, "torch.float32", "bit for bit"),
        (0.0, [], 0.3, "torch.bfloat16", "bit for bit"),
        (1e-3, [], 0.6, "torch.float32", "within 0.005 of the base model's"),
        (0.1, [], 40.0, "torch.bfloat16", "within 0.3 of the base model's"),
        # Too weak to show: a first step with a tiny learning rate.
        (0.0, [], 5e-5, "torch.float32", None),
        (0.0, [], 2e-2, "torch.bfloat16", None),
        (0.05, [0.05], 0.03, "torch.bfloat16", None),
        # Two right answers that rounding has moved apart.
        (1e-4, [4e-3], 1e-3, "torch.float32", None),
        (0.01, [0.4], 0.3, "torch.bfloat16", None),
        # Too weak for one engine to tell, but another shows it.
        (0.05, [1.2], 1.0, "torch.bfloat16", "1.1 from the other replicas' and 0.05 from the base model's"),
        (1.2, [0.05], 1.0, "torch.bfloat16", None),
        # An unknown dtype is taken for the coarsest.
        (0.05, [0.05], 0.5, "torch.float8_e4m3fn", None),
    ],
)
def test_the_judge(effect: float, others: list[float], strength: float, dtype: str, words: str | None) -> None:
    verdict = judge(proof(effect), [proof(by) for by in others], strength, dtype)
    assert verdict is None if words is None else words in (verdict or "believed")


def test_other_weights_than_the_other_replicas_have_are_found() -> None:
    other = Proof((Position("2", {"1": -3.0, "2": -0.1, "3": -2.5}),), BASE)
    assert "from the other replicas'" in (judge(proof(0.4), [other], 1.0, "float32") or "")
