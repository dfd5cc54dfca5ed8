"""How far a run is: the one object that the trainer's supervisor keeps up to date in the bucket, for whoever follows.

Pure: lines of the training child's `metrics.jsonl` and the proxy's status go in, a JSON object comes out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jobs.counters import Counters
from jobs.tally import Tally

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
    """The status of the proxy that runs now, or of the last one."""
    before: dict[str, Any] = field(default_factory=lambda: Tally().to_dict())
    """What the proxies before that one counted, in this attempt and in earlier ones (`jobs.tally`)."""
    proxy_restarts: int = 0
    reward_errors: int = 0
    """Samples whose reward raised; they count as None. `reward_error` is the last one's words."""
    reward_error: str | None = None

    def resume(self, previous: Mapping[str, Any]) -> None:
        """Goes on from what the attempt before this one last told."""
        counted = Tally.from_dict(previous.get("before") or {}) + Tally.of_ended(previous.get("proxy") or {})
        self.before = counted.to_dict()
        self.first_step_at = previous.get("first_step_at")
        self.history = [(step, reward) for step, reward in previous.get("history") or []]
        self.proxy_restarts = previous.get("proxy_restarts", 0)
        self.reward_errors, self.reward_error = previous.get("reward_errors", 0), previous.get("reward_error")

    def see(self, proxy: dict[str, Any]) -> None:
        """Takes the status of the proxy that runs now."""
        self.proxy = proxy

    def proxy_ended(self, counters: Counters) -> None:
        """The proxy ended with these counts, and the next one counts from zero, but for the adapters it finds."""
        last = {
            **self.proxy,
            "completions": {**(self.proxy.get("completions") or {}), **counters.completions()},
            "routing": {**(self.proxy.get("routing") or {}), **counters.routing()},
        }
        self.before = (Tally.from_dict(self.before) + Tally.of_ended(last).without_adapters()).to_dict()
        self.proxy = {name: self.proxy[name] for name in ("adapters_published", "adapter_bytes") if name in self.proxy}
        self.proxy_restarts += 1

    def add(self, row: Mapping[str, Any]) -> None:
        """Takes one line of `metrics.jsonl`: the metrics of a step, or an event (see jobs.journal)."""
        if row.get("event") == "reward_error":
            self.reward_errors += int(row["count"])
            self.reward_error = f"{row['function']}: {row['error']}"
        if row.get("event") == "planned":
            self.max_steps = int(row["max_steps"])
        if not isinstance(row.get("step"), int) or "event" in row:
            return
        self.step = row["step"]
        self.state = "training"
        if self.first_step_at is None:
            self.first_step_at = float(row.get("time", self.updated_at))
        numbers = {k: float(v) for k, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        self.metrics |= numbers
        while self.history and self.history[-1][0] >= self.step:  # done again from a checkpoint
            self.history.pop()
        if (reward := numbers.get("reward")) is not None and reward == reward:
            self.history.append((self.step, reward))
            if len(self.history) > HISTORY:
                del self.history[1::2]

    def to_dict(self) -> dict[str, Any]:
        """What is written to the bucket."""
        return {**self.__dict__, "history": [list(pair) for pair in self.history]}
