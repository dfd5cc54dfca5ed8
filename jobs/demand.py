"""A completion request as it came from a client: read once, and changed by exact splices, never written anew."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from json import JSONDecodeError
from typing import Any

from jobs.prefix import Prefix, messages_prefix, no_prefix, text_prefix, token_prefix

_decode = json.JSONDecoder().raw_decode
_blank = re.compile(r"[ \t\n\r]*").match


@dataclass(frozen=True, slots=True)
class Member:
    """A top-level member of a JSON object: its value and where that value stands in the text."""

    value: Any
    start: int
    end: int


def members(text: str) -> dict[str, Member]:
    """The top-level members of the JSON object in `text`; of a repeated key the last, as every JSON reader takes it.

    Raises:
        ValueError: `text` is not one JSON object.
    """
    found: dict[str, Member] = {}
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        raise JSONDecodeError("Expecting an object", text, at)
    at = _skip(text, at + 1)
    if text[at : at + 1] == "}":
        at += 1
    else:
        while True:
            key, at = _decode(text, at)
            at = _skip(text, at)
            if not isinstance(key, str) or text[at : at + 1] != ":":
                raise JSONDecodeError("Expecting a name and ':'", text, at)
            start = _skip(text, at + 1)
            value, end = _decode(text, start)
            found[key] = Member(value, start, end)
            at = _skip(text, end)
            mark = text[at : at + 1]
            at = _skip(text, at + 1)
            if mark == "}":
                break
            if mark != ",":
                raise JSONDecodeError("Expecting ',' or '}'", text, end)
    if _skip(text, at) != len(text):
        raise JSONDecodeError("Extra data", text, at)
    return found


def _skip(text: str, at: int) -> int:
    if text[at : at + 1] > " ":  # compact JSON has nothing to skip, and the regular expression is the slow part
        return at
    match = _blank(text, at)
    assert match
    return match.end()


@dataclass(frozen=True, slots=True)
class Demand:
    """What a client asks for; `members` is empty if it sent no JSON object."""

    body: bytes
    text: str = ""
    members: Mapping[str, Member] = field(default_factory=dict)

    @classmethod
    def read(cls, body: bytes) -> "Demand":
        """Reads a body. What is no JSON object is kept as it is, for the engine to give its own verdict on."""
        try:
            text = body.decode()
            return cls(body, text, members(text))
        except (ValueError, RecursionError):
            return cls(body)

    def value(self, key: str) -> Any:
        """A top-level member's value, None where there is none."""
        member = self.members.get(key)
        return None if member is None else member.value

    @property
    def model(self) -> str | None:
        """The model it names, if it names one."""
        model = self.value("model")
        return model if isinstance(model, str) else None

    @property
    def stream(self) -> bool:
        """Whether it asks for events rather than one answer."""
        return self.value("stream") is True

    @property
    def max_tokens(self) -> int | None:
        """The most tokens it wants of each completion."""
        value = self.value("max_tokens")
        return value if type(value) is int else None

    @property
    def choices(self) -> int:
        """Completions it wants of each prompt."""
        value = self.value("n")
        return value if type(value) is int and value > 0 else 1

    def prompts(self) -> Sequence[Any]:
        """The prompts, if `prompt` is a batch of several: texts or lists of token ids. Otherwise empty."""
        prompt = self.value("prompt")
        if type(prompt) is not list or len(prompt) < 2:
            return ()
        kind = type(prompt[0])
        return prompt if kind in (str, list) and all(type(each) is kind for each in prompt) else ()

    def prefix(self, name: str) -> Prefix:
        """What routing knows of it under a wire name: nothing, if the prompt is of no known shape."""
        prompt = self.value("prompt")
        if type(prompt) is list and len(prompt) == 1 and type(prompt[0]) in (str, list):
            prompt = prompt[0]
        if prompt is None and type(messages := self.value("messages")) is list:
            return messages_prefix(name, messages, self.value("tools"))
        if type(prompt) is str:
            return text_prefix(name, prompt)
        if type(prompt) is list and prompt and type(prompt[0]) is int:
            try:
                return token_prefix(name, prompt)
            except TypeError:
                pass
        return no_prefix(name)

    def prompt_tokens(self) -> int | None:
        """The prompt's length if it was given as one list of token ids."""
        prompt = self.value("prompt")
        if type(prompt) is list and len(prompt) == 1 and type(prompt[0]) is list:
            prompt = prompt[0]
        return len(prompt) if type(prompt) is list and prompt and type(prompt[0]) is int else None

    def spliced(self, edits: Mapping[str, Any]) -> bytes:
        """The body with some of its top-level values replaced, and every other byte as it came."""
        pieces: list[str] = []
        at = 0
        for key, value in sorted(edits.items(), key=lambda edit: self.members[edit[0]].start):
            member = self.members[key]
            pieces += (self.text[at : member.start], json.dumps(value, ensure_ascii=False, separators=(",", ":")))
            at = member.end
        pieces.append(self.text[at:])
        return "".join(pieces).encode()

    def single(self, index: int) -> "Demand":
        """The request for one prompt of a batch, as a request of its own."""
        edits = {"prompt": self.prompts()[index]}
        if type(request_id := self.value("request_id")) is str:
            edits["request_id"] = f"{request_id}-{index}"  # one engine may get several of them at a time
        return Demand.read(self.spliced(edits))
