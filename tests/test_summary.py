from typing import Any

import pytest

from jobs.recipe import DatasetSource, Model, Recipe, Reward
from jobs.spec import ModelRef, RunSpec
from jobs.summary import FIELDS, summarize

SPEC = RunSpec(
    "run", Recipe("digit", Model("tiny:digit"), DatasetSource("m:f"), Reward(["m:f"])), ModelRef("hub", "m", "m")
)


def test_every_field_is_there_and_null_where_it_does_not_apply() -> None:
    summary = summarize(SPEC, {"attempt": 1}, [])
    assert list(summary) == FIELDS
    assert {name for name, value in summary.items() if value is not None} == {
        "run", "recipe", "engine", "transport", "replicas", "attempt", "steps", "trainer_resumes",
    }  # fmt: skip


def test_figures_come_from_the_rows_and_the_proxy() -> None:
    rows = [
        {
            "step": step,
            "reward": step / 20,
            "ratio": 1 + step / 1000,
            "perf/weight_sync_s": step,
            "sample/staleness_mean": 2.0,
        }
        for step in range(1, 21)
    ]
    rows[3]["reward"] = float("nan")
    rows[4]["sample/dropped_stale_total"], rows[-1]["sample/dropped_stale_total"] = 3.0, 2.0  # each since the last row
    replicas: list[dict[str, Any]] = [{"deaths": 1, "rejoins": 1}, {"deaths": 0, "rejoins": 0}]
    proxy = {
        "replicas": replicas,
        "generation_stall_s": 0.0,
        "completions": {"asked": 9, "lost": 0, "redispatched": 2, "parked_total": 3, "parked_s": 0.5},
        "routing": {"decisions": 20, "affinity": 0.8, "cold": 0.2, "spilled": 0.05, "tokens": {"0": 10, "1": 11}},
        "adapters_published": 20,
        "adapter_bytes": 1000,
    }
    summary = summarize(SPEC, {"attempt": 3, "proxy": proxy}, rows)
    assert summary["reward_first"] == 0.05 and summary["reward_last"] == 1.0  # tenth of 19 rewards: one
    assert (summary["ratio_min"], summary["ratio_max"]) == (1.001, 1.02)
    assert (summary["weight_sync_s_p50"], summary["weight_sync_s_max"]) == (10.5, 20.0)
    assert (summary["steps"], summary["stale_dropped"], summary["staleness_mean"]) == (20, 5, 2.0)
    assert (summary["rollouts"], summary["rollouts_lost"], summary["rollouts_redispatched"]) == (9, 0, 2)
    assert (summary["parked"], summary["parked_s"], summary["generation_stall_s"]) == (3, 0.5, 0.0)
    assert (summary["affinity"], summary["cold"], summary["spilled"]) == pytest.approx((0.8, 0.2, 0.05))
    assert (summary["adapters_published"], summary["adapter_bytes"]) == (20, 1000)
    assert (summary["replica_deaths"], summary["replica_rejoins"], summary["trainer_resumes"]) == (1, 1, 2)


def test_no_sample_was_dropped_where_no_row_says_so() -> None:
    assert summarize(SPEC, {"attempt": 1}, [{"step": 1}])["stale_dropped"] == 0


def test_figures_of_earlier_proxies_count() -> None:
    before = {
        "rollouts": 31,
        "rollouts_lost": 1,
        "parked_s": 1.5,
        "replica_deaths": 1,
        "decisions": 20,
        "affinity": 10.0,
        "cold": 10.0,
        "replica_tokens": {"0": 5, "2": 7},
    }
    proxy = {
        "completions": {"asked": 69, "lost": 0, "parked_s": 0.5},
        "routing": {"decisions": 60, "affinity": 0.75, "cold": 0.25, "spilled": 0.0, "tokens": {"0": 10, "1": 11}},
        "replicas": [{"deaths": 1, "rejoins": 2}],
    }
    summary = summarize(SPEC, {"attempt": 1, "proxy": proxy, "before": before}, [])
    assert (summary["rollouts"], summary["rollouts_lost"], summary["parked_s"]) == (100, 1, 2.0)
    assert (summary["affinity"], summary["cold"], summary["spilled"]) == pytest.approx((55 / 80, 25 / 80, 0.0))
    assert (summary["replica_deaths"], summary["replica_rejoins"]) == (2, 2)
    assert summary["replica_tokens"] == {"0": 15, "1": 11, "2": 7}
