"""Server-sent events of a completion, passed on event by event."""

import json
import re
from collections.abc import Mapping

from jobs.connections import Response

DONE = b"data: [DONE]"
"""Ends every complete stream of vLLM's and OpenAI's; one that ends without it was cut off."""
_BOUNDARY = re.compile(rb"\r?\n\r?\n")
_ABORT = re.compile(rb'"finish_reason": ?"abort"')
_ERROR = re.compile(rb'^data: ?\{ ?"error"', re.MULTILINE)
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


class Events:
    """Cuts an upstream body into pieces of one or more whole events, as they arrive."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self._rest = b""
        self._events = 0
        self._usage_tokens = 0
        self.done = False

    @property
    def tokens(self) -> int:
        """Tokens so far: as the engine counted them, or else one for each event."""
        return self._usage_tokens or self._events

    async def next(self) -> bytes:
        """The next whole events, at least one; empty at the end.

        Raises:
            BrokenOff: the transfer broke.
        """
        while chunk := await self._response.read_some():
            text = self._rest + chunk
            end = max((match.end() for match in _BOUNDARY.finditer(text)), default=0)
            self._rest = text[end:]
            if end:
                self._note(text[:end])
                return text[:end]
        rest, self._rest = self._rest, b""
        self._note(rest)
        return rest

    def _note(self, events: bytes) -> None:
        self.done = self.done or DONE in events
        self._events += events.count(b"data: {")
        if counts := _COMPLETION_TOKENS.findall(events):
            self._usage_tokens = int(counts[-1])


def aborted(events: bytes) -> bool:
    """Whether the engine gave up on the completion, as it does when it is told to stop."""
    return b"abort" in events and _ABORT.search(events) is not None


def failed(events: bytes) -> bool:
    """Whether one of these events is an error rather than a part of the completion."""
    return b'"error"' in events and _ERROR.search(events) is not None


def payloads(events: bytes) -> list[bytes]:
    """What each event's `data:` says; comments and other fields are left out."""
    found = []
    for event in _BOUNDARY.split(events):
        lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
        if lines:
            found.append(b"\n".join(lines))
    return found


def event(payload: Mapping[str, object]) -> bytes:
    """One event with a JSON object."""
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
