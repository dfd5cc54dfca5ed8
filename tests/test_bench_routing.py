"""The promises about routing, on the simulator that `asyncgrpo bench routing` uses."""

import json

import pytest

from jobs.bench_routing import (
    GROUP,
    POLICIES,
    LeastRequests,
    Ours,
    Outcome,
    Reference,
    RoundRobin,
    Scenario,
    StickyHash,
    main,
    mean,
    rollouts,
    simulate,
)

TWO = Scenario("two", [1, 1], problems_in_flight=64, problems=640)
FLOOR = 1 / GROUP


def test_two_replicas_stay_at_the_floor_of_cold_completions_and_share_the_tokens() -> None:
    outcome = simulate(TWO, Ours(2), seed=1)
    assert FLOOR <= outcome.cold <= 0.126
    assert outcome.imbalance <= 0.05


def test_the_other_policies_are_worse() -> None:
    """Colder, or slower to the end; over a few seeds, since the very last completions are luck."""

    def over_seeds(policy: type) -> Outcome:
        return mean([simulate(TWO, policy(2), seed) for seed in range(3)])

    ours = over_seeds(Ours)
    for policy in (RoundRobin, LeastRequests, Reference):
        other = over_seeds(policy)
        assert other.cold > ours.cold
        assert other.makespan_s > ours.makespan_s
    sticky = over_seeds(StickyHash)
    assert sticky.cold == ours.cold
    assert sticky.makespan_s > 1.01 * ours.makespan_s


def test_engines_of_different_speed_are_filled_by_their_speed() -> None:
    scenario = Scenario("unequal", [1, 0.25], problems=512)
    ours, reference = (simulate(scenario, policy(2), seed=2) for policy in (Ours, Reference))
    assert ours.makespan_s < 0.98 * reference.makespan_s
    assert ours.imbalance < 0.05


def test_a_sync_within_a_group_makes_its_prompt_cold_once_more() -> None:
    scenario = Scenario("syncs", [1, 1], problems=512, rollouts_per_version=100)
    syncs_within = sum(1 for start in range(100, 512 * GROUP, 100) if start % GROUP)
    outcome = simulate(scenario, Ours(2), seed=1)
    assert outcome.cold * 512 * GROUP == pytest.approx(512 + syncs_within)


def test_one_engine_is_the_same_under_every_policy() -> None:
    scenario = Scenario("one", [1], problems=64)
    outcomes = {simulate(scenario, policy(1), seed=0).makespan_s for policy in POLICIES.values()}
    assert len(outcomes) == 1


def test_the_demand_is_grouped_and_long_tailed() -> None:
    every = list(rollouts(TWO, seed=0))
    assert [rollout.problem for rollout in every[:9]] == [0] * 8 + [1]
    lengths = sorted(rollout.tokens for rollout in every)
    assert lengths[-1] > 4 * lengths[len(lengths) // 2]


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.bench_routing.SCENARIOS", [Scenario("few", [1, 1], 4, 8)])
    main(as_json=True, seeds=1)
    table = json.loads(capsys.readouterr().out)
    assert set(table["few"]) == set(POLICIES)
    main(seeds=1)
    assert "asyncgrpo" in capsys.readouterr().out
