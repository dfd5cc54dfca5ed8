"""The fleet's rules, by tables and by arbitrary sequences of events."""

import asyncio
from collections.abc import Callable
from copy import deepcopy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jobs.engine import BASE, Action, EngineState, Facts, Load, Prove, Unload
from jobs.fleet import DEAD_AFTER_S, Event, Fleet
from jobs.pool import FleetPool
from jobs.standing import LONGEST_PAUSE_S, pause_s
from jobs.version import REMEMBERED_VERSIONS, Ack, VersionRefused, VersionState

FACTS = Facts("tiny", "torch.float32", 256, 3, 8)
V1, V2, V3, V4 = (f"run.2.v{n}" for n in (1, 2, 3, 4))


def answer(fleet: Fleet, name: str, now: float, boot: str = "a", **inventory: str) -> None:
    """The engine answers, holding what this boot of it was told to hold."""
    engine = fleet.engines[name]
    held = {w: h.digest or "" for w, h in engine.holdings.items() if h.held} if engine.boot_id == boot else {}
    fleet.answered(name, boot, FACTS, held | inventory, now, now)


def work(fleet: Fleet, name: str, now: float) -> list[Action]:
    """Lets an engine do all it has to, successfully; returns what that was."""
    done: list[Action] = []
    while action := fleet.take(name, now):
        done.append(action)
        if isinstance(action, Load):
            fleet.loaded(action, 0.5, now)
        elif isinstance(action, Prove):
            fleet.proved(action, now)
        elif isinstance(action, Unload):
            fleet.unloaded(action, now)
    return done


def publish(fleet: Fleet, wire: str, now: float, digest: str = "") -> None:
    fleet.publishing(wire, digest or f"digest of {wire}", now)
    fleet.published(wire, now)


def fleet_of(*names: str, ack: Ack = Ack.PUBLISHED, deadline_s: float = 60.0) -> Fleet:
    """A fleet of engines that are all ready at time 0."""
    fleet = Fleet("run", 2, ack, deadline_s)
    for name in names:
        fleet.added(name, f"http://{name}", 0)
        answer(fleet, name, 0)
        work(fleet, name, 0)
    assert fleet.drain_events() == [Event("ready", name) for name in names]
    return fleet


def states(fleet: Fleet) -> dict[str, str]:
    return {name: str(engine.state) for name, engine in fleet.engines.items()}


def kinds(fleet: Fleet) -> list[Event]:
    return fleet.drain_events()


@pytest.mark.parametrize(
    ("happens", "state"),
    [
        (lambda f: None, EngineState.READY),
        (lambda f: f.unreachable("0", "time-out", 1), EngineState.SUSPECT),
        (lambda f: f.failed("0", "reset", 1), EngineState.SUSPECT),
        (lambda f: f.removed("0", 1), EngineState.DRAINING),
        (lambda f: (f.removed("0", 1), f.drained("0", 2)), EngineState.GONE),
        (lambda f: (f.removed("0", 1), f.added("0", "http://0", 2)), EngineState.READY),
        (lambda f: (f.removed("0", 1), f.unreachable("0", "refused", 2)), EngineState.GONE),
        (lambda f: (f.unreachable("0", "refused", 1), f.removed("0", 2)), EngineState.GONE),
        (lambda f: f.added("0", "http://elsewhere", 1), EngineState.JOINING),
        (lambda f: answer(f, "0", 1, boot="b"), EngineState.BACKFILLING),
        (lambda f: publish(f, V1, 1), EngineState.READY),
        (lambda f: (f.unreachable("0", "time-out", 1), answer(f, "0", 2)), EngineState.READY),
        (lambda f: (f.failed("0", "reset", 1), answer(f, "0", 2)), EngineState.SUSPECT),
        (lambda f: (f.failed("0", "reset", 1), answer(f, "0", 2), work(f, "0", 2)), EngineState.READY),
        (lambda f: (f.failed("0", "reset", 1), answer(f, "0", 0.5)), EngineState.SUSPECT),
    ],
)
def test_transitions_of_a_ready_engine(happens: Callable[[Fleet], object], state: EngineState) -> None:
    fleet = fleet_of("0")
    happens(fleet)
    assert fleet.engines["0"].state is state


def test_an_engine_that_never_answered_is_joining_and_says_why() -> None:
    fleet = Fleet("run", 2)
    fleet.added("0", "http://0", 0)
    fleet.unreachable("0", "connection refused", 1)
    assert (fleet.engines["0"].state, fleet.engines["0"].reason) == (EngineState.JOINING, "connection refused")
    fleet.removed("0", 2)
    assert states(fleet) == {"0": "gone"}


def test_an_engine_is_ready_only_after_the_base_canary() -> None:
    fleet = Fleet("run", 2)
    fleet.added("0", "http://0", 0)
    answer(fleet, "0", 0)
    assert fleet.candidates(BASE) == []
    assert work(fleet, "0", 0) == [Prove("0", BASE, "a")]
    assert fleet.candidates(BASE) == ["0"]


def test_a_publish_takes_no_engine_out_of_ready_and_reaches_only_those_that_proved_it() -> None:
    fleet = fleet_of("0", "1")
    publish(fleet, V1, 1)
    assert states(fleet) == {"0": "ready", "1": "ready"}
    assert fleet.candidates(V1) == []
    assert work(fleet, "1", 2) == [Load("1", V1, "a"), Prove("1", V1, "a")]
    assert fleet.candidates(V1) == ["1"]
    assert fleet.generation_stall_s == 0


def test_a_late_engine_is_backfilled_newest_first_before_it_is_ready() -> None:
    fleet = fleet_of("0")
    for wire in (V1, V2):
        publish(fleet, wire, 1)
    work(fleet, "0", 1)
    fleet.added("1", "http://1", 2)
    answer(fleet, "1", 2)
    assert work(fleet, "1", 3) == [
        Prove("1", BASE, "a"), Load("1", V2, "a"), Prove("1", V2, "a"), Load("1", V1, "a"), Prove("1", V1, "a"),
    ]  # fmt: skip
    assert fleet.candidates(V1) == fleet.candidates(V2) == ["0", "1"]


def test_a_backfilling_engine_gets_nothing_though_it_proved_the_version_asked_for() -> None:
    fleet = fleet_of("0")
    for wire in (V1, V2):
        publish(fleet, wire, 1)
    work(fleet, "0", 1)
    answer(fleet, "0", 2, boot="b")
    for _ in range(3):  # the base, v2 loaded, v2 proved
        action = fleet.take("0", 2)
        fleet.loaded(action, 0.5, 2) if isinstance(action, Load) else fleet.proved(action, 2)
    assert fleet.engines["0"].holdings[V2].proved
    assert (states(fleet)["0"], fleet.candidates(V2)) == ("backfilling", [])
    work(fleet, "0", 3)
    assert fleet.candidates(V2) == fleet.candidates(V1) == ["0"]


def test_what_is_published_during_a_backfill_does_not_prolong_it() -> None:
    fleet = fleet_of("0")
    publish(fleet, V1, 1)
    answer(fleet, "0", 2, boot="b")
    fleet.proved(fleet.take("0", 2), 2)
    load = fleet.take("0", 2)
    publish(fleet, V2, 3)
    fleet.loaded(load, 0.5, 4)
    prove = fleet.take("0", 4)
    assert prove == Prove("0", V1, "b")  # a load of V2 may wait for the bucket
    fleet.proved(prove, 4)
    assert (states(fleet)["0"], fleet.candidates(V1), fleet.candidates(V2)) == ("ready", ["0"], [])
    assert fleet.take("0", 4) == Load("0", V2, "b")


def test_a_long_run_keeps_short_books() -> None:
    fleet = fleet_of("0", "1")
    count = REMEMBERED_VERSIONS + 40
    for version in range(1, count + 1):
        publish(fleet, f"run.2.v{version}", version)
        work(fleet, "0", version)
        if version <= 3:
            work(fleet, "1", version)
        if version == 3:  # it comes back when nobody knows v3 any more
            fleet.unreachable("1", "away", version)
        if version > 2:
            fleet.retire(f"run.2.v{version - 2}", version)
    work(fleet, "0", count)
    assert len(fleet.versions) <= REMEMBERED_VERSIONS + 2 and "run.2.v3" not in fleet.versions
    assert all(len(engine.holdings) <= REMEMBERED_VERSIONS + 3 for engine in fleet.engines.values())
    forgotten = [event.name for event in fleet.drain_events() if event.kind == "forgotten"]
    assert forgotten == [f"run.2.v{version}" for version in range(1, count - 1 - REMEMBERED_VERSIONS)]
    orders = [version.order for version in fleet.versions.values()]
    assert len(set(orders)) == len(orders)
    answer(fleet, "1", count, **{"run.2.v3": "digest of run.2.v3"})
    assert Unload("1", "run.2.v3", "a") in work(fleet, "1", count)
    assert fleet.candidates(f"run.2.v{count}") == ["0", "1"]


def test_a_changed_boot_id_forgets_all_and_counts_a_death_and_a_rejoin() -> None:
    fleet = fleet_of("0")
    publish(fleet, V1, 1)
    work(fleet, "0", 1)
    kinds(fleet)
    answer(fleet, "0", 2, boot="b")
    assert fleet.candidates(V1) == []
    assert kinds(fleet) == [Event("given up", "0"), Event("left", "0")]
    assert work(fleet, "0", 3) == [Prove("0", BASE, "b"), Load("0", V1, "b"), Prove("0", V1, "b")]
    assert (fleet.engines["0"].deaths, fleet.engines["0"].rejoins) == (1, 1)


def test_results_of_the_last_boot_are_ignored() -> None:
    fleet = fleet_of("0")
    publish(fleet, V1, 1)
    load = fleet.take("0", 1)
    answer(fleet, "0", 2, boot="b")
    fleet.loaded(load, 0.5, 3)
    assert not fleet.engines["0"].holding(V1).held
    assert fleet.take("0", 3) == Prove("0", BASE, "b")


def test_inventory_that_survived_is_proved_and_not_loaded_again() -> None:
    fleet = Fleet("run", 2)
    fleet.recovered(V1, "d1", VersionState.LIVE)
    fleet.added("0", "http://0", 0)
    answer(fleet, "0", 0, **{V1: "d1"})
    assert work(fleet, "0", 0) == [Prove("0", BASE, "a"), Prove("0", V1, "a")]
    assert fleet.candidates(V1) == ["0"]


def test_inventory_with_another_digest_is_never_used() -> None:
    fleet = fleet_of("0", "1")
    answer(fleet, "0", 1, **{V1: "forged"})
    publish(fleet, V1, 2)
    work(fleet, "0", 2), work(fleet, "1", 2)
    assert fleet.candidates(V1) == ["1"]
    assert (
        fleet.engines["0"].reason
        == "cannot serve run.2.v1: holds digest forged under run.2.v1, published was digest of ru"
    )


def test_an_old_answer_does_not_undo_a_newer_load() -> None:
    fleet = fleet_of("0")
    publish(fleet, V1, 1)
    work(fleet, "0", 5)
    fleet.answered("0", "a", FACTS, {}, asked_at=4, now=6)
    assert fleet.candidates(V1) == ["0"]
    fleet.answered("0", "a", FACTS, {}, asked_at=7, now=7)
    assert fleet.candidates(V1) == []
    work(fleet, "0", 8)
    assert fleet.candidates(V1) == ["0"]


def test_a_version_answered_with_404_is_loaded_and_proved_again() -> None:
    fleet = fleet_of("0", "1")
    publish(fleet, V1, 1)
    work(fleet, "0", 1), work(fleet, "1", 1)
    fleet.missing("0", V1, 2)
    assert (fleet.candidates(V1), states(fleet)["0"]) == (["1"], "ready")
    assert work(fleet, "0", 2) == [Load("0", V1, "a"), Prove("0", V1, "a")]


def test_a_refusal_suspends_that_engine_alone_until_the_version_goes() -> None:
    fleet = fleet_of("0", "1")
    publish(fleet, V1, 1)
    work(fleet, "0", 1)
    fleet.refused(fleet.take("1", 1), "LoRA rank 16 is greater than max_lora_rank 8.", 2)
    assert states(fleet) == {"0": "ready", "1": "suspect"}
    assert fleet.engines["1"].reason == "cannot serve run.2.v1: LoRA rank 16 is greater than max_lora_rank 8."
    assert fleet.take("1", 1000) is None, "a permanent error was tried again"
    assert fleet.fatal is None
    fleet.tick(5)
    assert fleet.generation_stall_s == 3
    publish(fleet, V2, 5)
    work(fleet, "0", 5), work(fleet, "1", 5)
    fleet.retire(V1, 6)
    work(fleet, "1", 6)
    assert states(fleet) == {"0": "ready", "1": "ready"}


def test_lag_is_tried_again_on_that_engine_alone_with_back_off_and_suspends_it_at_the_deadline() -> None:
    fleet = fleet_of("0", "1", deadline_s=60)
    publish(fleet, V1, 1)
    work(fleet, "0", 1)
    now, pauses = 1.0, []
    while now < 61:
        action = fleet.take("1", now)
        assert isinstance(action, Load)
        assert states(fleet)["1"] == "ready"
        fleet.lagging(action, "No adapter found", now)
        wait = fleet.engines["1"].holding(V1).not_before - now
        assert fleet.take("1", now + wait - 0.01) is None
        pauses.append(wait)
        now += wait
    fleet.tick(now)
    assert pauses[:6] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_PAUSE_S])
    assert fleet.engines["1"].reason == "has not loaded run.2.v1 within 60 s: No adapter found"
    assert fleet.take("0", now) is None
    work(fleet, "1", now)
    assert states(fleet)["1"] == "ready", "it can now"


def test_one_that_every_engine_refuses_is_fatal_in_their_own_words() -> None:
    fleet = fleet_of("0", "1")
    publish(fleet, V1, 1)
    fleet.refused(fleet.take("0", 1), "out of slots", 2)
    assert fleet.fatal is None
    fleet.refused(fleet.take("1", 1), "rank 16", 2)
    assert fleet.fatal == "no replica can serve run.2.v1: replica 0: out of slots; replica 1: rank 16"


def test_an_absent_engine_is_a_hope_until_the_deadline() -> None:
    fleet = fleet_of("0", "1", deadline_s=60)
    fleet.unreachable("1", "connection refused", 1)
    publish(fleet, V1, 2)
    fleet.refused(fleet.take("0", 2), "out of slots", 3)
    assert fleet.fatal is None
    fleet.tick(62)
    assert fleet.fatal == "no replica can serve run.2.v1: replica 0: out of slots"


def test_a_total_outage_is_not_fatal() -> None:
    fleet = fleet_of("0")
    publish(fleet, V1, 1)
    work(fleet, "0", 1)
    fleet.unreachable("0", "connection refused", 2)
    fleet.tick(10_000)
    assert fleet.fatal is None


@pytest.mark.parametrize(("ack", "acknowledged_after"), [(Ack.PUBLISHED, 0), (Ack.FIRST, 1), (Ack.ALL, 2)])
def test_when_a_load_is_acknowledged(ack: Ack, acknowledged_after: int) -> None:
    fleet = fleet_of("0", "1", ack=ack)
    publish(fleet, V1, 1)
    live = [fleet.versions[V1].state is VersionState.LIVE]
    for name in ("0", "1"):
        work(fleet, name, 1)
        live.append(fleet.versions[V1].state is VersionState.LIVE)
    assert live.index(True) == acknowledged_after


def test_ack_all_does_not_wait_for_an_engine_that_died() -> None:
    fleet = fleet_of("0", "1", ack=Ack.ALL)
    publish(fleet, V1, 1)
    work(fleet, "0", 1)
    fleet.failed("1", "reset", 2)
    assert fleet.versions[V1].state is VersionState.LIVE


@pytest.mark.parametrize("ack", [Ack.FIRST, Ack.ALL])
def test_a_load_that_fails_is_rolled_back_wherever_it_may_be(ack: Ack) -> None:
    fleet = fleet_of("0", "1", ack=ack, deadline_s=60)
    publish(fleet, V1, 1)
    work(fleet, "0", 1), work(fleet, "1", 1)
    publish(fleet, V2, 2)
    hung, other = fleet.take("1", 2), fleet.take("0", 2)
    if ack is Ack.ALL:
        fleet.loaded(other, 0.5, 3)
        fleet.proved(fleet.take("0", 3), 3)
    else:
        fleet.lagging(other, "slow disk", 3)
    fleet.tick(62)
    version = fleet.versions[V2]
    words = "replica 1: no answer to the load"
    words = words if ack is Ack.ALL else f"replica 0: slow disk; {words}"
    assert (version.state, version.words) == (VersionState.FAILED, f"not loaded within 60 s: {words}")
    assert not fleet.still_wanted(hung)
    fleet.lagging(hung, "cancelled", 62)
    work(fleet, "0", 70), work(fleet, "1", 70)
    for engine in fleet.engines.values():
        assert not engine.holdings[V2].touched
        assert engine.state is EngineState.READY
    assert fleet.candidates(V1) == ["0", "1"]
    assert fleet.candidates(V2) == []
    assert fleet.fatal is None


def test_a_load_waits_while_no_engine_is_ready() -> None:
    fleet = Fleet("run", 2, Ack.FIRST, load_deadline_s=60)
    publish(fleet, V1, 0)
    fleet.added("0", "http://0", 500)
    answer(fleet, "0", 1000)
    assert fleet.versions[V1].state is VersionState.PUBLISHING
    work(fleet, "0", 1000)
    assert fleet.versions[V1].state is VersionState.LIVE


def test_a_failed_version_can_be_published_again_with_the_same_bytes_only() -> None:
    fleet = fleet_of("0", ack=Ack.ALL)
    publish(fleet, V1, 1)
    fleet.refused(fleet.take("0", 1), "out of slots", 2)
    work(fleet, "0", 2)
    with pytest.raises(VersionRefused, match="for ever"):
        fleet.publishing(V1, "other", 3)
    publish(fleet, V1, 3)
    assert work(fleet, "0", 3) == [Load("0", V1, "a"), Prove("0", V1, "a")]
    assert fleet.candidates(V1) == ["0"]


def test_an_identical_repeat_changes_nothing() -> None:
    fleet = fleet_of("0")
    publish(fleet, V1, 1)
    work(fleet, "0", 1)
    publish(fleet, V1, 2)
    assert fleet.take("0", 2) is None
    assert fleet.candidates(V1) == ["0"]


def test_an_unload_waits_for_the_last_completion() -> None:
    fleet = fleet_of("0")
    publish(fleet, V1, 1)
    work(fleet, "0", 1)
    fleet.begin(V1, 2), fleet.begin(V1, 2)
    fleet.retire(V1, 3)
    assert fleet.candidates(V1) == ["0"]
    fleet.end(V1, 4)
    assert fleet.take("0", 4) is None
    fleet.end(V1, 5)
    unload = fleet.take("0", 5)
    assert (unload, fleet.candidates(V1)) == (Unload("0", V1, "a"), [])
    fleet.unloaded(unload, 6)
    assert fleet.versions[V1].state is VersionState.RETIRED
    assert kinds(fleet) == [Event("retiring", V1), Event("retired", V1)]


def test_a_retired_version_is_revived_by_a_completion_and_goes_again() -> None:
    fleet = fleet_of("0", "1")
    publish(fleet, V1, 1)
    work(fleet, "0", 1), work(fleet, "1", 1)
    fleet.retire(V1, 2)
    work(fleet, "0", 2), work(fleet, "1", 2)
    fleet.begin(V1, 3)
    assert work(fleet, "1", 3) == [Load("1", V1, "a"), Prove("1", V1, "a")]
    assert fleet.take("0", 3) is None, "one engine is enough"
    assert fleet.candidates(V1) == ["1"]
    fleet.end(V1, 4)
    assert work(fleet, "1", 4) == [Unload("1", V1, "a")]
    assert fleet.versions[V1].state is VersionState.RETIRED


def test_completions_of_a_retiring_version_go_on_elsewhere() -> None:
    fleet = fleet_of("0", "1")
    publish(fleet, V1, 1)
    work(fleet, "0", 1)
    fleet.begin(V1, 2)
    fleet.retire(V1, 3)
    fleet.unreachable("0", "reset", 4)
    assert work(fleet, "1", 4) == [Load("1", V1, "a"), Prove("1", V1, "a")]
    assert fleet.candidates(V1) == ["1"]


def test_starving_completions_come_before_newer_versions() -> None:
    fleet = fleet_of("0")
    publish(fleet, V1, 1), publish(fleet, V2, 1)
    fleet.begin(V1, 2)
    assert fleet.take("0", 2) == Load("0", V1, "a")


def test_full_slots_are_emptied_first_and_never_overfilled_with_live_versions() -> None:
    fleet = fleet_of("0")
    for wire in (V1, V2, V3):
        publish(fleet, wire, 1)
    work(fleet, "0", 1)
    with pytest.raises(VersionRefused, match=r"max_loras = 3: every adapter slot is taken .* run\.2\.v1 to run\.2\.v3"):
        fleet.publishing(V4, "d4", 2)
    fleet.retire(V1, 2)
    publish(fleet, V4, 2)
    assert work(fleet, "0", 2) == [Unload("0", V1, "a"), Load("0", V4, "a"), Prove("0", V4, "a")]


def test_an_unload_whose_mark_was_lost_with_the_last_process_makes_room() -> None:
    fleet = Fleet("run", 2)
    for wire in (V1, V2, V3):
        fleet.recovered(wire, f"digest of {wire}", VersionState.LIVE)
    fleet.added("0", "http://0", 0)
    answer(fleet, "0", 0)
    work(fleet, "0", 0)
    publish(fleet, V4, 1)
    assert [version.wire for version in fleet.live()] == [V2, V3, V4]


def test_what_an_earlier_attempt_left_is_unloaded_and_what_others_own_is_not() -> None:
    fleet = Fleet("run", 2)
    fleet.added("0", "http://0", 0)
    answer(fleet, "0", 0, **{"run.1.v7": "x", "run.3.v1": "x", "other.1.v1": "x", "handmade": "x"})
    assert work(fleet, "0", 0) == [Prove("0", BASE, "a"), Unload("0", "run.1.v7", "a")]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (Facts("tiny", "torch.bfloat16", 256, 3, 8), "its dtype is 'torch.bfloat16' and the run's is 'torch.float32'"),
        (Facts("other", "torch.float32", 256, 3, 8), "its model is 'other' and the run's is 'tiny'"),
    ],
)
def test_an_engine_of_another_kind_is_never_ready(facts: Facts, words: str) -> None:
    fleet = fleet_of("0")
    fleet.added("1", "http://1", 1)
    fleet.answered("1", "a", facts, {}, 1, 1)
    assert fleet.take("1", 2) is None
    assert fleet.engines["1"].state is EngineState.SUSPECT
    assert words in (fleet.engines["1"].reason or "")


def test_a_disproved_engine_is_not_used_and_the_others_go_on() -> None:
    fleet = fleet_of("0", "1")
    publish(fleet, V1, 1)
    work(fleet, "0", 1), work(fleet, "1", 1)
    fleet.disproved("0", V1, "serves the base model", 2)
    assert fleet.candidates(V1) == ["1"]
    assert fleet.engines["0"].reason == "cannot serve run.2.v1: serves the base model"


def test_a_disproof_counts_for_a_retiring_version_too() -> None:
    fleet = fleet_of("0", "1")
    publish(fleet, V1, 1)
    work(fleet, "0", 1), work(fleet, "1", 1)
    fleet.begin(V1, 2)
    fleet.retire(V1, 2)
    fleet.disproved("0", V1, "serves the base model", 3)
    assert fleet.candidates(V1) == ["1"]
    assert states(fleet) == {"0": "ready", "1": "ready"}


def test_a_version_that_was_unloaded_can_be_loaded_again() -> None:
    fleet = fleet_of("0")
    publish(fleet, V1, 1)
    work(fleet, "0", 1)
    fleet.retire(V1, 2)
    unload = fleet.take("0", 2)
    publish(fleet, V1, 3)
    assert fleet.candidates(V1) == []
    fleet.unloaded(unload, 4)
    assert work(fleet, "0", 4) == [Load("0", V1, "a"), Prove("0", V1, "a")]
    assert fleet.candidates(V1) == ["0"]


def test_the_trainer_is_promised_the_smallest_numbers_and_later_engines_keep_them() -> None:
    fleet = fleet_of("0")
    fleet.added("1", "http://1", 1)
    fleet.answered("1", "a", Facts("tiny", "torch.float32", 128, 9, 16), {}, 1, 1)
    assert fleet.promise() == Facts("tiny", "torch.float32", 128, 3, 8)
    fleet.added("2", "http://2", 2)
    fleet.answered("2", "a", Facts("tiny", "torch.float32", 64, 3, 8), {}, 2, 2)
    reason = "its max_model_len is 64 and the trainer was told 128: start this replica with --max-model-len 128"
    assert (fleet.engines["2"].state, fleet.engines["2"].reason) == (EngineState.SUSPECT, reason)


def test_failures_in_a_row_keep_an_engine_away_longer() -> None:
    fleet = fleet_of("0")
    waits, now = [], 0.0
    for _ in range(8):
        now += 1
        fleet.failed("0", "502", now)
        answer(fleet, "0", now)
        waits.append(fleet.engines["0"].holding(BASE).not_before - now)
        now += waits[-1]
        assert work(fleet, "0", now) == [Prove("0", BASE, "a")]
    assert waits == pytest.approx([0, 0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_PAUSE_S, LONGEST_PAUSE_S])
    fleet.failed("0", "502", now + 100)
    answer(fleet, "0", now + 100)
    assert states(fleet)["0"] == "suspect"
    assert work(fleet, "0", now + 100)


def test_what_else_was_in_flight_on_an_engine_that_failed_says_nothing_new() -> None:
    """Each costs no more than a look: thousands of them come at once."""

    async def main() -> None:
        pool = FleetPool(fleet_of("0", "1"))
        pool.failed("0", "reset")
        assert states(pool.fleet) == {"0": "suspect", "1": "ready"}
        woken = asyncio.create_task(pool.changed(60))
        await asyncio.sleep(0)
        known = deepcopy(pool.fleet.engines)
        for _ in range(3):
            pool.failed("0", "connection refused")
            await asyncio.sleep(0)
        assert pool.fleet.engines == known
        assert not woken.done()
        pool.failed("1", "reset")
        await woken

    asyncio.run(main())


def test_an_engine_that_missed_a_poll_and_then_failed_a_completion_has_to_answer_the_canary() -> None:
    fleet = fleet_of("0")
    fleet.unreachable("0", "no answer", 1)
    fleet.failed("0", "reset", 2)
    answer(fleet, "0", 3)
    assert states(fleet) == {"0": "suspect"}
    assert work(fleet, "0", 3) == [Prove("0", BASE, "a")]
    assert states(fleet) == {"0": "ready"}


def test_an_engine_that_hangs_is_given_up_once() -> None:
    fleet = fleet_of("0")
    fleet.unreachable("0", "no answer", 1)
    fleet.tick(1 + DEAD_AFTER_S)
    fleet.tick(100)
    assert kinds(fleet) == [Event("left", "0"), Event("given up", "0")]
    answer(fleet, "0", 101)
    assert (states(fleet)["0"], fleet.engines["0"].deaths, fleet.engines["0"].rejoins) == ("ready", 1, 1)


def test_a_short_absence_is_no_death() -> None:
    fleet = fleet_of("0")
    fleet.unreachable("0", "no answer", 1)
    answer(fleet, "0", 2)
    assert (fleet.engines["0"].deaths, fleet.engines["0"].rejoins) == (0, 0)


def test_pauses_are_bounded() -> None:
    assert pause_s(10**9) == LONGEST_PAUSE_S


NAMES = st.sampled_from(["0", "1"])
WIRES = st.sampled_from([V1, V2, V3, V4])
ACTION_RESULTS = st.sampled_from(["done", "lagging", "refused"])


class AnyEvents(RuleBasedStateMachine):
    """A model that knows only what each boot of an engine was seen to prove, beside the real thing."""

    @initialize(ack=st.sampled_from(list(Ack)))
    def start(self, ack: Ack) -> None:
        self.fleet = Fleet("run", 2, ack, load_deadline_s=30)
        self.now = 0.0
        self.boots: dict[str, int] = {}
        self.proved: dict[str, set[str]] = {}
        self.held: dict[str, dict[str, str]] = {}
        self.taken: dict[str, tuple[int, Action]] = {}  # with the boot that was asked
        self.digests: dict[str, str] = {}
        self.in_flight: dict[str, int] = {}
        for name in ("0", "1"):
            self.add(name, False)
            self.answer(name, 0)
            self.step(name)

    @rule(name=NAMES)
    def step(self, name: str) -> None:
        """An action without anything in between; the separate rules make the races."""
        self.take(name)
        self.finish(name, "done")

    @rule()
    def recover(self) -> None:
        """All is well for a while, so that sequences get far."""
        for name in self.boots:
            self.answer(name, 0)
            for _ in range(8):
                self.step(name)

    @rule(name=NAMES, moved=st.booleans())
    def add(self, name: str, moved: bool) -> None:
        url = f"http://{name}.{self.now if moved else ''}"
        engine = self.fleet.engines.get(name)
        if engine is None or engine.url != url or engine.state is EngineState.GONE:
            self.boots[name] = self.boots.get(name, 0) + 1
            self.proved[name], self.held[name] = set(), {}
        self.fleet.added(name, url, self.now)

    @precondition(lambda self: self.boots)
    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.fleet.removed(name, self.now)

    @rule(name=NAMES)
    def drained(self, name: str) -> None:
        self.fleet.drained(name, self.now)

    @rule(name=NAMES)
    def reboot(self, name: str) -> None:
        if name in self.boots:
            self.boots[name] += 1
            self.held[name] = {}

    @rule(name=NAMES, age=st.floats(0, 3))
    def answer(self, name: str, age: float) -> None:
        if name not in self.boots:
            return
        engine = self.fleet.engines[name]
        boot = str(self.boots[name])
        if engine.boot_id != boot and engine.state is not EngineState.GONE:
            self.proved[name] = set()
        asked_at = self.now if engine.boot_id != boot else self.now - age
        self.fleet.answered(name, boot, FACTS, self.held[name] if age == 0 else {}, asked_at, self.now)

    @rule(name=NAMES, kind=st.sampled_from(["unreachable", "failed"]))
    def lose(self, name: str, kind: str) -> None:
        getattr(self.fleet, kind)(name, kind, self.now)

    @rule(name=NAMES, wire=WIRES)
    def lose_version(self, name: str, wire: str) -> None:
        self.fleet.missing(name, wire, self.now)
        self.proved.get(name, set()).discard(wire)

    @rule(name=NAMES, wire=WIRES)
    def disprove(self, name: str, wire: str) -> None:
        self.fleet.disproved(name, wire, "serves the base model", self.now)
        self.proved.get(name, set()).discard(wire)

    @rule(name=NAMES)
    def take(self, name: str) -> None:
        if name in self.boots and (action := self.fleet.take(name, self.now)):
            self.taken[name] = (self.boots[name], action)
            if isinstance(action, Unload):
                self.proved[name].discard(action.wire)

    @rule(name=NAMES, result=ACTION_RESULTS)
    def finish(self, name: str, result: str) -> None:
        if name not in self.taken:
            return
        boot, action = self.taken.pop(name)
        if result == "lagging" or self.boots[name] != boot:  # the process that was asked is no more
            self.fleet.lagging(action, "later", self.now)
        elif result == "refused" and not isinstance(action, Unload):
            self.fleet.refused(action, "never", self.now)
        elif isinstance(action, Load):
            self.fleet.loaded(action, 1.0, self.now)
            self.held[name][action.wire] = self.digests[action.wire]
        elif isinstance(action, Prove):
            self.fleet.proved(action, self.now)
            if action.boot_id == self.fleet.engines[name].boot_id:
                self.proved[name].add(action.wire)
        else:
            self.fleet.unloaded(action, self.now)
            self.held[name].pop(action.wire, None)

    @rule(wire=WIRES, digest=st.sampled_from("xxxxy"), publish=st.sampled_from([True, True, True, False]))
    def publish(self, wire: str, digest: str, publish: bool) -> None:
        try:
            self.fleet.publishing(wire, digest, self.now)
        except VersionRefused:
            return
        assert self.digests.setdefault(wire, digest) == digest, "one name, two digests"
        if publish:
            self.fleet.published(wire, self.now)
        else:
            self.fleet.abandoned(wire, "the bucket is away", self.now)

    @rule(wire=WIRES)
    def retire(self, wire: str) -> None:
        self.fleet.retire(wire, self.now)

    @rule(wire=WIRES)
    def begin(self, wire: str) -> None:
        if wire in self.fleet.versions:
            self.fleet.begin(wire, self.now)
            self.in_flight[wire] = self.in_flight.get(wire, 0) + 1

    @rule(wire=WIRES)
    def end(self, wire: str) -> None:
        if self.in_flight.get(wire):
            self.fleet.end(wire, self.now)
            self.in_flight[wire] -= 1

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.fleet.tick(self.now)

    @invariant()
    def only_proved_engines_are_candidates(self) -> None:
        for wire in (*self.fleet.versions, BASE):
            for name in self.fleet.candidates(wire):
                engine = self.fleet.engines[name]
                assert engine.state is EngineState.READY
                assert wire in self.proved[name], f"{name} did not prove {wire or 'the base model'} in this boot"

    @invariant()
    def digests_never_change(self) -> None:
        for wire, version in self.fleet.versions.items():
            assert version.digest == self.digests[wire]

    @invariant()
    def live_versions_fit_the_slots(self) -> None:
        assert len(self.fleet.live()) <= FACTS.max_loras or not self.fleet.ready()

    def teardown(self) -> None:
        """Whatever happened: once the engines are well again, all live versions are everywhere and nothing else is."""
        if not hasattr(self, "fleet"):
            return
        fleet = self.fleet
        for wire, count in self.in_flight.items():
            for _ in range(count):
                fleet.end(wire, self.now)
        self.now += 100
        for name in self.boots:
            self.boots[name] += 1
            fleet.added(name, f"http://{name}.", self.now)
            fleet.answered(name, str(self.boots[name]), FACTS, {V1: "x", "run.1.v1": "old"}, self.now, self.now)
        for _ in range(2):
            for name in self.boots:
                work(fleet, name, self.now)
        live = {version.wire for version in fleet.live()}
        good = {wire for wire in live if not (wire == V1 and self.digests[V1] == "y")}
        for engine in fleet.engines.values():
            assert {wire for wire, h in engine.holdings.items() if h.proved} == good | {BASE}
            assert {wire for wire, h in engine.holdings.items() if h.held} <= live | ({V1} - set(fleet.versions))
            assert engine.state is (EngineState.READY if good == live else EngineState.SUSPECT)


AnyEvents.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None, derandomize=True)
test_any_sequence_of_events = AnyEvents.TestCase
