"""Answers of a simulated engine: JSON of the shape and order that vLLM 0.31 gives."""

import time
import uuid
from itertools import pairwise
from typing import Any

from emulator.sim_model import STATES, Sampled, Table, text
from emulator.sim_requests import Completion

FINGERPRINT = "sim-0.31.0"
LOWEST = -9999.0
"""vLLM writes this for minus infinity."""


def identifier(kind: str) -> str:
    """A fresh id such as "cmpl-0123456789abcdef"."""
    return f"{kind}-{uuid.uuid4().hex[:16]}"


def model_card(name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    """One entry of /v1/models."""
    permission = {
        "id": identifier("modelperm"),
        "object": "model_permission",
        "created": int(time.time()),
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [permission],
    }


def envelope(name: str, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """What a completion and each event of a stream start with."""
    created = int(time.time())
    return {"id": name, "object": "text_completion", "created": created, "model": model, "choices": choices}


def answer(ask: Completion, table: Table, end: int, sequences: list[Sampled], details: bool) -> dict[str, Any]:
    """A whole completion."""
    choices = []
    for index, sampled in enumerate(sequences):
        prompt = ask.prompts[index // ask.n]
        scores = _prompt_scores(ask, table, end, prompt)
        told = sampled.tokens if ask.max_tokens or not ask.echo else []
        written = text(told)
        if ask.echo and not ask.token_ids:
            written = text(prompt) + written
        choices.append(
            {
                "index": index,
                "text": written,
                "logprobs": _logprobs(ask, prompt, scores, sampled, end) if ask.logprobs is not None else None,
                "finish_reason": sampled.finish_reason,
                "stop_reason": sampled.stop_reason,
                "token_ids": sampled.tokens if ask.token_ids else None,
                "prompt_logprobs": scores,
                "prompt_token_ids": prompt if ask.token_ids else None,
                "routed_experts": None,
            }
        )
    return {
        **envelope(identifier("cmpl"), ask.model, choices),
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage(ask, sequences)
        | {
            "prompt_tokens_details": {"cached_tokens": sequences[-1].cached_tokens} if details else None,
            "completion_tokens_details": None,
        },
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def usage(ask: Completion, sequences: list[Sampled]) -> dict[str, Any]:
    """Tokens of a request."""
    prompts = sum(len(prompt) for prompt in ask.prompts)
    completions = sum(len(sampled.tokens) for sampled in sequences)
    return {"prompt_tokens": prompts, "total_tokens": prompts + completions, "completion_tokens": completions}


def event(ask: Completion, name: str, index: int, sampled: Sampled, at: int, end: int) -> dict[str, Any]:
    """The event of a stream for token `at` of sequence `index`."""
    last = at == len(sampled.tokens) - 1
    token, row, state = sampled.tokens[at], sampled.rows[at], sampled.states[at]
    logprobs = None
    if ask.logprobs is not None:
        top = _top(row, state, end, ask.logprobs)
        logprobs = {
            "text_offset": [len(text(sampled.tokens[:at]))],
            "token_logprobs": [top[0][1]],
            "tokens": [_word(ask, token)],
            "top_logprobs": [{_word(ask, other): value for other, value in top}],
        }
    choice = {
        "index": index,
        "text": text([token]),
        "logprobs": logprobs,
        "finish_reason": sampled.finish_reason if last else None,
        "stop_reason": sampled.stop_reason if last else None,
        "prompt_token_ids": ask.prompts[index // ask.n] if ask.token_ids and at == 0 else None,
        "token_ids": [token] if ask.token_ids else None,
    }
    content = envelope(name, ask.model, [choice])
    return content | ({"system_fingerprint": FINGERPRINT} if last and not ask.usage else {})


def last_event(ask: Completion, name: str, index: int, sampled: Sampled) -> dict[str, Any]:
    """The event that ends a sequence which was stopped before its last token."""
    choice = {"index": index, "text": "", "logprobs": None, "finish_reason": sampled.finish_reason, "stop_reason": None}
    tokens: dict[str, Any] = {"prompt_token_ids": None, "token_ids": [] if ask.token_ids else None}
    return envelope(name, ask.model, [choice | tokens]) | {"system_fingerprint": FINGERPRINT}


def usage_event(ask: Completion, name: str, sequences: list[Sampled]) -> dict[str, Any]:
    """The event with the tokens of the whole request."""
    return envelope(name, ask.model, []) | {"usage": usage(ask, sequences), "system_fingerprint": FINGERPRINT}


def _top(row: list[float], state: int, end: int, count: int) -> list[tuple[int, float]]:
    """(token, log-probability) of what was picked and then of the `count` likeliest."""
    ranked = sorted(range(STATES), key=row.__getitem__, reverse=True)[:count] if count else []
    states = [state, *(other for other in ranked if other != state)]
    return [(end if each == STATES - 1 else each, max(row[each], LOWEST)) for each in states]


def _word(ask: Completion, token: int) -> str:
    return f"token_id:{token}" if ask.tokens_as_ids else text([token])


def _logprobs(
    ask: Completion, prompt: list[int], scores: list[dict[str, Any] | None] | None, sampled: Sampled, end: int
) -> dict[str, Any]:
    steps: list[list[tuple[int, float]] | None] = []
    tokens = list(prompt) if ask.echo else []
    if ask.echo and scores is not None:
        for score in scores:
            steps.append(None if score is None else [(int(t), entry["logprob"]) for t, entry in score.items()])
    if ask.max_tokens or not ask.echo:
        tokens += sampled.tokens
        picked = zip(sampled.rows, sampled.states, strict=True)
        steps += [_top(row, state, end, ask.logprobs or 0) for row, state in picked]
    words = [_word(ask, token) for token in tokens]
    offsets, at = [], 0
    for word in words:
        offsets.append(at)
        at += len(word)
    return {
        "text_offset": offsets,
        "token_logprobs": [None if step is None else step[0][1] for step in steps],
        "tokens": words,
        "top_logprobs": [None if step is None else {_word(ask, t): value for t, value in step} for step in steps],
    }


def _prompt_scores(ask: Completion, table: Table, end: int, prompt: list[int]) -> list[dict[str, Any] | None] | None:
    """Log-probability of each token of the prompt after the one before it, with the likeliest others if asked for."""
    if ask.prompt_logprobs is None:
        return None
    scores: list[dict[str, Any] | None] = [None]
    for previous, token in pairwise(prompt):
        row, _ = table.row(previous, ask.temperature)
        state = STATES - 1 if token == end else token % STATES
        entries = {}
        for other, value in [(token, row[state]), *_top(row, state, end, ask.prompt_logprobs)[1:]]:
            rank = 1 + sum(each > value for each in row)
            entries[str(other)] = {"logprob": value, "rank": rank, "decoded_token": text([other])}
        scores.append(entries)
    return scores
