"""`summary.json`: what a run did, in one flat object. Pure."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jobs.spec import RunSpec
from jobs.tally import Tally

FIELDS = [
    "run",
    "recipe",
    "engine",
    "transport",
    "bucket",
    "replicas",
    "attempt",
    "steps",
    "reward_first",
    "reward_last",
    "ratio_min",
    "ratio_max",
    "staleness_mean",
    "stale_dropped",
    "wall_s",
    "first_step_s",
    "weight_sync_s_p50",
    "weight_sync_s_max",
    "generation_stall_s",
    "parked",
    "parked_s",
    "rollouts",
    "rollouts_lost",
    "rollouts_redispatched",
    "affinity",
    "cold",
    "spilled",
    "replica_tokens",
    "adapters_published",
    "adapter_bytes",
    "replica_deaths",
    "replica_rejoins",
    "trainer_resumes",
    "orphans",
    "cost_usd",
    "bottleneck",
    "advice",
    "error",
]
"""Every field, in the order they are printed. One that does not apply is null; `error` says why a run failed."""

FRACTIONS = ("affinity", "cold", "spilled")
"""Fields that are numbers of decisions in a `Tally`."""


def summary_key(run: str) -> str:
    """Key of the run's summary."""
    return f"runs/{run}/summary.json"


def summarize(spec: RunSpec, progress: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of a run from its metrics (one row a step, in order) and its last progress (with what the proxies
    counted).

    What only the launcher knows (`wall_s`, `first_step_s`, `orphans`, ...) is null until it fills it in.
    """
    summary: dict[str, Any] = dict.fromkeys(FIELDS)
    tally = Tally.from_dict(progress.get("before") or {}) + Tally.of(progress.get("proxy") or {})
    rewards = _column(rows, "reward")
    tenth = max(1, len(rewards) // 10)
    ratios, syncs = _column(rows, "ratio"), _column(rows, "perf/weight_sync_s")
    summary |= {
        "run": spec.run,
        "recipe": spec.recipe.name,
        "engine": spec.engine,
        "transport": spec.transport,
        "replicas": spec.recipe.replica.count,
        "attempt": progress.get("attempt"),
        "steps": rows[-1]["step"] if rows else 0,
        "reward_first": _mean(rewards[:tenth]),
        "reward_last": _mean(rewards[-tenth:]),
        "ratio_min": min(ratios, default=None),
        "ratio_max": max(ratios, default=None),
        "staleness_mean": _mean(_column(rows, "sample/staleness_mean")),
        "stale_dropped": round(sum(_column(rows, "sample/dropped_stale_total"))) if rows else None,
        "weight_sync_s_p50": statistics.median(syncs) if syncs else None,
        "weight_sync_s_max": max(syncs, default=None),
        "trainer_resumes": (progress.get("attempt") or 1) - 1,
    }
    if progress.get("proxy"):
        fractions = {name: getattr(tally, name) / tally.decisions for name in FRACTIONS if tally.decisions}
        counted = {name: value for name, value in tally.to_dict().items() if name in FIELDS and name not in FRACTIONS}
        summary |= counted | fractions
    return {name: _rounded(summary[name]) for name in FIELDS}


def _column(rows: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    return [float(value) for value in values if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
