"""How a run's status is shown to a person."""

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table


def show(status: Mapping[str, Any], stream: TextIO) -> None:
    """Prints what `jobs.operate.Operation.status` found."""
    console = Console(file=stream, soft_wrap=True, highlight=False)
    steps = f"step {status['step']} of {status['max_steps']}" if status["max_steps"] else f"step {status['step']}"
    reward = f", reward {status['reward']:.3f}" if status["reward"] is not None else ""
    attempt = f", attempt {status['attempt']}" if status["attempt"] else ""
    console.print(f"[bold]{status['run']}[/bold] ({status['recipe']}): {status['state']}, {steps}{reward}{attempt}")
    if status["reason"]:
        console.print(str(status["reason"]), markup=False)
    console.print(
        f"led by {status['leader'] or 'nobody'}; {status['replicas_wanted']} replicas wanted; "
        f"${status['cost_usd']:.2f} so far, ${status['usd_per_hour']:.2f} an hour now"
    )
    console.print(
        _table(status["jobs"], ("role", "index", "generation", "stage", "flavor", "cost_usd", "id", "message"))
    )
    if status["replicas"]:
        console.print(_table(status["replicas"], ("name", "state", "in_flight", "tokens", "reason")))


def show_runs(runs: Sequence[Mapping[str, Any]], stream: TextIO) -> None:
    """Prints what `jobs.operate.runs` found."""
    console = Console(file=stream, soft_wrap=True, highlight=False)
    if not runs:
        console.print("no run has living Jobs")
        return
    console.print(_table(runs, ("run", "recipe", "trainer", "replicas", "usd_per_hour")))


def _table(rows: Sequence[Mapping[str, Any]], columns: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.replace("_", " "), no_wrap=column == "id")
    for row in rows:
        table.add_row(*("" if row.get(column) is None else str(row[column]) for column in columns))
    return table
