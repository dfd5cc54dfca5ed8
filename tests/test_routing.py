"""Routing decisions, by tables and by hypothesis."""

import random
import time
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import routing
from jobs.prefix import Numbers, Prefix, prefix_of
from jobs.routing import Decision, Router

V1, V2 = "run.1.v1", "run.1.v2"
TWO = ["a", "b"]


def ask(router: Router, prompt: object, engines: Sequence[str] = TWO, name: str = V1, now: float = 0.0) -> Decision:
    return router.choose(name, prefix_of(name, prompt), engines, None, now)


def private(number: int, length: int = 48) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(150_000) for _ in range(length)]


def test_the_first_goes_to_the_least_loaded_and_the_others_follow() -> None:
    router = Router()
    first = [ask(router, private(0)) for _ in range(8)]
    second = [ask(router, private(1)) for _ in range(8)]
    assert {each.engine for each in first} == {"a"}
    assert {each.engine for each in second} == {"b"}
    assert [each.affinity for each in first] == [False] + [True] * 7
    assert not any(each.spilled for each in first + second)
    assert first[0].cached_tokens == 0
    assert first[1].cached_tokens == 48


@pytest.mark.parametrize("template", [0, 5, 16, 64, 100, 2000])
def test_a07_a_template_is_no_affinity(template: int) -> None:
    common, router, engines = private(-1, template), Router(), ["a", "b", "c"]
    rollouts = [number for number in range(200) for _ in range(8)]
    random.Random(1).shuffle(rollouts)
    homes: dict[int, list[str]] = {}
    open_: list[Decision] = []
    for number in rollouts:
        decision = ask(router, common + private(number, 40), engines)
        homes.setdefault(number, []).append(decision.engine)
        open_.append(decision)
        if len(open_) > 64:
            router.finished(open_.pop(0), 100)
    counts = Counter(name for names in homes.values() for name in names)
    assert all(abs(counts[name] / len(rollouts) * 3 - 1) < 0.15 for name in engines)
    followed = sum(names[1:].count(names[0]) for names in homes.values())
    assert followed / (7 * 200) >= 0.8


def test_nested_templates_and_a_template_that_was_itself_a_prompt_are_no_affinity() -> None:
    outer, inner = private(-1, 64), [private(-2, 80), private(-3, 90)]
    router = Router()
    router.finished(ask(router, outer), 10)
    homes = Counter()
    for number in range(100):
        decision = ask(router, outer + inner[number % 2] + private(number, 30))
        homes[decision.engine] += 1
        router.finished(decision, 10)
    assert abs(homes["a"] - homes["b"]) <= 4


def test_prompts_shorter_than_a_block_are_told_apart() -> None:
    router = Router()
    homes = [ask(router, [number]).engine for number in range(10)]
    assert Counter(homes) == {"a": 5, "b": 5}
    assert [ask(router, [number]).engine for number in range(10)] == homes


def test_turns_of_a_conversation_follow_their_longest_prefix() -> None:
    router = Router()
    start = private(0, 50)
    group = [ask(router, start) for _ in range(8)]
    for decision in group:
        router.finished(decision, 30)
    other = ask(router, private(1, 50))
    assert other.engine != group[0].engine
    turns = [start + private(100 + number, 45) for number in range(8)]
    second = [ask(router, turn) for turn in turns]
    assert {each.engine for each in second} == {group[0].engine}
    assert all(each.affinity for each in second)
    assert {each.cached_tokens for each in second} == {48}
    for decision in second:
        router.finished(decision, 30)
    third = [ask(router, turn + private(200 + number, 33)) for number, turn in enumerate(turns)]
    assert {each.engine for each in third} == {group[0].engine}
    assert {each.cached_tokens for each in third} == {80}


def test_text_and_conversations_follow_too() -> None:
    router = Router()
    text = "a story of " + "x" * 300
    assert ask(router, text).engine == ask(router, text).engine
    router.finished(ask(router, "other"), 1)
    messages = [{"role": "user", "content": "y" * 300}]
    first = router.choose(V1, prefix_of(V1, None, messages), TWO)
    longer = [*messages, {"role": "assistant", "content": "z"}, {"role": "user", "content": "go on"}]
    assert router.choose(V1, prefix_of(V1, None, longer), TWO).engine == first.engine
    fresh = router.choose(V1, prefix_of(V1, None, [{"role": "user", "content": "y" * 299}]), TWO)
    assert not fresh.affinity


def test_the_same_ids_are_the_same_prompt_however_they_are_written() -> None:
    router = Router()
    ids = private(0)
    spellings = [ids, Numbers(str(ids)), Numbers(str(ids).replace(" ", "")), [ids]]
    decisions = [ask(router, spelling) for spelling in spellings]
    assert len({each.engine for each in decisions}) == 1
    assert [each.affinity for each in decisions] == [False, True, True, True]


def test_a01_a_version_is_a_space_of_its_own() -> None:
    router = Router()
    ask(router, private(0))
    other = ask(router, private(0), name=V2)
    assert not other.affinity
    assert other.cached_tokens == 0
    assert not set(Prefix(V1, private(0)).chain) & set(Prefix(V2, private(0)).chain)


def test_a_prompt_whose_engine_is_far_ahead_is_spilled_and_counted() -> None:
    router = Router(spill_completions=4, spill_fraction=0)
    decisions = [ask(router, private(0)) for _ in range(16)]
    assert {each.engine for each in decisions} == {"a", "b"}
    assert [each.spilled for each in decisions].count(True) == 1  # from then on both have it
    assert abs(router.in_flight("a") - router.in_flight("b")) <= 5


def test_with_much_in_flight_a_fraction_of_it_is_no_imbalance() -> None:
    router = Router(spill_completions=4, spill_fraction=0.25)
    for number in range(100):
        ask(router, private(number))
    assert not any(ask(router, private(0)).spilled for _ in range(12))


def test_load_is_outstanding_tokens_not_requests() -> None:
    router = Router()
    ask(router, private(0, 4000))  # a
    homes = [ask(router, private(number, 16)).engine for number in range(1, 6)]
    assert set(homes) == {"b"}


def test_the_expected_length_is_learnt() -> None:
    router = Router()
    for number in range(500):
        router.finished(ask(router, private(number % 7)), 1000)
    assert router.expected_tokens == pytest.approx(1000, rel=0.01)
    assert ask(router, private(0)).cost_tokens == pytest.approx(1000, abs=20)
    assert router.choose(V1, None, TWO, max_tokens=10).cost_tokens == 10


def test_a_faster_engine_gets_more() -> None:
    router = Router()
    now, given = 0.0, Counter()
    open_: list[tuple[float, Decision]] = []
    for number in range(3000):
        decision = ask(router, private(number % 50 + number // 400 * 50, 32), TWO, V1, now)
        given[decision.engine] += 1
        open_.append((now + (1.0 if decision.engine == "a" else 3.0), decision))
        if len(open_) >= 32:
            open_.sort(key=lambda each: each[0])
            now, decision = open_.pop(0)
            router.finished(decision, 100, now)
    assert given["a"] > 2 * given["b"]


def test_completions_too_short_to_tell_a_pace_tell_none() -> None:
    router = Router()
    given = Counter()
    now = 0.0
    for number in range(1000):
        decision = ask(router, private(number, 32), TWO, V1, now)
        given[decision.engine] += 1
        now += 0.001 if decision.engine == "a" else 0.05
        router.finished(decision, 100, now)
    assert given["a"] == given["b"]


def test_a_dead_engine_and_a_retired_version_are_forgotten_at_once() -> None:
    router = Router()
    home = ask(router, private(0)).engine
    router.forget_engine(home)
    again = ask(router, private(0), [home])
    assert not again.affinity
    assert again.cached_tokens == 0
    assert router.blocks > 0
    router.forget_version(V1)
    assert router.blocks == 0
    assert not ask(router, private(0)).affinity


def test_an_engine_that_is_no_candidate_is_not_chosen_for_its_cache() -> None:
    router = Router()
    assert ask(router, private(0)).engine == "a"
    assert ask(router, private(0), ["b"]).engine == "b"
    assert ask(router, private(0), ["b"]).affinity


def test_engines_restarted_thousands_of_times_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "LIVES", 50)
    router = Router()
    for number in range(500):
        ask(router, private(number % 20))
        router.forget_engine("a" if number % 2 else "b")
    assert max(engine.bit for engine in router._engines.values()) < 1 << 50
    assert ask(router, private(3)).engine == ask(router, private(3)).engine


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    router = Router(capacity_blocks=200)
    for number in range(500):
        router.finished(ask(router, private(number % 3 if number % 2 else number, 160), name=f"v{number // 100}"), 10)
        assert router.blocks <= 200
    assert ask(router, private(1, 160), name="v4").affinity
    assert not ask(router, private(0, 160), name="v0").affinity


def test_forgetting_the_oldest_costs_no_more_than_remembering() -> None:
    router = Router(capacity_blocks=60_000)
    prompts = [prefix_of(V1, private(number, 512)) for number in range(6000)]

    def cost_s(some: slice) -> float:
        started = time.process_time()
        for prefix in prompts[some]:
            router.cancelled(router.choose(V1, prefix, TWO))
        return time.process_time() - started

    filling = cost_s(slice(0, 500)) / 500
    cost_s(slice(500, 1800))
    assert router.blocks == 60_000
    full = cost_s(slice(1800, 6000)) / 4200
    assert full < 4 * filling


@pytest.mark.parametrize("engines", [1, 2, 7, 256])
def test_any_number_of_engines(engines: int) -> None:
    names = [str(number) for number in range(engines)]
    router = Router()
    homes = Counter(ask(router, private(number), names).engine for number in range(2 * engines))
    assert set(homes.values()) == {2}
    assert len(homes) == engines


def test_the_same_calls_give_the_same_answers() -> None:
    def play() -> list[str]:
        router, rng, open_, log = Router(), random.Random(4), [], []
        for step in range(2000):
            if open_ and rng.random() < 0.5:
                router.finished(open_.pop(rng.randrange(len(open_))), rng.randrange(1, 900), step * 0.1)
            else:
                open_.append(ask(router, private(rng.randrange(60)), ["a", "b", "c"], V1, step * 0.1))
                log.append(open_[-1].engine)
        return log

    assert play() == play()


moves = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "finish", "cancel", "engine", "version", "again"]),
        st.integers(0, 11),
        st.integers(1, 3),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(moves, st.integers(20, 400))
def test_whatever_happens_the_books_balance(steps: list[tuple[str, int, int]], capacity: int) -> None:
    router = Router(capacity_blocks=capacity)
    open_: list[Decision] = []
    now = 0.0
    for kind, number, few in steps:
        now += 0.2
        names = ["a", "b", "c"][:few]
        if kind == "ask":
            prompt: object = [private(number % 4, 20 * number), "text" * number, None, [], [1.5, "x"]][number % 5]
            decision = router.choose(f"v{few}", prefix_of(f"v{few}", prompt), names, number * 10, now)
            assert decision.engine in names
            assert decision.cost_tokens >= 0
            assert not (decision.spilled and decision.affinity)
            open_.append(decision)
        elif kind == "finish" and open_:
            router.finished(open_.pop(number % len(open_)), number * 50, now)
        elif kind == "cancel" and open_:
            decision = open_.pop()
            router.cancelled(decision)
            router.cancelled(decision)
        elif kind == "engine":
            router.forget_engine("abc"[number % 3])
        elif kind == "version":
            router.forget_version(f"v{few}")
        assert router.blocks == sum(map(len, router._spaces.values())) <= capacity
    for engine in "abc":
        mine = [decision for decision in open_ if decision.engine == engine]
        assert router.in_flight(engine) == len(mine)
        assert router.outstanding_tokens(engine) == sum(decision.cost_tokens for decision in mine)
    for decision in open_:
        router.finished(decision, 1, now)
    assert all(router.outstanding_tokens(engine) == 0 for engine in "abc")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=80), st.integers(0, 80))
def test_a_chain_is_shared_exactly_as_far_as_whole_blocks_are(ids: list[int], cut: int) -> None:
    whole, part = Prefix(V1, ids), Prefix(V1, ids[:cut])
    assert len(whole.chain) == len(ids) // 16 + 1
    shared = min(cut, len(ids)) // 16 + 1
    assert whole.chain[:shared] == part.chain[:shared]
    if cut < len(ids):
        assert part.end() == whole.end_at(cut // 16, cut % 16)
    if ids:
        changed = Prefix(V1, [ids[0] + 1, *ids[1:]])
        assert not set(changed.chain[1:]) & set(whole.chain[1:])
