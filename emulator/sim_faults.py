"""Faults of a simulated engine, as tests script them over POST /sim/fault."""

import asyncio
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from emulator.sim_requests import Refused

Where = Literal["load", "unload", "completion", "health"]
Close = Literal["at once", "after headers", "midway"]


@dataclass
class Fault:
    """What the next `count` requests of one kind meet, if they are for `model` (None: any).

    First `delay_s` passes. Then the request hangs for ever, or the connection is closed (`at once`, `after headers`, or
    `midway` through the body), or an error `status` with `message` is answered. Without any of these a completion is
    answered, but wrongly: with `base` from the base model, cut in half with `finish_reason`, or `unequal`, with one
    log-probability too few.
    """

    where: Where
    count: int = 1
    model: str | None = None
    delay_s: float = 0.0
    hang: bool = False
    close: Close | None = None
    status: int | None = None
    message: str = "a fault"
    base: bool = False
    finish_reason: str | None = None
    unequal: bool = False

    @classmethod
    def read(cls, body: dict[str, Any]) -> "Fault":
        """A fault from JSON.

        Raises:
            Refused: naming the field that is unknown, missing or of another value.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(body) - known):
            raise Refused(f"unknown fields {unknown}; known: {sorted(known)}")
        if body.get("where") not in get_args(Where):
            raise Refused(f"where = {body.get('where')!r}: expected one of {get_args(Where)}")
        if body.get("close") not in (None, *get_args(Close)):
            raise Refused(f"close = {body['close']!r}: expected one of {get_args(Close)}")
        return cls(**body)


class Faults:
    """The faults to come, oldest first."""

    def __init__(self) -> None:
        self._pending: list[Fault] = []
        self.hanging = 0

    def add(self, fault: Fault) -> None:
        """Scripts one more."""
        self._pending.append(fault)

    def clear(self) -> None:
        """Takes back all that have not come yet."""
        self._pending.clear()

    async def meet(self, where: Where, model: str) -> Fault | None:
        """The fault that a request meets; its delay and its hanging are over on return.

        Raises:
            Refused: the fault is an error to answer.
        """
        fault = next((f for f in self._pending if f.where == where and f.model in (None, model)), None)
        if fault is None:
            return None
        fault.count -= 1
        if fault.count < 1:
            self._pending.remove(fault)
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.hang:
            self.hanging += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.hanging -= 1
        if fault.status is not None:
            raise Refused(fault.message, fault.status, "InternalServerError")
        return fault
