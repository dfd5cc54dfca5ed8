"""A request with several prompts: each goes its own way, and their answers are merged into what one engine would say.

vLLM numbers the choices of a batch by prompt first (`index = prompt * n + choice`), gives one id to all of them, and
adds up the usage.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jobs.streams import event, payloads


def merge_answers(answers: Sequence[bytes], choices: int) -> bytes:
    """One answer from those to each prompt, in order; `choices` is the number of completions for each prompt."""
    parsed = [json.loads(answer) for answer in answers]
    merged = dict(parsed[0])
    merged["choices"] = [
        {**choice, "index": choice["index"] + prompt * choices}
        for prompt, answer in enumerate(parsed)
        for choice in answer["choices"]
    ]
    if all(answer.get("usage") for answer in parsed):
        merged["usage"] = add_usage([answer["usage"] for answer in parsed])
    return json.dumps(merged, ensure_ascii=False, separators=(",", ":")).encode()


def add_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums of every count, in nested details too; what is no count is taken from the first that has it."""
    total: dict[str, Any] = {}
    for usage in usages:
        for key, value in usage.items():
            known = total.get(key)
            if isinstance(value, Mapping):
                total[key] = add_usage([known, value] if isinstance(known, Mapping) else [value])
            elif isinstance(value, int | float) and isinstance(known, int | float):
                total[key] = known + value
            elif known is None:
                total[key] = value
    return total


class MergedEvents:
    """Makes one event stream of several: one id, choices renumbered, usage added up, one end."""

    def __init__(self, prompts: int, choices: int) -> None:
        self._choices = choices
        self._open = prompts
        self._first: dict[str, Any] = {}
        self._usage: list[Mapping[str, Any]] = []
        self._last: dict[str, Any] = {}

    def feed(self, prompt: int, events: bytes) -> Iterator[bytes]:
        """What to pass on of some events of one prompt's stream."""
        for payload in payloads(events):
            if payload == b"[DONE]":
                self._open -= 1
                if not self._open:
                    yield from self._end()
                continue
            chunk = json.loads(payload)
            self._first = self._first or {key: chunk[key] for key in ("id", "created") if key in chunk}
            chunk |= self._first
            if chunk.get("usage") and not chunk.get("choices"):
                self._usage.append(chunk["usage"])
                self._last = chunk
                continue
            for choice in chunk.get("choices", ()):
                choice["index"] += prompt * self._choices
            yield event(chunk)

    def _end(self) -> Iterator[bytes]:
        if self._usage:
            yield event({**self._last, "usage": add_usage(self._usage)})
        yield b"data: [DONE]\n\n"
