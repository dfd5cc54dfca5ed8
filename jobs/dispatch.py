"""Brings one prompt to an engine and an answer back: elsewhere when that fails, never to two engines at once."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

from jobs.connections import BrokenOff, Connections, Headers, Response, Unreachable
from jobs.counters import Counters
from jobs.parking import Parking, Unserved
from jobs.prefix import Prefix
from jobs.routing import Decision, Router
from jobs.upstream import Pool
from jobs.verdict import Blame, Elsewhere

REST_S = 0.05
"""Pause before engines that failed a completion are asked again, where they are all there is: time for the fleet to
notice, short against a completion. Doubles with each failure, up to MAX_REST_S."""
MAX_REST_S = 2.0
YOUNG_S = 10.0
"""A completion may be moved to an engine that has just become ready if it was sent to another one less than this ago.
Engines of one start come seconds apart (3 s, measured): without that the first of them gets all that waited, and the
others nothing until it has done it all (98 s instead of 26 s, measured with three engines on an H200)."""

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What the proxy accepts and how long it tries; the fields are settings of a recipe's [proxy] section."""

    max_body_bytes: int = 256 << 20
    """A prompt of a million token ids is 7 MB; images in messages are larger."""
    max_batch: int = 4096
    max_parked: int = 65536
    park_timeout_s: float = 1800.0
    max_redispatches: int = 8
    """Failures of engines that had the completion in hand; refused connections do not count."""


@dataclass(slots=True)
class Job:
    """One prompt's request as it goes to engines: under `name`, which the client calls `public`.

    `judged`: its answer must be a complete completion.
    """

    name: str
    public: str
    path: bytes
    body: bytes
    headers: Headers
    prefix: Prefix | None
    max_tokens: int | None
    choices: int
    judged: bool


@dataclass(slots=True)
class EngineCounters:
    """What an engine completed."""

    completions: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Taken(Generic[T]):
    """What came of a dispatch, and where."""

    value: T
    decision: Decision


class Dispatcher:
    """Chooses engines, sends, judges by `take`, and sends again; keeps count of all of it."""

    def __init__(
        self, pool: Pool, limits: Limits, router: Router | None = None, counters: Counters | None = None
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.router = router or Router()
        self.counters = counters or Counters()
        self.engines: dict[str, EngineCounters] = defaultdict(EngineCounters)
        self.parking = Parking(pool.wait_for, max_parked=limits.max_parked, park_timeout_s=limits.park_timeout_s)
        self._connections = Connections()
        self._guards: dict[str, set[Guard]] = defaultdict(set)
        pool.subscribe(self)

    def close(self) -> None:
        """Closes the idle sockets to engines."""
        self._connections.close()

    def engine_ready(self, engine: str) -> None:
        """It takes over what the others have only just begun, as much as gives all the same to do.

        What was moved least goes first, then the youngest. Engines that come one after the other have to be given the
        same completions more than once; were it always the last to come that goes on, it would never get anywhere.
        """
        ready = self.pool.ready()
        work = {each: [guard for guard in self._guards[each] if not guard.abandoned] for each in {*ready, engine}}
        share = sum(map(len, work.values())) // len(work)
        lacks = share - len(work[engine])
        names = {guard.name for guards in work.values() for guard in guards if guard.name is not None}
        served = {name for name in names if engine in self.pool.candidates(name)}
        now = time.monotonic()
        for guards in sorted(work.values(), key=len, reverse=True):
            young = [guard for guard in guards if guard.name in served and now - guard.since < YOUNG_S]
            young.sort(key=lambda guard: (guard.moves, -guard.since))
            for guard in young[: max(0, min(len(guards) - share, lacks))]:
                guard.abandon(moved=True)
                lacks -= 1

    def engine_left(self, engine: str) -> None:
        """What it had cached is gone."""
        self.router.forget_engine(engine)

    def engine_gone(self, engine: str) -> None:
        """What is in flight there is closed and goes elsewhere."""
        self.router.forget_engine(engine)
        for guard in list(self._guards[engine]):
            guard.abandon()

    def version_retired(self, name: str) -> None:
        """Nothing is remembered of it."""
        self.router.forget_version(name)

    async def dispatch(self, job: Job, take: Callable[[Response], Awaitable[T]]) -> Taken[T]:
        """Sends the job to one engine after another until `take` accepts a response.

        `take` must leave the response read or closed, or keep it as its own. The decision counts as outstanding until
        the caller hands it to `finished` or `cancelled`.

        Raises:
            Unserved: the limits are used up; with the last engine's words.
            VersionFailed: no engine can load the version.
        """
        excluded: set[str] = set()
        failures = moves = 0
        since: float | None = None
        last = ""
        while True:
            every = self.pool.candidates(job.name)
            candidates = [engine for engine in every if engine not in excluded] if excluded else every
            if not candidates:
                excluded.clear()
                now = time.monotonic()
                if not every:
                    await self.parking.park(job.name, since)
                elif since is not None and now - since > self.limits.park_timeout_s:
                    raise Unserved(
                        f"No engine answered within proxy.park_timeout_s = {now - since:g} s; the last: {last}"
                    )
                else:
                    await asyncio.sleep(min(MAX_REST_S, REST_S * 2**failures))
                since = now if since is None else since
                continue
            decision = self.router.choose(job.name, job.prefix, candidates, job.max_tokens, time.monotonic())
            self._count(decision)
            try:
                with self.guard(decision.engine, job.name, moves):
                    return Taken(await take(await self._send(decision.engine, job)), decision)
            except Moved as moved:
                self.router.cancelled(decision)
                last = f"engine {decision.engine}: {moved}"
                excluded.add(decision.engine)
                moves, since = moves + 1, None
            except Elsewhere as elsewhere:
                self.router.cancelled(decision)
                last = f"engine {decision.engine}: {elsewhere.reason}"
                excluded.add(decision.engine)
                if elsewhere.delivered:  # an engine had it: what it waits from now on is another wait
                    failures, since = failures + 1, None
                self._blame(decision.engine, job.name, elsewhere)
            except BaseException:
                self.router.cancelled(decision)
                raise
            if failures > self.limits.max_redispatches:
                raise Unserved(
                    f"{failures} engines failed this completion, more than proxy.max_redispatches = "
                    f"{self.limits.max_redispatches} allows for; the last was {last}"
                )
            self.counters.redispatched += 1

    def finished(self, decision: Decision, tokens: int) -> None:
        """The completion is complete, with so many tokens."""
        self.router.finished(decision, tokens, time.monotonic())
        engine = self.engines[decision.engine]
        engine.completions += 1
        engine.tokens += tokens

    def cancelled(self, decision: Decision) -> None:
        """The completion is off, or was no completion."""
        self.router.cancelled(decision)

    def guard(self, engine: str, name: str | None = None, moves: int = 0) -> "Guard":
        """A context in which this task works with the engine: left by `Elsewhere` when the engine is given up. With the
        `name` that the work is under also by `Moved`, when another engine is to do it; `moves` is how often one was."""
        return Guard(self._guards[engine], name, moves)

    async def open(self, engine: str, method: str, path: bytes, headers: Headers, body: bytes) -> Response:
        """Sends one request to one engine and returns its response, of which only the head has been read.

        Raises:
            Elsewhere: the engine could not be reached, or broke off.
        """
        url = self.pool.url(engine)
        request = (url, method.encode(), path, headers, body)
        try:
            try:
                return await self._connections.request(*request)
            except BrokenOff as error:
                if not error.stale:
                    raise
                self.counters.upstream_retries += 1
                return await self._connections.request(*request, fresh=True)
        except Unreachable as error:
            raise Elsewhere(str(error), Blame.ENGINE, delivered=False) from error
        except BrokenOff as error:
            raise Elsewhere(str(error), Blame.ENGINE) from error

    async def _send(self, engine: str, job: Job) -> Response:
        return await self.open(engine, "POST", job.path, job.headers, job.body)

    def _count(self, decision: Decision) -> None:
        if decision.affinity:
            self.counters.affinity += 1
        else:
            self.counters.cold += 1
            self.counters.spilled += decision.spilled

    def _blame(self, engine: str, name: str, elsewhere: Elsewhere) -> None:
        if elsewhere.blame is Blame.ENGINE:
            self.pool.failed(engine, elsewhere.reason)
        elif elsewhere.blame is Blame.VERSION:
            self.pool.missing(engine, name)


class Moved(Exception):
    """Another engine is to do this, though nothing is wrong with the one that had begun it."""

    def __init__(self) -> None:
        super().__init__("moved to an engine that had just become ready")


class Guard(AbstractContextManager["Guard"]):
    """While it is entered, `abandon` ends the task's work with one engine, and nothing else of the task."""

    __slots__ = ("_among", "_moved", "_task", "abandoned", "moves", "name", "since")

    def __init__(self, among: set["Guard"], name: str | None = None, moves: int = 0) -> None:
        self._among = among
        self.name = name
        self.moves = moves
        self.since = time.monotonic()
        self._task = asyncio.current_task()
        self.abandoned = self._moved = False

    def __enter__(self) -> "Guard":
        self._among.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._among.discard(self)
        if not self.abandoned or self._task is None:
            return
        # If the client went away as well, the task was cancelled twice and has to end.
        if self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise (Moved() if self._moved else Elsewhere("given up while it worked on this", Blame.NOTHING)) from error

    def abandon(self, *, moved: bool = False) -> None:
        """Ends the work at the next await: the engine is given up, or is well and the work is `moved` elsewhere."""
        if self._task is not None and not self.abandoned:
            self.abandoned, self._moved = True, moved
            self._task.cancel()
