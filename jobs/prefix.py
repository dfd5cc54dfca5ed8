"""What routing knows of a prompt: a chain of hashes over its whole blocks, and what is left after the last one.

Token prompts use vLLM's own blocks (16 tokens, each chained to the one before, the first to the adapter's name), so
that two prompts share a chain exactly as far as they share cached blocks. Text and messages are cut into chunks of
characters, which follow the same rule closely enough to route by.
"""

import json
from collections.abc import Sequence
from typing import Any

BLOCK_TOKENS = 16
"""vLLM's default `--block-size`; only whole blocks are ever cached."""
CHUNK_CHARS = 64
"""Characters of text that stand for a block: about 4 a token in English."""


class Numbers:
    """A flat JSON list of numbers, left as text until somebody needs the numbers: most prompts are repeats."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __len__(self) -> int:
        return self.text.count(",") + 1

    def read(self) -> list[Any]:
        """The numbers.

        Raises:
            ValueError: it is no JSON.
        """
        numbers: list[Any] = json.loads(self.text)
        return numbers


class Prefix:
    """A prompt under one wire name.

    `identity` is a hash of the whole prompt as it was written, `tokens` its length (an estimate for text).
    """

    __slots__ = ("_chain", "_units", "identity", "name", "tokens", "width")

    def __init__(self, name: str, prompt: Sequence[Any] | Numbers, *, width: int = BLOCK_TOKENS) -> None:
        self.name = name
        self.width = width
        """Units (ids or characters) in a block."""
        self.tokens = len(prompt) * BLOCK_TOKENS // width
        self._units = prompt
        self._chain: tuple[int, ...] | None = None
        if isinstance(prompt, Numbers):
            self.identity = hash(prompt.text)
        else:
            self.identity = hash(prompt if isinstance(prompt, str) else tuple(prompt))

    @property
    def units(self) -> Sequence[Any]:
        """The ids, or the text."""
        if isinstance(self._units, Numbers):
            try:
                self._units = self._units.read()
            except ValueError:  # the engine will say what it thinks of it
                self._units = ()
        return self._units

    @property
    def chain(self) -> tuple[int, ...]:
        """Hashes of the first 0, 1, 2, ... whole blocks, the first standing for the name alone."""
        if self._chain is None:
            units, width = self.units, self.width
            link = hash(self.name)
            chain = [link]
            if isinstance(units, str):
                blocks = [units[start : start + width] for start in range(0, len(units) - width + 1, width)]
            else:
                iterator = iter(units)
                # zip drops what is shorter than a block: the tail
                blocks = list(zip(*[iterator] * width))  # type: ignore[arg-type]  # noqa: B905
            for block in blocks:
                link = hash((link, block))
                chain.append(link)
            self._chain = tuple(chain)
        return self._chain

    def end(self) -> int:
        """Hash of the whole prompt, however it was written."""
        return self.end_at(len(self.chain) - 1, len(self.units) % self.width)

    def end_at(self, block: int, tail: int) -> int:
        """Hash of the prompt that would end `tail` units after this one's first `block` whole blocks."""
        start = block * self.width
        part = self.units[start : start + tail]
        return hash((self.chain[block], part if isinstance(part, str) else tuple(part), "end"))


def prefix_of(name: str, prompt: Any, messages: Any = None, tools: Any = None) -> Prefix | None:
    """The prefix of a prompt (text, token ids) or of a conversation; None for what has no known shape.

    With more messages appended, a conversation continues the one before, as text does.
    """
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if prompt is None and isinstance(messages, list):
        text = json.dumps([tools, *messages], ensure_ascii=False, separators=(",", ":"))
        return Prefix(name, text.removesuffix("]"), width=CHUNK_CHARS)
    if isinstance(prompt, str):
        return Prefix(name, prompt, width=CHUNK_CHARS)
    if isinstance(prompt, Numbers):
        return Prefix(name, prompt)
    if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
        return Prefix(name, prompt)
    return None
