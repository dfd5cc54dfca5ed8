"""Tokens in, tokens out: completions as a trainer asks for them, without the work of making text of each token.

vLLM's /v1/completions turns every token of every step into text twice, for the answer and for its logprobs, and keeps
small objects for each: half of what its server process does (measured, docs/benchmarks.md), and on a GPU that process
is what an engine waits for. A trainer reads token ids and logprobs. So a request that asks for just those goes straight
to the engine, with the sampling parameters that vLLM would have made of it, and its text is made once, at the end.
Every other request, and every one that could be an error, is vLLM's own to answer.

A request's seed costs more than all that: vLLM then draws the random numbers of each completion by a call of its own,
where one call does for all (a sixth to a quarter of an engine's tokens, measured). TRL 1.16 sends random seeds, only so
that engines which all have the same one do not repeat each other; a replica's engines have seeds of their own. So the
seed of a completion by an adapter is not used unless the recipe wants it (`replica.request_seeds`).
"""

import asyncio
import importlib
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

PATH = "/v1/completions"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "ignore_eos")
"""Members of a request that SamplingParams takes as they are; absent ones have the same defaults there."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "return_token_ids": (True,),
    "logprobs": (0,),
    "n": (1, None),
    "stream": (False, None),
    "echo": (False, None),
}
"""Members that have one meaning here, and the values that say it."""
KNOWN = frozenset({"model", "prompt", "max_tokens", *SAMPLING, *NEUTRAL})
LOWEST_LOGPROB = -9999.0
"""What vLLM's answers say for minus infinity, which JSON lacks."""


@dataclass(frozen=True)
class Ask:
    """One completion that the engine can be asked for. `lora` is vLLM's own record of the adapter, None for none."""

    model: str
    prompt: list[int]
    max_tokens: int
    sampling: Mapping[str, Any]
    lora: Any


def read(body: bytes, state: Any, request_seeds: bool) -> Ask | None:
    """The completion that `body` asks for; None if it is for vLLM to answer. `state` is that of vLLM's application."""
    try:
        asked = json.loads(body)
    except ValueError:
        return None
    if not isinstance(asked, dict) or not plain(asked):
        return None
    if state.engine_client.errored or not fits(asked, state.vllm_config.model_config.max_model_len):
        return None
    lora = state.openai_serving_models.lora_requests.get(asked["model"])
    if lora is None and not state.openai_serving_models.is_base_model(asked["model"]):
        return None
    sampling = {name: asked[name] for name in SAMPLING if asked.get(name) is not None}
    if lora is not None and not request_seeds:
        sampling.pop("seed", None)
    return Ask(asked["model"], asked["prompt"], asked["max_tokens"], sampling, lora)


def plain(asked: Mapping[str, Any]) -> bool:
    """Whether a request is for the tokens and logprobs of one completion of one prompt of token ids, and no more."""
    prompt, max_tokens = asked.get("prompt"), asked.get("max_tokens")
    return (
        asked.keys() <= KNOWN
        and all(_among(asked.get(name), values) for name, values in NEUTRAL.items())
        and isinstance(asked.get("model"), str)
        and type(max_tokens) is int
        and max_tokens > 0
        and isinstance(prompt, list)
        and bool(prompt)
        and all(type(token) is int and token >= 0 for token in prompt)
    )


def _among(found: Any, values: tuple[Any, ...]) -> bool:
    return any(type(found) is type(value) and found == value for value in values)  # to Python, true is 1


def fits(asked: Mapping[str, Any], max_model_len: int) -> bool:
    """Whether prompt and completion have room together; if not, vLLM says so in its own words."""
    return len(asked["prompt"]) + int(asked["max_tokens"]) <= max_model_len


async def complete(ask: Ask, state: Any, receive: Receive) -> bytes | None:
    """Has the engine complete it. Returns the body of a 200, or None if the client left before.

    Raises:
        Exception: whatever vLLM's engine raises: a value that it refuses, or its own end.
    """
    vllm = importlib.import_module("vllm.sampling_params")
    parameters = vllm.SamplingParams(
        **ask.sampling,
        max_tokens=ask.max_tokens,
        logprobs=0,
        flat_logprobs=True,  # one object for all tokens: the collector has nothing to look through
        detokenize=False,
        output_kind=vllm.RequestOutputKind.FINAL_ONLY,
    )
    request_id = f"cmpl-{uuid.uuid4().hex}"

    async def work() -> Any:
        prompt = {"type": "token", "prompt_token_ids": ask.prompt}
        outputs = state.engine_client.generate(prompt, parameters, request_id, lora_request=ask.lora)
        return [output async for output in outputs][-1]

    working, leaving = asyncio.create_task(work()), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return answer(ask, request_id, working.result(), state.engine_client.tokenizer) if working.done() else None
    finally:
        leaving.cancel()
        working.cancel()  # vLLM's generator drops its request when it is cancelled


def answer(ask: Ask, request_id: str, output: Any, tokenizer: Any) -> bytes:
    """The engine's output in the shape of vLLM's answer; tokens are named by id, as vLLM does on request."""
    choice = output.outputs[0]
    ids = list(choice.token_ids)
    flat = choice.logprobs
    body = {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": ask.model,
        "choices": [
            {
                "index": 0,
                "text": tokenizer.decode(ids, skip_special_tokens=True) if tokenizer else "",
                "logprobs": {
                    "text_offset": [],
                    "token_logprobs": [max(flat.logprobs[start], LOWEST_LOGPROB) for start in flat.start_indices],
                    "tokens": [f"token_id:{token}" for token in ids],
                    "top_logprobs": None,
                },
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "token_ids": ids,
                "prompt_token_ids": ask.prompt,
            }
        ],
        "usage": {
            "prompt_tokens": len(ask.prompt),
            "completion_tokens": len(ids),
            "total_tokens": len(ask.prompt) + len(ids),
        },
    }
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
