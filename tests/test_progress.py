import json

from jobs.progress import HISTORY, Progress


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
