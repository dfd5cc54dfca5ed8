"""The rows of the benchmark of the loop follow from the journals that are kept beside them."""

import json
from pathlib import Path

import pytest

from bench import loop
from jobs.recipe import load, override

KEPT = Path(__file__).parents[1] / "docs" / "benchmarks"


@pytest.mark.parametrize(
    ("kind", "settings", "processes"),
    [
        ("stock", ["trainer.max_inflight_tasks=384"], 1),
        ("ours", [], 1),
        ("fsdp", ["trainer.per_device_train_batch_size=16"], 2),
    ],
)
def test_a_row_follows_from_its_journal(kind: str, settings: list[str], processes: int) -> None:
    row = json.loads((KEPT / f"h200-{kind}.json").read_text())
    journal = [json.loads(line) for line in (KEPT / f"h200-{kind}.jsonl").read_text().splitlines()]
    chosen = override(load(str(loop.RECIPE)), *settings)
    more = {name: row[name] for name in ("generation_stall_s", "tokens", "engines", "gpu_gb")}
    assert loop.row(kind, chosen, journal, more, processes) == row


def test_a_trainer_that_was_started_again_counts_until_it_was() -> None:
    journal = [json.loads(line) for line in (KEPT / "h200-ours.jsonl").read_text().splitlines()]
    chosen = load(str(loop.RECIPE))
    again = [{**each, "time": each["time"] + 1000} for each in journal]
    assert loop.row("ours", chosen, journal + again, {}, 1) == loop.row("ours", chosen, journal, {}, 1)


def test_only_whole_waves_count() -> None:
    """Two steps a wave, quick and slow: whatever the number of steps, the mean is theirs."""
    chosen = override(load(str(loop.RECIPE)), "trainer.max_inflight_tasks=256")

    def journal(steps: int) -> loop.Rows:
        found: loop.Rows = [{"event": "phase", "name": "started", "time": 0.0}]
        at = 10.0
        for step in range(1, steps + 1):
            found.append(
                {
                    "step": step,
                    "time": at,
                    "ratio": 1.0,
                    "perf/step_s": 1.0,
                    "perf/rollout_wait_s": 0.0,
                    "perf/fwd_bwd_s": 1.0,
                    "perf/weight_sync_s": 0.1,
                    "sample/staleness_mean": 1.0,
                    "batch/trained_tokens_per_step": 1.0,
                }
            )
            at += 9.0 if step % 2 == 0 else 1.0
        return found

    for steps in (3, 4, 5, 6):
        row = loop.row("x", chosen, journal(steps), {}, processes=1)
        assert (row["step_s"], row["steps_measured"] % 2) == (5.0, 0)
        assert row["samples_per_s"] == 25.6
