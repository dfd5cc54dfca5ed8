"""What an engine has to do next: the difference between what it holds and what it should. Plain functions."""

from collections.abc import Iterable, Mapping

from jobs.engine import BASE, Action, Engine, EngineState, Load, Prove, Unload
from jobs.names import parse_wire
from jobs.version import ACTIVE, Version, VersionState


def next_action(
    engine: Engine, engines: Iterable[Engine], versions: Mapping[str, Version], own: tuple[str, int], now: float
) -> Action | None:
    """The next action for an engine that answers; None when there is nothing to do at `now`. `own`: run and attempt.

    Order: the base canary; while it is backfilled, what it needs to be ready; what it holds and has only to prove,
    since a load may wait for the bucket; then versions that completions wait for and no engine serves; then the newest
    first, since that is what a sync and most completions wait for. Unloads come last, unless every adapter slot is
    taken.
    """
    if engine.boot_id is None or engine.facts is None:
        return None
    name, boot_id, base = engine.name, engine.boot_id, engine.holding(BASE)
    if not base.proved:
        return Prove(name, BASE, boot_id) if base.not_before <= now else None
    spare = [w for w, h in engine.holdings.items() if _unwanted(engine, w, versions, own) and h.not_before <= now]
    ours = [w for w, h in engine.holdings.items() if h.held and (w in spare or w in versions)]
    if spare and len(ours) >= engine.facts.max_loras:
        return Unload(name, spare[0], boot_id)
    engines = list(engines)
    active = [version for version in versions.values() if version.state in ACTIVE]

    def urgency(version: Version) -> tuple[bool, bool, bool, int]:
        needless = engine.state is not EngineState.READY and version.wire not in engine.owed
        served = version.in_flight == 0 or bool(serving(version.wire, engines))
        return needless, not engine.holding(version.wire).held, served, -version.order

    for version in sorted(active, key=urgency):
        holding = engine.holding(version.wire)
        to_do = not (holding.proved or holding.permanent) and holding.not_before <= now
        if to_do and wanted(engine, version, engines):
            return (Prove if holding.held else Load)(name, version.wire, boot_id)
    return Unload(name, spare[0], boot_id) if spare else None


def wanted(engine: Engine, version: Version, engines: Iterable[Engine]) -> bool:
    """Whether the engine should hold this version.

    A live one: every engine. A retiring one that completions are under: those that hold it, or all if none serves it.
    """
    if version.state is VersionState.RETIRING:
        holding = engine.holdings.get(version.wire)
        return version.in_flight > 0 and bool((holding and holding.held) or not serving(version.wire, engines))
    return version.published and version.state in ACTIVE


def ready(engines: Iterable[Engine]) -> list[Engine]:
    """Engines in `ready`."""
    return [engine for engine in engines if engine.state is EngineState.READY]


def serving(wire: str, engines: Iterable[Engine]) -> list[Engine]:
    """Ready engines that proved the version."""
    return [engine for engine in ready(engines) if (h := engine.holdings.get(wire)) and h.proved]


def _unwanted(engine: Engine, wire: str, versions: Mapping[str, Version], own: tuple[str, int]) -> bool:
    """Whether the engine may hold something of this run that nobody can ask for."""
    if not engine.holdings[wire].touched:
        return False
    if version := versions.get(wire):
        return version.state not in ACTIVE or (version.state is VersionState.RETIRING and version.in_flight == 0)
    name, (run, attempt) = parse_wire(wire), own
    # Left by an earlier attempt of this run, whose trainer is no more, or forgotten. Other runs' adapters are theirs.
    return name is not None and name.run == run and name.attempt <= attempt
