"""The fleet as the completions see it (`jobs.upstream.Pool`), and the place where everybody learns of its changes."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jobs.engine import BASE
from jobs.fleet import Event, Fleet
from jobs.names import WireName, parse_policy, parse_wire, policy_name
from jobs.upstream import PoolListener, UnknownModel, VersionFailed
from jobs.version import VersionState

LOOK_AGAIN_S = 1.0
"""How often one who waits looks whether there is still hope: that ends with time, not with an event."""

Observer = Callable[[Event], None]


class FleetPool:
    """Implements `jobs.upstream.Pool`. Whoever changes the fleet does so within `telling()`."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.observers: list[Observer] = []
        self._listeners: list[PoolListener] = []
        self._change = asyncio.Event()

    def now(self) -> float:
        """The fleet's clock."""
        return time.monotonic()

    @contextmanager
    def telling(self) -> Iterator[Fleet]:
        """Lends the fleet for a change, and lets everybody know of it afterwards."""
        try:
            yield self.fleet
        finally:
            for event in self.fleet.drain_events():
                self._publish(event)
            change, self._change = self._change, asyncio.Event()
            change.set()

    def tick(self) -> None:
        """Lets the fleet see that time has passed; wakes nobody unless that changed something."""
        self.fleet.tick(self.now())
        self._tell()

    async def changed(self, timeout_s: float) -> None:
        """Returns at the next change, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._change.wait()
        except TimeoutError:
            pass

    # jobs.upstream.Pool

    def resolve(self, model: str | None) -> str:
        """The name to send upstream; see `Pool`."""
        if model is None or model == self.fleet.model:
            return self.fleet.model or ""
        version = parse_policy(model)
        wire = str(WireName(self.fleet.run, self.fleet.attempt, version)) if version else model
        if wire not in self.fleet.versions:
            raise UnknownModel(model)
        return wire

    def public_name(self, name: str) -> str:
        """What TRL calls it."""
        wire = parse_wire(name)
        ours = wire is not None and (wire.run, wire.attempt) == (self.fleet.run, self.fleet.attempt)
        return policy_name(wire.version) if wire and ours else name

    def candidates(self, name: str) -> list[str]:
        """Engines that may answer under this name."""
        return self.fleet.candidates(self._key(name))

    def ready(self) -> list[str]:
        """Engines in `ready`."""
        return [engine.name for engine in self.fleet.ready()]

    def url(self, engine: str) -> str:
        """The engine's base URL."""
        return self.fleet.engines[engine].url

    async def wait_for(self, name: str) -> None:
        """Returns once an engine may answer under this name; raises VersionFailed if none ever will."""
        key = self._key(name)
        while not self.fleet.candidates(key):
            if key != BASE and (words := self.fleet.hopeless(key, self.now())):
                raise VersionFailed(f"no replica can serve {name}: {words}")
            await self.changed(LOOK_AGAIN_S)

    def begin(self, name: str) -> None:
        """A completion under this name came in."""
        self._count(name, self.fleet.begin)

    def end(self, name: str) -> None:
        """It is over."""
        self._count(name, self.fleet.end)

    def failed(self, engine: str, reason: str) -> None:
        """The engine failed a completion: it leaves `ready` at once."""
        self.fleet.failed(engine, reason, self.now())
        self._tell()

    def missing(self, engine: str, name: str) -> None:
        """The engine does not know a version that it should."""
        with self.telling() as fleet:
            fleet.missing(engine, self._key(name), self.now())

    def max_model_len(self) -> int | None:
        """The smallest of all engines that belong to the run, in tokens."""
        return min((engine.facts.max_model_len for engine in self.fleet.members() if engine.facts), default=None)

    def subscribe(self, listener: PoolListener) -> None:
        """Calls `listener` for every later event."""
        self._listeners.append(listener)

    def _tell(self) -> None:
        if self.fleet.has_events:
            with self.telling():
                pass

    def _key(self, name: str) -> str:
        return BASE if name == self.fleet.model else name

    def _count(self, name: str, count: Callable[[str, float], None]) -> None:
        version = self.fleet.versions.get(name)
        if version is None or version.state is VersionState.LIVE:  # nothing follows from it: the usual case is cheap
            count(name, 0.0)
            return
        with self.telling():
            count(name, self.now())

    def _publish(self, event: Event) -> None:
        for observer in self.observers:
            observer(event)
        for listener in self._listeners:
            if event.kind == "ready":
                listener.engine_ready(event.name)
            elif event.kind == "left":
                listener.engine_left(event.name)
            elif event.kind == "given up":
                listener.engine_gone(event.name)
            elif event.kind in ("retired", "failed"):
                listener.version_retired(event.name)
