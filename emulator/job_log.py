"""A Job's log: lines with the time at which they came, in a file that outlives the Job, for any number of readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypedDict

from emulator.jobs_state import now, timestamp

LONGEST_LINE_BYTES = 64 << 10
"""A line without an end is cut here, so that a Job that prints no newline cannot fill the memory."""
STARTED = "===== Job started"
"""How the Hub's first line begins; huggingface_hub leaves it out."""


class Event(TypedDict):
    """One line, as the Hub sends it."""

    data: str
    timestamp: str


class JobLog:
    """The log of one Job, in `path` as `<time> <line>`. Everything but the file belongs to one event loop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.closed = False
        self._file = path.open("ab", buffering=0)
        self._partial = b""
        self._grown = asyncio.Event()

    def write(self, line: str) -> None:
        """Add one line of the Hub's own."""
        self._append([line.encode()])

    def feed(self, data: bytes) -> None:
        """Add output of the Job as it comes, in pieces that need not end with a line."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > LONGEST_LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        if lines:
            self._append(lines)

    def flush(self) -> None:
        """Add an unfinished last line: its writer is gone."""
        if self._partial:
            self._append([self._partial])
            self._partial = b""

    def close(self) -> None:
        """The Job is over: followers end after the last line."""
        self.flush()
        self.closed = True
        self._file.close()
        self._wake()

    def _append(self, lines: list[bytes]) -> None:
        if self.closed:
            return
        at = str(timestamp(now())).encode()
        self._file.write(b"".join(b"%s %s\n" % (at, line.rstrip(b"\r")) for line in lines))
        self._wake()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    def read(self) -> list[Event]:
        """All lines so far."""
        return _events(self.path.read_bytes())

    async def follow(self, tail: int | None, idle_s: float) -> AsyncIterator[Event | None]:
        """All lines, or the last `tail` and what follows, until the log is closed; None after `idle_s` without one."""
        data = self.path.read_bytes()
        offset = len(data)
        events = _events(data)
        for event in events if tail is None else events[len(events) - min(tail, len(events)) :]:
            yield event
        while True:
            closed, grown = self.closed, self._grown
            with self.path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            offset += len(data)
            for event in _events(data):
                yield event
            if closed:
                return
            if grown is not self._grown or self.closed:
                continue  # it has grown while the lines above were sent
            try:
                await asyncio.wait_for(grown.wait(), idle_s)
            except TimeoutError:
                yield None


def _events(data: bytes) -> list[Event]:
    events: list[Event] = []
    for line in data.decode(errors="replace").split("\n")[:-1]:
        at, _, text = line.partition(" ")
        events.append(Event(data=text, timestamp=at))
    return events
