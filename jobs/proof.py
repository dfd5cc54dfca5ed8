"""Proof that an engine really serves a version: a canary completion, compared with the base model's and the other
engines'.

The digest says that an engine was given the right bytes. The canary says that it uses them: a fixed prompt, greedy,
with the log-probabilities of the likeliest tokens, once per boot on the base model and once for every version.

What it can and cannot tell. Measured on Qwen2 nets of 64 and 512 units (transformers) and on the tiny one under vLLM
0.31 on a CPU, with random B and `Manifest.strength` from 1e-5 to 3: an adapter moves the largest log-probability of
the canary by 0.2 to 0.9 times its strength; in bfloat16 rounding alone moves it by 0.01 to 0.15 as soon as the
strength is above 1e-4, in float32 by less than 1e-6 (vLLM against transformers: 4.8e-7). Among other adapters'
requests vLLM's answer was the same bit for bit; a base request among them was not: on a CPU it gets the adapter of
the last slot. So the base is asked once per boot, before anything else, and

* an engine that serves the base model instead is found at once in float32, and in bfloat16 as long as its answer is
  bit for bit the base's, or another engine's differs clearly; under load, with one engine, it may be found only
  later, when the adapter has grown;
* an adapter too weak to show is let pass on its digest alone;
* a version mistaken for its predecessor is found only where the two differ by more than rounding: there the digest
  counts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jobs.errors import AsyncgrpoError

PROMPT = (5, 17, 29, 41, 53, 65, 77, 8, 20, 32, 44, 56, 68, 80, 11, 23)
"""Token ids that any vocabulary of at least 81 has. They mean nothing; any text would do."""
MAX_TOKENS, TOP_LOGPROBS = 4, 5

NOISE = {"float32": 0.005, "float16": 0.05, "bfloat16": 0.3}
"""Largest difference of a log-probability between two right answers, on the safe side: a false alarm ends a run.
bfloat16: measured up to 0.15 with 8 layers (one unit in the last place of a logit between 16 and 32 is 0.125), doubled
for deeper nets; float16 has three more bits; float32: attention kernels of GPUs may multiply in TF32, which has
float16's ten bits, in a small part of the work. On a CPU it is 0."""
EXACT_STRENGTH = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 5e-2}
"""From this strength on an answer that is bit for bit the base's is the base's. Measured: differences show from 1e-5
(float32) and 1e-4 (bfloat16) on; the rest is margin for larger nets."""
CLEAR = 100.0
"""From a strength of so many times the noise on the answer must differ by more than the noise: 20 to 90 times that is
expected."""


class ProofError(AsyncgrpoError, ValueError):
    """The answer to a canary is none."""


@dataclass(frozen=True)
class Position:
    """One generated token and the log-probabilities of the likeliest ones there, its own included."""

    token: str
    logprobs: Mapping[str, float]


Answer = tuple[Position, ...]


@dataclass(frozen=True)
class Proof:
    """The answers of one engine: under the version and, in the same boot, of the base model."""

    own: Answer
    base: Answer

    @property
    def effect(self) -> float:
        """How far the version is from the base model here."""
        return distance(self.own, self.base)


def request(model: str) -> dict[str, Any]:
    """The body of a canary completion."""
    return {
        "model": model,
        "prompt": list(PROMPT),
        "max_tokens": MAX_TOKENS,
        "temperature": 0.0,
        "logprobs": TOP_LOGPROBS,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }


def parse(body: Any) -> Answer:
    """The answer in a completion's JSON.

    Raises:
        ProofError: it has no log-probabilities for each of its tokens.
    """
    try:
        choice = body["choices"][0]
        logprobs = choice["logprobs"]
        rows = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        answer = tuple(
            Position(str(t), {**{str(k): float(v) for k, v in top.items()}, str(t): float(p)}) for t, p, top in rows
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ProofError(
            f"the canary's answer has no usable log-probabilities ({type(error).__name__}: {error})"
        ) from error
    if not answer or choice.get("finish_reason") == "abort":
        raise ProofError("the canary was answered with nothing" if not answer else "the canary was aborted")
    return answer


def distance(a: Answer, b: Answer) -> float:
    """Largest difference of a log-probability, over the positions up to the first where the two chose different
    tokens.

    Behind that the prompts differ. A token listed in one answer only is below the other's last one: that is the least
    it differs by.
    """
    largest = 0.0
    for here, there in zip(a, b, strict=False):
        for ours, theirs in ((here.logprobs, there.logprobs), (there.logprobs, here.logprobs)):
            floor = min(theirs.values())
            for token, value in ours.items():
                gap = abs(value - theirs[token]) if token in theirs else max(0.0, value - floor)
                largest = max(largest, gap)
        if here.token != there.token:
            break
    return largest


def judge(proof: Proof, others: Iterable[Proof], strength: float, dtype: str) -> str | None:
    """Why these answers disprove that the engine serves the version; None if they do not.

    `others` are the proofs of engines that were believed so far; `strength` is the manifest's, an upper bound of how
    far the adapter moves a weight matrix; `dtype` is the engines', with or without "torch.".
    """
    kind = dtype.removeprefix("torch.")
    noise = NOISE.get(kind, NOISE["bfloat16"])
    effect = proof.effect
    if strength == 0.0:
        if effect > 3 * noise:
            return f"the adapter is zero and the canary {effect:.2g} from the base model's: other weights are served"
        return None
    if effect == 0.0 and strength >= EXACT_STRENGTH.get(kind, EXACT_STRENGTH["bfloat16"]):
        return f"the canary is the base model's, bit for bit, though the adapter's strength is {strength:.2g}"
    if effect <= noise and strength >= CLEAR * noise:
        return f"the canary is within {noise:.2g} of the base model's, though the adapter's strength is {strength:.2g}"
    clear = [other for other in others if other.effect > 3 * noise]
    nearest = min((distance(proof.own, other.own) for other in clear), default=0.0)
    if nearest > effect + 2 * noise:
        return f"the canary is {nearest:.2g} from the other replicas' and {effect:.2g} from the base model's"
    return None
