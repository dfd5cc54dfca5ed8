"""Whether answers for tokens alone (jobs/tokens.py) are vLLM's own: the same tokens, with the same logprobs.

A GPU sums in another order in a batch of another shape, so vLLM's answers differ even from its own, asked for again.
So they are asked for twice, and both differences are shown. With VLLM_BATCH_INVARIANT=1, which makes an answer
independent of what else is in the batch, all must be equal.
"""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

PROMPTS = 32
"""Each is asked for greedily and with a seed."""
NEW_TOKENS = 128
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Comparison:
    """Two series of answers. Logprobs are compared as far as an answer's tokens are equal; after that it is another."""

    answers: int
    equal_tokens: int
    """Answers whose tokens are all equal."""
    compared: int
    """Tokens up to the first that differs."""
    beyond: int
    """Of those, how many logprobs differ by more than TOLERANCE."""
    largest: float
    """The largest difference between two logprobs."""


def compare(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compares answers one by one; each has `token_ids` and `logprobs.token_logprobs`. Pure."""
    equal, differences = 0, []
    for one, other in zip(ours, theirs, strict=True):
        pairs = list(zip(one["token_ids"], other["token_ids"], strict=True))
        alike = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
        equal += alike == len(pairs)
        logprobs = zip(one["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"], strict=True)
        differences += [abs(a - b) for a, b in list(logprobs)[:alike]]
    beyond = sum(difference > TOLERANCE for difference in differences)
    return Comparison(len(ours), equal, len(differences), beyond, max(differences, default=0.0))


async def measure(url: str, headers: Mapping[str, str], model: str, vocabulary: int) -> dict[str, dict[str, Any]]:
    """Asks the engine at `url` for the same completions by `model`, all at once: for tokens alone and twice for vLLM's.

    Returns both comparisons by name.
    """
    draw = random.Random(0)
    asked = []
    for number in range(PROMPTS):
        prompt = [draw.randrange(vocabulary) for _ in range(128)]
        for change in ({"temperature": 0.0}, {"temperature": 1.0, "seed": number}):
            asked.append({"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "ignore_eos": True, **change})

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers=headers, timeout=aiohttp.ClientTimeout(total=300)
    ) as session:

        async def one(body: Mapping[str, Any]) -> Any:
            whole = {**body, "logprobs": 0, "return_token_ids": True}
            async with session.post(f"{url}/v1/completions", json=whole) as answer:
                text = await answer.read()
                answer.raise_for_status()
                return json.loads(text)["choices"][0]

        async def all_of(more: Mapping[str, Any]) -> list[Any]:
            return await asyncio.gather(*(one({**body, **more}) for body in asked))

        own = {"user": "bench"}  # a member without effect, which has vLLM answer itself
        await all_of(own)  # now every prompt is in the cache: one that is computed whole is summed in another order
        ours, first, second = await all_of({}), await all_of(own), await all_of(own)
    return {
        "for tokens alone, and vLLM's own": asdict(compare(ours, first)),
        "vLLM's own, twice": asdict(compare(first, second)),
    }
