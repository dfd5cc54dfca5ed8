"""Completions for tokens alone: which they are, and that a real vLLM's own answer says the same."""

import asyncio
import contextlib
import json
import math
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from jobs import tokens
from jobs.bucket import Bucket
from jobs.http import KEY_HEADER
from jobs.tiny import build
from tests.adapters import write_adapter
from tests.conftest import new_bucket
from tests.engines import KEY, Engine, engine_environ, publish, running, vllm_command

PLAIN: dict[str, Any] = {
    "model": "tiny",
    "prompt": [5, 6, 7],
    "max_tokens": 8,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "repetition_penalty": 1.0,
    "n": 1,
    "return_token_ids": True,
    "logprobs": 0,
    "seed": 2**62,
}
"""What TRL 1.16 asks for."""
WIRE = "run.1.v1"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"min_p": 0.1}, True),
        ({"stream": False, "n": None, "ignore_eos": True}, True),
        ({"stream": True}, False),
        ({"n": 2}, False),
        ({"n": True}, False),
        ({"logprobs": 1}, False),
        ({"logprobs": False}, False),
        ({"logprobs": None}, False),
        ({"return_token_ids": False}, False),
        ({"echo": True}, False),
        ({"stop": ["x"]}, False),
        ({"user": "a"}, False),
        ({"prompt": "text"}, False),
        ({"prompt": [[5, 6]]}, False),
        ({"prompt": []}, False),
        ({"prompt": [5, -1]}, False),
        ({"prompt": [5, True]}, False),
        ({"max_tokens": 0}, False),
        ({"max_tokens": None}, False),
        ({"max_tokens": 1.5}, False),
        ({"model": None}, False),
    ],
)
def test_which_requests_are_for_tokens_alone(change: dict[str, Any], expected: bool) -> None:
    assert tokens.plain({**PLAIN, **change}) is expected


@pytest.mark.parametrize("missing", ["model", "prompt", "max_tokens", "logprobs", "return_token_ids"])
def test_what_they_must_say(missing: str) -> None:
    assert not tokens.plain({name: value for name, value in PLAIN.items() if name != missing})


@pytest.mark.parametrize(("max_model_len", "expected"), [(10, False), (11, True)])
def test_prompt_and_completion_must_fit(max_model_len: int, expected: bool) -> None:
    assert tokens.fits(PLAIN, max_model_len) is expected


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"\xff"])
def test_a_body_that_is_no_request_is_vllms_business(body: bytes) -> None:
    assert tokens.read(body, None, True) is None


def test_minus_infinity_is_said_as_vllm_says_it() -> None:
    flat = SimpleNamespace(logprobs=[-0.5, -math.inf], start_indices=[0, 1])
    choice = SimpleNamespace(token_ids=[1, 2], logprobs=flat, finish_reason="length", stop_reason=None)
    ask = tokens.Ask("tiny", [5], 2, {}, None)
    answer = json.loads(tokens.answer(ask, "id", SimpleNamespace(outputs=[choice]), None))
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -9999.0]


@pytest.mark.parametrize(
    ("model", "request_seeds", "expected"), [(WIRE, False, None), (WIRE, True, 2**62), ("tiny", False, 2**62)]
)
def test_the_seed_of_a_completion_by_an_adapter_is_used_on_request(
    model: str, request_seeds: bool, expected: int | None
) -> None:
    models = SimpleNamespace(lora_requests={WIRE: object()}, is_base_model=lambda name: name == "tiny")
    state = SimpleNamespace(
        engine_client=SimpleNamespace(errored=False),
        openai_serving_models=models,
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(max_model_len=256)),
    )
    ask = tokens.read(json.dumps({**PLAIN, "model": model}).encode(), state, request_seeds)
    assert ask is not None and ask.sampling.get("seed") == expected


@pytest.fixture(scope="module")
def vllm(moto_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder, environ = tmp_path_factory.mktemp("vllm"), new_bucket(moto_endpoint).environ
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    command = vllm_command(port, str(build("digit")), "--middleware", "jobs.middleware.ReplicaMiddleware")
    variables = {**engine_environ(folder / "store", environ), "ASYNCGRPO_REQUEST_SEEDS": "1"}
    with running(command, variables, port, folder / "log") as engine:
        where = publish(Bucket.from_env(environ), write_adapter(folder / "adapter", scale=0.5), WIRE)
        assert engine.post("/v1/load_lora_adapter", {"lora_name": WIRE, "lora_path": where}).status_code == 200
        yield engine


def both(engine: Engine, **change: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer for tokens alone, and vLLM's own to the same request (made another by a member without effect)."""
    asked = {**PLAIN, **change}
    answers = [engine.post("/v1/completions", each) for each in (asked, {**asked, "user": "a"})]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    ours, theirs = (answer.json() for answer in answers)
    assert ours["choices"][0]["logprobs"]["top_logprobs"] is None, "not answered by jobs.tokens"
    assert theirs["choices"][0]["logprobs"]["top_logprobs"]
    return ours, theirs


@pytest.mark.e2e
@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.0},
        {"seed": 11},
        {"model": WIRE, "temperature": 0.0},
        {"model": WIRE, "seed": 12, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2},
        {"seed": 13, "max_tokens": 200},  # long enough to end by itself
    ],
)
def test_the_answer_is_vllms_own(vllm: Engine, change: dict[str, Any]) -> None:
    ours, theirs = both(vllm, **change)
    mine, own = ours["choices"][0], theirs["choices"][0]
    for name in ("index", "text", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids"):
        assert mine[name] == own[name], name
    assert mine["logprobs"]["token_logprobs"] == pytest.approx(own["logprobs"]["token_logprobs"], abs=1e-5)
    assert len(mine["logprobs"]["tokens"]) == len(mine["token_ids"])
    assert (ours["model"], ours["object"]) == (theirs["model"], theirs["object"])
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert ours["usage"][name] == theirs["usage"][name]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model": "run.1.v9"}, 404, "does not exist"),
        ({"max_tokens": 254}, 400, "maximum"),
        ({"temperature": -1.0}, 400, "temperature"),
        ({"prompt": [5, 10**6]}, 400, "vocab"),
    ],
)
def test_errors_are_vllms_own(vllm: Engine, change: dict[str, Any], status: int, words: str) -> None:
    answer = vllm.post("/v1/completions", {**PLAIN, **change})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)
    assert words in answer.text


@pytest.mark.e2e
def test_completions_side_by_side_are_each_their_own(vllm: Engine) -> None:
    async def main() -> list[Any]:
        def ask(seed: int) -> Any:
            return vllm.post("/v1/completions", {**PLAIN, "seed": seed, "max_tokens": 32}).json()["choices"][0]

        return await asyncio.gather(*(asyncio.to_thread(ask, seed) for seed in [1, 2, 3, 4] * 2))

    answers = asyncio.run(main())
    assert [each["token_ids"] for each in answers[:4]] == [each["token_ids"] for each in answers[4:]]
    assert len({tuple(each["token_ids"]) for each in answers}) == 4


@pytest.mark.e2e
def test_the_engine_drops_what_nobody_waits_for(vllm: Engine) -> None:
    def running_now() -> float:
        lines = vllm.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))

    with contextlib.suppress(requests.exceptions.ReadTimeout):
        for _ in range(8):
            asked = {**PLAIN, "max_tokens": 250, "ignore_eos": True}
            requests.post(vllm.url + "/v1/completions", json=asked, headers={KEY_HEADER: KEY}, timeout=0.05)
    deadline = time.monotonic() + 5
    while running_now() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert running_now() == 0
