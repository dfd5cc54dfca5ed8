"""How far a run is: the one object that the trainer's supervisor keeps up to date in the bucket, for whoever follows.

Pure: lines of the training child's `metrics.jsonl` and the proxy's status go in, a JSON object comes out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["starting", "training", "done", "preempted", "failed"]

HISTORY = 2000
"""At most so many (step, reward) pairs are kept for plots; then every second one is dropped."""


def progress_key(run: str) -> str:
    """Key of the run's progress."""
    return f"runs/{run}/progress.json"


def metrics_key(run: str, attempt: int) -> str:
    """Key of an attempt's metrics: JSON lines as the training child wrote them."""
    return f"runs/{run}/metrics/{attempt}.jsonl"


@dataclass
class Progress:
    """The state of one attempt. Times are Unix seconds of the trainer's clock."""

    run: str
    attempt: int
    max_steps: int
    started_at: float
    state: State = "starting"
    reason: str | None = None
    step: int = 0
    first_step_at: float | None = None
    updated_at: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    history: list[tuple[int, float]] = field(default_factory=list)
    proxy: dict[str, Any] = field(default_factory=dict)
    proxy_restarts: int = 0
    reward_errors: int = 0
    """Samples whose reward raised; they count as None. `reward_error` is the last one's words."""
    reward_error: str | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        """Takes one line of `metrics.jsonl`: the metrics of a step, or an event (see jobs.journal)."""
        if row.get("event") == "reward_error":
            self.reward_errors += int(row["count"])
            self.reward_error = f"{row['function']}: {row['error']}"
        if not isinstance(row.get("step"), int) or "event" in row:
            return
        self.step = row["step"]
        self.state = "training"
        if self.first_step_at is None:
            self.first_step_at = float(row.get("time", self.updated_at))
        numbers = {k: float(v) for k, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        self.metrics |= numbers
        if (reward := numbers.get("reward")) is not None and reward == reward:
            self.history.append((self.step, reward))
            if len(self.history) > HISTORY:
                del self.history[1::2]

    def to_dict(self) -> dict[str, Any]:
        """What is written to the bucket."""
        return {**self.__dict__, "history": [list(pair) for pair in self.history]}
