"""What routing knows of a prompt: a chain of hashes over its whole blocks, and what is left after the last one.

Token prompts use vLLM's own blocks (16 tokens, each chained to the one before, the first to the adapter's name), so
that two prompts share a chain exactly as far as they share cached blocks. Text and messages are cut into chunks of
characters, which follow the same rule closely enough to route by.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BLOCK_TOKENS = 16
"""vLLM's default `--block-size`; only whole blocks are ever cached."""
CHUNK_CHARS = 64
"""Characters of text that stand for a block: about 4 a token in English."""
_CHARS_PER_TOKEN = CHUNK_CHARS // BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt under one wire name.

    `chain[0]` stands for the name alone and `chain[i]` for the first i whole blocks; `units` are the ids or characters
    that were hashed, `width` how many of them make a block, and `tokens` the prompt's length (an estimate for text).
    """

    name: str
    chain: tuple[int, ...]
    units: Sequence[Any]
    width: int
    tokens: int

    def end(self) -> int:
        """Hash of the whole prompt."""
        return self.end_at(len(self.chain) - 1, len(self.units) % self.width)

    def end_at(self, block: int, tail: int) -> int:
        """Hash of the prompt that would end `tail` units after this one's first `block` whole blocks."""
        start = block * self.width
        part = self.units[start : start + tail]
        return hash((self.chain[block], part if isinstance(part, str) else tuple(part), "end"))


def token_prefix(name: str, ids: Sequence[int]) -> Prefix:
    """The prefix of a prompt of token ids.

    Raises:
        TypeError: an element cannot be hashed, so these are no token ids.
    """
    link = hash(name)
    chain = [link]
    iterator = iter(ids)
    for block in zip(*[iterator] * BLOCK_TOKENS):  # noqa: B905 - the rest shorter than a block is the tail, on purpose
        link = hash((link, block))
        chain.append(link)
    return Prefix(name, tuple(chain), ids, BLOCK_TOKENS, len(ids))


def text_prefix(name: str, text: str) -> Prefix:
    """The prefix of a prompt that is text."""
    link = hash(name)
    chain = [link]
    for start in range(0, len(text) - CHUNK_CHARS + 1, CHUNK_CHARS):
        link = hash((link, text[start : start + CHUNK_CHARS]))
        chain.append(link)
    return Prefix(name, tuple(chain), text, CHUNK_CHARS, len(text) // _CHARS_PER_TOKEN + 1)


def messages_prefix(name: str, messages: Sequence[Any], tools: Any = None) -> Prefix:
    """The prefix of a conversation: with more messages appended, its text continues this one's."""
    text = json.dumps([tools, *messages], ensure_ascii=False, separators=(",", ":"))
    return text_prefix(name, text.removesuffix("]"))


def no_prefix(name: str) -> Prefix:
    """A prompt of no known shape: routed by load alone, and remembered nowhere."""
    return Prefix(name, (), (), BLOCK_TOKENS, 0)
