import json
from typing import Any

from jobs.counters import Counters
from jobs.progress import HISTORY, Progress
from jobs.tally import Tally


def test_lines_of_metrics_become_progress() -> None:
    progress = Progress("run", 1, 10, started_at=100.0)
    progress.add({"event": "saved", "path": "x", "step": 9})
    progress.add({"train_runtime": 3.0})
    progress.add({"event": "reward_error", "function": "m:f", "count": 2, "error": "KeyError: 'x'"})
    assert (progress.reward_errors, progress.reward_error) == (2, "m:f: KeyError: 'x'")
    assert progress.state == "starting" and progress.step == 0
    progress.add({"step": 1, "time": 130.0, "reward": 0.1, "ratio": 1.0, "note": "text"})
    progress.add({"step": 2, "time": 131.0, "reward": float("nan"), "perf/weight_sync_s": 0.2})
    progress.add({"step": 3, "time": 132.0, "reward": 0.3})
    assert (progress.state, progress.step, progress.first_step_at) == ("training", 3, 130.0)
    assert progress.history == [(1, 0.1), (3, 0.3)]
    assert progress.metrics["perf/weight_sync_s"] == 0.2 and progress.metrics["ratio"] == 1.0
    assert "note" not in progress.metrics
    assert json.loads(json.dumps(progress.to_dict()))["history"] == [[1, 0.1], [3, 0.3]]


def test_a_long_run_keeps_a_bounded_history_with_its_ends() -> None:
    progress = Progress("run", 1, 10**6, started_at=0.0)
    for step in range(1, 5 * HISTORY):
        progress.add({"step": step, "time": 1.0, "reward": 0.0})
    assert len(progress.history) <= HISTORY
    assert progress.history[-1][0] == 5 * HISTORY - 1 and progress.history[0][0] < 20


def status(boot_id: str, asked: int, in_flight: int, adapters: int) -> dict[str, Any]:
    return {
        "boot_id": boot_id,
        "completions": {"asked": asked, "in_flight": in_flight, "lost": 0, "redispatched": 1},
        "adapters_published": adapters,
    }


def test_counts_add_up_over_proxies_and_attempts() -> None:
    first = Progress("run", 1, 10, started_at=0.0)
    first.see(status("a", 5, 5, 1))
    first.see(status("a", 18, 4, 2))
    # After its last status it was asked for two more; of the 20 four are asked for again.
    first.proxy_ended(Counters(asked=20, answered=16, redispatched=1))
    told = Tally.from_dict(first.before) + Tally.of(first.proxy)
    assert (told.rollouts, told.rollouts_redispatched, told.adapters_published) == (16, 1, 2)
    first.proxy_ended(Counters(asked=3, answered=2))  # one that nobody saw
    for seen in (status("b", 7, 0, 3), status("b", 30, 6, 4)):
        first.see(seen)
    # That proxy knows of all adapters of the attempt.
    told = Tally.from_dict(first.before) + Tally.of(first.proxy)
    assert (told.rollouts, told.rollouts_redispatched, told.adapters_published) == (48, 2, 4)
    assert first.proxy_restarts == 2

    second = Progress("run", 2, 10, started_at=0.0)
    second.resume(json.loads(json.dumps(first.to_dict())))
    second.see(status("c", 10, 1, 2))
    told = Tally.from_dict(second.before) + Tally.of(second.proxy)
    assert (told.rollouts, told.rollouts_redispatched, told.adapters_published) == (52, 3, 6)


def test_an_attempt_goes_on_where_the_last_one_was() -> None:
    first = Progress("run", 1, 10, started_at=0.0)
    for step in range(1, 6):
        first.add({"step": step, "time": 100.0 + step, "reward": step / 10})
    second = Progress("run", 2, 10, started_at=0.0)
    second.resume(json.loads(json.dumps(first.to_dict())))
    assert (second.first_step_at, second.state, second.step) == (101.0, "starting", 0)
    second.add({"step": 4, "time": 200.0, "reward": 0.9})
    assert second.history == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.9)], "from the checkpoint of step 3"
    assert second.first_step_at == 101.0


def test_an_attempt_after_one_that_told_nothing() -> None:
    progress = Progress("run", 2, 10, started_at=0.0)
    progress.resume({})
    progress.see(status("a", 5, 1, 1))
    assert Tally.from_dict(progress.before) == Tally()
