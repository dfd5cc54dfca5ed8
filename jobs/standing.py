"""Where one engine stands, and why, from what is known of it. Plain functions; `jobs.fleet` draws the conclusions."""

from collections.abc import Iterable

from jobs.engine import BASE, Engine, EngineState, Facts, Holding
from jobs.version import Version

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""Back-off of one action on one engine: doubles from the first to the longest. The bucket mount shows a new object
after about 2.5 s, so the first tries are close together."""


def pause_s(failures: int) -> float:
    """Seconds to wait after so many failures in a row."""
    return min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10), LONGEST_PAUSE_S)


def objection(facts: Facts, model: str | None, dtype: str | None, promised: Facts | None) -> str | None:
    """Why an engine cannot serve the run: another model or dtype, or less than the trainer was told."""
    for name, ours, theirs in (("model", model, facts.model), ("dtype", dtype, facts.dtype)):
        if ours is not None and ours != theirs:
            return f"its {name} is {theirs!r} and the run's is {ours!r}: start this replica with the run's {name}"
    for name in ("max_model_len", "max_loras", "max_lora_rank") if promised else ():
        offered, told = getattr(facts, name), getattr(promised, name)
        if offered < told:
            flag = name.replace("_", "-")
            return f"its {name} is {offered} and the trainer was told {told}: start this replica with --{flag} {told}"
    return None


def late(holding: Holding, deadline_s: float, now: float) -> bool:
    """Whether the engine had `deadline_s` to load and prove a version and did not."""
    return not holding.proved and holding.since is not None and now - holding.since >= deadline_s


def blocker(engine: Engine, live: Iterable[Version], deadline_s: float, now: float) -> str | None:
    """Why the engine cannot serve a live version that it should."""
    for version in live:
        holding = engine.holdings.get(version.wire)
        if holding and holding.permanent:
            return f"cannot serve {version.wire}: {holding.words}"
        if holding and late(holding, deadline_s, now):
            return f"has not loaded {version.wire} within {deadline_s:g} s: {holding.words or 'no answer'}"
    return None


def place(engine: Engine, blocked: str | None) -> tuple[EngineState, str | None]:
    """The state that follows from what is known, and why. `blocked` is what `blocker` found."""
    if engine.leaving:
        return (EngineState.DRAINING if engine.reachable else EngineState.GONE), "left the replica set"
    if engine.boot_id is None:
        return EngineState.JOINING, engine.away_reason
    if not engine.reachable:
        return EngineState.SUSPECT, engine.away_reason
    if engine.rejected or blocked:
        return EngineState.SUSPECT, engine.rejected or blocked
    base = engine.holding(BASE)
    if not base.proved:
        return (EngineState.SUSPECT if engine.was_ready else EngineState.BACKFILLING), base.words
    if engine.state is EngineState.READY or not engine.owed:
        return EngineState.READY, None
    return EngineState.BACKFILLING, f"{len(engine.owed)} live versions to load and prove"


def complaints(wire: str, engines: Iterable[Engine]) -> str:
    """Each engine's own words about a version, with its name and the number of tries."""
    parts = []
    for engine in engines:
        holding = engine.holding(wire)
        tries = f" ({holding.attempts} tries)" if holding.attempts > 1 else ""
        parts.append(f"replica {engine.name}{tries}: {holding.words or 'no answer to the load'}")
    return "; ".join(parts)
