"""The fleet: which engine may answer which version, and what each engine has to do next. Pure: no I/O and no clock.

Events come in as method calls with `now` (seconds of any monotonic clock); `jobs.links` makes the calls and does the
I/O. What must hold, whatever the order of events:

* An engine gets completions only in `ready`, and for a version only after it proved that version since its last boot.
* A new version never takes an engine out of `ready`. A refusal, or the load deadline, does (until it can, or the
  version goes).
* A changed boot id, or a changed URL, means that everything the engine held is forgotten.
* A wire name means one digest, for ever.
* A version that failed is unloaded from wherever it may be; the others are untouched.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

from jobs.engine import BASE, Action, Engine, EngineState, Facts, Holding, Load, Prove, Unload
from jobs.standing import blocker, complaints, late, objection, pause_s, place
from jobs.version import ACTIVE, REMEMBERED_VERSIONS, Ack, Version, VersionRefused, VersionState
from jobs.work import next_action, ready, serving, wanted

DEAD_AFTER_S = 5.0
"""An engine that is away this long is given up, though it may come back with the same boot id: what is in flight
there is sent elsewhere. Chosen between the longest pause of a healthy server and the shortest restart of one (16 s,
measured on CPU)."""
FORGIVEN_AFTER_S = 60.0
"""A completion that fails this long after the one before starts a new count of failures. Chosen."""


@dataclass(frozen=True)
class Event:
    """Something that others act on: `kind` is "ready", "left" (ready) or "given up" (of an engine), "retiring",
    "retired", "failed" or "forgotten" (of a version)."""

    kind: str
    name: str


class Fleet:
    """Engines and versions of one run's attempt. `model` and `dtype` None: the first engine that answers decides."""

    def __init__(
        self,
        run: str,
        attempt: int,
        ack: Ack = Ack.PUBLISHED,
        load_deadline_s: float = 600.0,
        model: str | None = None,
        dtype: str | None = None,
    ) -> None:
        self.run, self.attempt, self.ack, self.load_deadline_s = run, attempt, ack, load_deadline_s
        self.model, self.dtype = model, dtype
        self.promised: Facts | None = None
        self.engines: dict[str, Engine] = {}
        self.versions: dict[str, Version] = {}
        self.fatal: str | None = None
        self._events: list[Event] = []
        self._order = count()

    # Membership

    def added(self, name: str, url: str, now: float) -> None:
        """The replica set names this engine. A known one under another URL is a new boot."""
        engine = self.engines.get(name)
        if engine is None:
            self.engines[name] = Engine(name, url, away_since=now)
        elif engine.url != url or engine.state is EngineState.GONE:
            self._give_up(engine)
            engine.forget()
            engine.url, engine.leaving = url, False
            engine.away_since, engine.away_reason = now, None
            self._enter(engine, EngineState.JOINING, None)
        elif engine.leaving:
            engine.leaving = False
            engine.owed = self._owed(engine)
        self._settle(now)

    def removed(self, name: str, now: float) -> None:
        """The replica set names it no longer: no new completions, gone when the last one is answered (`drained`)."""
        if engine := self.engines.get(name):
            engine.leaving = True
            self._settle(now)

    def drained(self, name: str, now: float) -> None:
        """A draining engine has no completion in flight."""
        if (engine := self.engines.get(name)) and engine.state is EngineState.DRAINING:
            self._enter(engine, EngineState.GONE, engine.reason)
            self._settle(now)

    # What is seen of an engine

    def answered(
        self, name: str, boot_id: str, facts: Facts, inventory: Mapping[str, str], asked_at: float, now: float
    ) -> None:
        """The engine told its state. What happened to it after `asked_at` is newer than this answer and stays."""
        engine = self.engines.get(name)
        if engine is None or engine.state is EngineState.GONE:
            return
        if engine.away_since is not None and engine.away_since > asked_at:
            return
        if engine.boot_id != boot_id:
            if engine.boot_id is not None:
                self._give_up(engine)
            engine.forget()
            engine.boot_id = boot_id
        engine.facts, engine.rejected = facts, objection(facts, self.model, self.dtype, self.promised)
        if not engine.rejected:
            self.model, self.dtype = self.model or facts.model, self.dtype or facts.dtype
        self._take_stock(engine, inventory, asked_at, now)
        if not engine.reachable:
            engine.reachable, engine.away_since, engine.away_reason = True, None, None
            for holding in engine.holdings.values():
                holding.since = None
            engine.owed = self._owed(engine)
            if engine.state is EngineState.READY:  # the poll saw the next boot before it missed the last one
                self._enter(engine, EngineState.BACKFILLING, "started again")
        self._settle(now)

    def unreachable(self, name: str, reason: str, now: float) -> None:
        """The engine did not tell its state."""
        if engine := self.engines.get(name):
            self._lost(engine, reason, now)
            self._settle(now)

    def failed(self, name: str, reason: str, now: float) -> None:
        """A completion met a reset, a refused connection or a 5xx: no more of them before it answered the base
        canary."""
        if (engine := self.engines.get(name)) and engine.boot_id is not None:
            base = engine.holding(BASE)
            if not engine.reachable and not base.proved:  # all that is in flight there says the same
                return
            if engine.state is EngineState.READY:
                base.failures = base.failures + 1 if now - base.changed_at < FORGIVEN_AFTER_S else 1
                base.not_before = now + (pause_s(base.failures - 1) if base.failures > 1 else 0)
                base.changed_at = now
            base.proved, base.words = False, reason
            self._lost(engine, reason, now)
            self._settle(now)

    def missing(self, name: str, wire: str, now: float) -> None:
        """The engine answered 404 for a version it was thought to hold."""
        if (engine := self.engines.get(name)) and (holding := engine.holdings.get(wire)):
            holding.held = holding.proved = False
            holding.since = holding.changed_at = now
            self._settle(now)

    # What an engine has to do

    def take(self, name: str, now: float) -> Action | None:
        """The next action for an engine (`jobs.work.next_action`), which counts as begun; None if there is none now."""
        engine = self.engines[name]
        if engine.busy or not engine.answers:
            return None
        action = next_action(engine, self.engines.values(), self.versions, (self.run, self.attempt), now)
        return self._begin(engine, action) if action else None

    def still_wanted(self, action: Action) -> bool:
        """Whether an action under way is worth waiting for."""
        engine, version = self.engines[action.engine], self.versions.get(action.wire)
        if engine.boot_id != action.boot_id or not engine.answers:
            return False
        return (
            isinstance(action, Unload)
            or action.wire == BASE
            or (version is not None and wanted(engine, version, self.engines.values()))
        )

    def loaded(self, action: Load, seconds: float, now: float) -> None:
        """The engine took the load."""
        if (holding := self._finish(action)) and (version := self.versions.get(action.wire)):
            holding.held, holding.digest, holding.changed_at = True, version.digest, now
            holding.load_s, holding.failures, holding.words = seconds, 0, None
        self._settle(now)

    def proved(self, action: Prove, now: float) -> None:
        """The canary was right."""
        if holding := self._finish(action):
            holding.proved = action.wire == BASE or holding.held
            holding.words = None
            if action.wire != BASE or now - holding.changed_at >= FORGIVEN_AFTER_S:
                holding.failures = 0
            if holding.proved:
                self.engines[action.engine].owed.discard(action.wire)
        self._settle(now)

    def unloaded(self, action: Unload, now: float) -> None:
        """The engine holds the version no longer."""
        if holding := self._finish(action):
            self.engines[action.engine].holdings[action.wire] = Holding(changed_at=now, attempts=holding.attempts)
        self._settle(now)

    def lagging(self, action: Action, words: str, now: float) -> None:
        """It did not work and may work later: tried again on this engine alone, with back-off."""
        if holding := self._finish(action):
            holding.words, holding.failures = words, holding.failures + 1
            holding.not_before = now + pause_s(holding.failures)
        self._settle(now)

    def refused(self, action: Action, words: str, now: float) -> None:
        """It can never work in this boot of the engine."""
        if holding := self._finish(action):
            holding.words, holding.permanent, holding.proved, holding.changed_at = words, True, False, now
        self._settle(now)

    def disproved(self, name: str, wire: str, words: str, now: float) -> None:
        """It turned out that the engine serves something else under this name: never again in this boot."""
        if (engine := self.engines.get(name)) and (holding := engine.holdings.get(wire)):
            holding.words, holding.permanent, holding.proved = words, True, False
            self._settle(now)

    # Versions

    def publishing(self, wire: str, digest: str, now: float) -> Version:
        """A publish begins, or begins again. The version is returned as it stands: it may be live already.

        Raises:
            VersionRefused: the name stands for another adapter, or every adapter slot is taken by a live version.
        """
        version = self.versions.get(wire)
        if version and version.digest != digest:
            raise VersionRefused(
                f"{wire} stands for the adapter with digest {version.digest[:12]} for ever and cannot become "
                f"{digest[:12]}: publish new weights under a new name."
            )
        if version is None or version.state not in (VersionState.PUBLISHING, VersionState.LIVE):
            self._make_room(now)
            order, in_flight = (version.order, version.in_flight) if version else (next(self._order), 0)
            version = self.versions[wire] = Version(wire, digest, order, in_flight=in_flight)
            for engine in self.engines.values():
                if holding := engine.holdings.get(wire):
                    holding.permanent, holding.words, holding.since = False, None, None
                    holding.failures, holding.not_before = 0, 0.0
                    self._check_digest(engine, wire)
        return version

    def published(self, wire: str, now: float) -> None:
        """The version is durable and valid: engines load it from now on."""
        version = self.versions[wire]
        if version.state is VersionState.PUBLISHING and not version.published:
            version.published = True
        self._settle(now)

    def abandoned(self, wire: str, words: str, now: float) -> None:
        """The publish failed before the version was acknowledged."""
        if (version := self.versions.get(wire)) and version.state is VersionState.PUBLISHING:
            self._fail(version, words)
        self._settle(now)

    def recovered(self, wire: str, digest: str, state: VersionState, words: str | None = None) -> None:
        """A version that an earlier process of this proxy published; called oldest first, before any other event."""
        self.versions[wire] = Version(
            wire, digest, next(self._order), state, published=state is VersionState.LIVE, words=words, recovered=True
        )

    def retire(self, wire: str, now: float) -> bool:
        """The trainer unloads it: it goes when no completion is under it. False if it was not live."""
        version = self.versions.get(wire)
        if version is None or version.state is not VersionState.LIVE:
            return False
        version.state = VersionState.RETIRING
        self._events.append(Event("retiring", wire))
        self._unowe(wire)
        self._settle(now)
        return True

    def begin(self, wire: str, now: float) -> None:
        """A completion under the version starts, or starts to wait. Revives a retired version."""
        if version := self.versions.get(wire):
            version.in_flight += 1
            if version.in_flight == 1 and version.state in (VersionState.RETIRED, VersionState.RETIRING):
                version.state = VersionState.RETIRING
                self._settle(now)

    def end(self, wire: str, now: float) -> None:
        """A completion under the version is over, whatever came of it."""
        if version := self.versions.get(wire):
            version.in_flight -= 1
            if version.in_flight == 0 and version.state is VersionState.RETIRING:
                self._settle(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._settle(now)

    def promise(self) -> Facts | None:
        """What the trainer is told of its server, the smallest of each number; None while no engine has answered.

        It is told once and relies on it, so an engine that comes later and offers less is not taken.
        """
        facts = [engine.facts for engine in self.members() if engine.facts]
        if self.promised is None and facts:
            numbers = ((f.max_model_len, f.max_loras, f.max_lora_rank) for f in facts)
            self.promised = Facts(
                facts[0].model, facts[0].dtype, *(min(column) for column in zip(*numbers, strict=True))
            )
        return self.promised

    # Queries

    def candidates(self, wire: str) -> list[str]:
        """Engines that may answer a completion under the version (`BASE`: the base model)."""
        version = self.versions.get(wire)
        if wire != BASE and (version is None or version.state not in (VersionState.LIVE, VersionState.RETIRING)):
            return []
        return [engine.name for engine in serving(wire, self.engines.values())]

    def ready(self) -> list[Engine]:
        """Engines in `ready`."""
        return ready(self.engines.values())

    def live(self) -> list[Version]:
        """Live versions, oldest first."""
        return sorted((v for v in self.versions.values() if v.state is VersionState.LIVE), key=lambda v: v.order)

    def hopeless(self, wire: str, now: float) -> str | None:
        """Why no completion under this version will be answered, in the engines' words; None while there is hope."""
        version = self.versions[wire]
        if version.state is VersionState.FAILED:
            return version.words
        able = [engine for engine in self.engines.values() if engine.answers]
        unable = [
            e for e in able if (h := e.holdings.get(wire)) and (h.permanent or late(h, self.load_deadline_s, now))
        ]
        hope = any(e.away and now - (e.away_since or 0.0) < self.load_deadline_s for e in self.engines.values())
        return complaints(wire, unable) if able and len(unable) == len(able) and not hope else None

    @property
    def generation_stall_s(self) -> float:
        """Seconds in which a ready engine got nothing because it could not serve a new version, summed over the
        engines.

        0 by construction while syncs go well: neither a publish nor a load takes an engine out of `ready`."""
        return sum(engine.stall_s for engine in self.engines.values())

    def members(self) -> list[Engine]:
        """Engines that answered, belong to the run and are not leaving, whether they can be reached now or not."""
        return [e for e in self.engines.values() if e.facts and not e.rejected and not e.leaving]

    @property
    def has_events(self) -> bool:
        """Whether something happened since the last `drain_events`."""
        return bool(self._events)

    def drain_events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    # Rules about engines

    def _owed(self, engine: Engine) -> set[str]:
        proved = {wire for wire, holding in engine.holdings.items() if holding.proved}
        return {version.wire for version in self.live()} - proved

    def _unowe(self, wire: str) -> None:
        for engine in self.engines.values():
            engine.owed.discard(wire)

    def _take_stock(self, engine: Engine, inventory: Mapping[str, str], asked_at: float, now: float) -> None:
        """Brings what is thought to be held in line with what the engine says it holds."""
        busy = engine.busy.wire if engine.busy else None
        for wire, digest in inventory.items():
            holding = engine.holding(wire)
            if wire != busy and holding.changed_at <= asked_at:
                holding.held, holding.touched, holding.digest = True, True, digest
                self._check_digest(engine, wire)
        for wire, holding in engine.holdings.items():
            if wire not in inventory and holding.held and wire != busy and holding.changed_at <= asked_at:
                holding.held = holding.proved = False
                holding.since = now

    def _check_digest(self, engine: Engine, wire: str) -> None:
        holding, version = engine.holdings[wire], self.versions.get(wire)
        if holding.held and version and holding.digest != version.digest:
            holding.permanent, holding.proved = True, False
            holding.words = (
                f"holds digest {(holding.digest or '')[:12]} under {wire}, published was {version.digest[:12]}"
            )

    def _lost(self, engine: Engine, reason: str, now: float) -> None:
        engine.away_reason = reason
        if engine.reachable:
            engine.reachable, engine.away_since = False, now
        if engine.leaving and engine.state is EngineState.DRAINING:
            self._give_up(engine)

    def _give_up(self, engine: Engine) -> None:
        """Counts the end of a boot that was ready, once, and has what is in flight there sent elsewhere."""
        if not engine.dead and engine.was_ready:
            engine.dead = True
            engine.deaths += 1
            self._events.append(Event("given up", engine.name))

    def _begin(self, engine: Engine, action: Action) -> Action:
        holding = engine.holding(action.wire)
        if isinstance(action, Load):
            holding.attempts += 1
            holding.touched = True
        elif isinstance(action, Unload):
            holding.proved = False
        engine.busy = action
        return action

    def _finish(self, action: Action) -> Holding | None:
        engine = self.engines.get(action.engine)
        if engine is None or engine.busy is not action:
            return None
        engine.busy = None
        return engine.holding(action.wire)

    def _enter(self, engine: Engine, state: EngineState, reason: str | None) -> None:
        before, engine.state, engine.reason = engine.state, state, reason
        if state is before:
            return
        if state is EngineState.READY:
            engine.was_ready = True
            engine.rejoins += engine.dead
            engine.dead = False
            self._events.append(Event("ready", engine.name))
        elif before is EngineState.READY:
            self._events.append(Event("left", engine.name))
        if state is EngineState.GONE and not engine.dead:
            self._events.append(Event("given up", engine.name))

    # Rules about versions

    def _active(self) -> list[Version]:
        return [version for version in self.versions.values() if version.state in ACTIVE]

    def _make_room(self, now: float) -> None:
        """Every live version keeps its adapter slot: vLLM would evict one without a word.

        A version recovered from the bucket may have been unloaded just before this proxy's last process was killed,
        with its mark not yet written, so the oldest of those makes room.
        """
        offers = [facts.max_loras for facts in (self.promised, *(e.facts for e in self.members())) if facts]
        slots = min(offers, default=None)
        live = self.live()
        while slots is not None and len(live) >= slots:
            if not live[0].recovered:
                raise VersionRefused(
                    f"max_loras = {slots}: every adapter slot is taken by a live version, {live[0].wire} to "
                    f"{live[-1].wire}. Unload one first, or start the replicas with --max-loras {len(live) + 1}."
                )
            self.retire(live.pop(0).wire, now)

    def _settle(self, now: float) -> None:
        """Draws all conclusions from what is known."""
        for version in self._active():
            for engine in self.engines.values():
                if engine.answers and engine.holding(BASE).proved and wanted(engine, version, self.engines.values()):
                    holding = engine.holding(version.wire)
                    holding.since = now if holding.since is None else holding.since
            self._settle_version(version, now)
        for engine in self.engines.values():
            if engine.state is not EngineState.GONE:
                self._settle_engine(engine, now)
        for version in self._active():
            self._settle_version(version, now)

    def _settle_engine(self, engine: Engine, now: float) -> None:
        if engine.away_since is not None and now - engine.away_since >= DEAD_AFTER_S:
            self._give_up(engine)
        blocked = blocker(engine, self.live(), self.load_deadline_s, now)
        if engine.blocked_since is not None:
            engine.stall_s += now - engine.blocked_since
        stalled = blocked is not None and engine.was_ready and engine.answers
        engine.blocked_since = now if stalled else None
        self._enter(engine, *place(engine, blocked))

    def _settle_version(self, version: Version, now: float) -> None:
        if version.state is VersionState.PUBLISHING and version.published:
            self._settle_load(version, now)
        elif version.state is VersionState.RETIRING and version.in_flight == 0:
            if not any((h := e.holdings.get(version.wire)) and h.touched for e in self.engines.values() if e.answers):
                version.state = VersionState.RETIRED
                self._events.append(Event("retired", version.wire))
                self._forget()
        elif version.state is VersionState.LIVE and self.fatal is None and (words := self.hopeless(version.wire, now)):
            # The trainer was told that it is there: a promise that nobody can keep ends the run.
            self.fatal = f"no replica can serve {version.wire}: {words}"

    def _settle_load(self, version: Version, now: float) -> None:
        """The load as one transaction: acknowledged as `ack` demands, or failed everywhere.

        The deadline is for engines that are ready: while none is, the load waits as completions do.
        """
        ready, able = self.ready(), serving(version.wire, self.engines.values())
        refusing = [engine for engine in ready if (h := engine.holdings.get(version.wire)) and h.permanent]
        enough = {Ack.PUBLISHED: True, Ack.FIRST: bool(able), Ack.ALL: bool(able) and len(able) == len(ready)}
        if enough[self.ack]:
            version.state = VersionState.LIVE
        elif refusing and (self.ack is Ack.ALL or len(refusing) == len(ready)):
            self._fail(version, complaints(version.wire, refusing))
        elif not ready or version.deadline is None:
            version.deadline = now + self.load_deadline_s
        elif now >= version.deadline:
            words = complaints(version.wire, [engine for engine in ready if engine not in able])
            self._fail(version, f"not loaded within {self.load_deadline_s:g} s: {words}")

    def _fail(self, version: Version, words: str) -> None:
        version.state, version.words = VersionState.FAILED, words
        self._unowe(version.wire)
        self._events.append(Event("failed", version.wire))
        self._forget()

    def _forget(self) -> None:
        """Keeps the books short however long the run: of the versions that are over, the newest stay known."""
        over = [v for v in self.versions.values() if v.state not in ACTIVE and not v.in_flight]
        for version in sorted(over, key=lambda v: v.order)[:-REMEMBERED_VERSIONS]:
            del self.versions[version.wire]
            for engine in self.engines.values():
                engine.holdings.pop(version.wire, None)
            self._events.append(Event("forgotten", version.wire))
