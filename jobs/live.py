"""What the user sees while a run goes on: a table in place in a terminal, a line for each change elsewhere."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jobs.launch import Glance

PLAIN_EVERY_S = 5.0
"""Without a terminal, a line is printed for a new step at most this often; the first and the last step always are."""


@dataclass(frozen=True)
class Row:
    """One replica as shown: which version it serves and what it has in flight."""

    name: str
    state: str
    version: str
    in_flight: int
    tokens: int


@dataclass(frozen=True)
class Shown:
    """The figures of one look, already chosen and rounded; None where there is none yet."""

    stage: str
    step: int
    max_steps: int
    reward: float | None
    ratio: float | None
    staleness: float | None
    tokens_per_s: float | None
    queue: float | None
    sync_s: float | None
    parked: int | None
    elapsed_s: float
    left_s: float | None
    reward_errors: int
    reward_error: str | None
    replicas: list[Row]


def shown(glance: Glance) -> Shown:
    """Chooses what to show of a look. Pure."""
    progress = glance.progress
    metrics: Mapping[str, float] = progress.get("metrics") or {}
    proxy: Mapping[str, Any] = progress.get("proxy") or {}
    step, max_steps = int(progress.get("step") or 0), int(progress.get("max_steps") or 0)
    first = progress.get("first_step_at")
    left = None
    if first and step > 1 and max_steps:
        left = (progress["updated_at"] - first) / (step - 1) * (max_steps - step)
    replicas = [
        Row(
            name=str(replica.get("name")),
            state=str(replica.get("state")),
            version=f"v{max(replica['adapters'])}" if replica.get("adapters") else "base",
            in_flight=int(replica.get("in_flight") or 0),
            tokens=int(replica.get("tokens") or 0),
        )
        for replica in proxy.get("replicas") or []
        if replica.get("state") != "gone"
    ]
    return Shown(
        stage=_stage(glance),
        step=step,
        max_steps=max_steps,
        reward=metrics.get("reward"),
        ratio=metrics.get("ratio"),
        staleness=metrics.get("sample/staleness_mean"),
        tokens_per_s=metrics.get("rollout/generated_tok_s"),
        queue=metrics.get("sample/rollout_queue_size"),
        sync_s=metrics.get("perf/weight_sync_s"),
        parked=(proxy.get("completions") or {}).get("parked"),
        elapsed_s=glance.elapsed_s,
        left_s=left,
        reward_errors=int(progress.get("reward_errors") or 0),
        reward_error=progress.get("reward_error"),
        replicas=replicas,
    )


def _stage(glance: Glance) -> str:
    state = glance.progress.get("state")
    if state and state != "starting":
        return str(state)
    if glance.jobs and all(job.status.stage == "SCHEDULING" for job in glance.jobs.values()):
        return "waiting for machines"
    replicas = (glance.progress.get("proxy") or {}).get("replicas") or []
    ready = sum(replica.get("state") == "ready" for replica in replicas)
    return f"starting: {ready} of {len(replicas)} replicas ready" if replicas else "starting"


class View(Protocol):
    """Where looks at a run are shown."""

    def __enter__(self) -> "View": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, glance: Glance) -> None:
        """Shows a look at the run."""
        ...


def view(stream: TextIO = sys.stderr) -> View:
    """The view that fits the stream."""
    return TableView(stream) if stream.isatty() else PlainView(stream)


class PlainView:
    """One line for each change of stage and for new steps."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._stage = ""
        self._step = 0
        self._printed_at = 0.0

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, glance: Glance) -> None:
        """Shows a look at the run."""
        now = shown(glance)
        due = time.monotonic() - self._printed_at >= PLAIN_EVERY_S or now.step == now.max_steps or self._step == 0
        if now.step > self._step and due:
            self._step, self._printed_at = now.step, time.monotonic()
            print(f"[{now.elapsed_s:5.1f} s] {line(now)}", file=self._stream, flush=True)
        if now.stage != self._stage and now.stage != "training":
            print(f"[{now.elapsed_s:5.1f} s] {now.stage}", file=self._stream, flush=True)
        self._stage = now.stage


class TableView:
    """A table in place."""

    def __init__(self, stream: TextIO) -> None:
        self._live = Live(console=Console(file=stream), refresh_per_second=4, transient=False)

    def __enter__(self) -> "TableView":
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, glance: Glance) -> None:
        """Shows a look at the run."""
        now = shown(glance)
        replicas = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("replica", "state", "serves", "in flight", "tokens"):
            replicas.add_column(
                column, justify="left" if column in ("replica", "state", "serves") else "right", min_width=8
            )
        for row in now.replicas:
            style = "green" if row.state == "ready" else "yellow"
            replicas.add_row(row.name, Text(row.state, style), row.version, str(row.in_flight), f"{row.tokens:,}")
        bar = Table.grid()
        bar.add_row(ProgressBar(total=max(now.max_steps, 1), completed=now.step, width=60))
        self._live.update(Group(Text(f"{now.stage}   {_clock(now.elapsed_s)}", "bold"), bar, Text(line(now)), replicas))


def line(now: Shown) -> str:
    """The figures of a look in one line."""
    parts = [f"step {now.step}/{now.max_steps}"]
    parts += [f"reward {now.reward:.3f}"] if now.reward is not None else []
    parts += [f"ratio {now.ratio:.4f}"] if now.ratio is not None else []
    parts += [f"staleness {now.staleness:.1f}"] if now.staleness is not None else []
    parts += [f"{now.tokens_per_s:,.0f} tokens/s"] if now.tokens_per_s is not None else []
    parts += [f"queue {now.queue:.0f}"] if now.queue is not None else []
    parts += [f"sync {now.sync_s:.2f} s"] if now.sync_s is not None else []
    parts += [f"parked {now.parked}"] if now.parked else []
    parts += [f"reward errors {now.reward_errors} ({now.reward_error})"] if now.reward_errors else []
    parts += [" ".join(f"{row.name}:{row.version}" for row in now.replicas)] if now.replicas else []
    parts += [f"{_clock(now.left_s)} left"] if now.left_s else []
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
