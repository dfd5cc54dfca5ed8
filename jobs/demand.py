"""A completion request as it came from a client: read once, and changed by exact splices, never written anew."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jobs.prefix import Numbers, Prefix, prefix_of

_decode = json.JSONDecoder().raw_decode
_OPEN = re.compile(r"[ \t\n\r]*\{[ \t\n\r]*(\}?)").match
_NAME = re.compile(r'[ \t\n\r]*"([^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*)"[ \t\n\r]*:[ \t\n\r]*').match
_NEXT = re.compile(r"[ \t\n\r]*([,}])").match


class Member(NamedTuple):
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
    if (mark := _OPEN(text)) is None:
        raise ValueError("no JSON object")
    at = mark.end()
    while mark[1] != "}":
        if (name := _NAME(text, at)) is None:
            raise ValueError(f"no member at {at}")
        start = name.end()
        value, end = (text.startswith("[", start) and _flat(text, start)) or _decode(text, start)
        found[name[1] if "\\" not in name[1] else json.loads(f'"{name[1]}"')] = Member(value, start, end)
        if (mark := _NEXT(text, end)) is None:
            raise ValueError(f"neither a comma nor the object's end at {end}")
        at = mark.end()
    if text[at:].strip(" \t\n\r"):
        raise ValueError(f"more than an object at {at}")
    return found


def _flat(text: str, start: int) -> tuple[Numbers, int] | None:
    """The list that starts there if it holds numbers at most: no other list, no object, no text."""
    end = text.find("]", start)
    inner = text[start + 1 : end]
    if end < 0 or not inner.strip() or '"' in inner or "[" in inner or "{" in inner:
        return None
    return Numbers(text[start : end + 1]), end + 1


@dataclass(slots=True)
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

    def prefix(self, name: str) -> Prefix | None:
        """What routing knows of it under a wire name; None if the prompt is of no known shape."""
        return prefix_of(name, self.value("prompt"), self.value("messages"), self.value("tools"))

    def prompt_tokens(self) -> int | None:
        """The prompt's length if it was given as one list of token ids."""
        prompt = self.value("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
            prompt = prompt[0]
            return len(prompt) if prompt and type(prompt[0]) is int else None
        return len(prompt) if isinstance(prompt, Numbers) else None

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
