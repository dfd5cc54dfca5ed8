"""How a plan is shown to a person."""

import shlex
from typing import TextIO

from rich.console import Console
from rich.table import Table

from jobs.plan import Plan


def show(plan: Plan, stream: TextIO) -> None:
    """Prints the plan as tables: the Jobs with their prices, the derived values, and how each engine is started."""
    console = Console(file=stream, soft_wrap=True, highlight=False)
    console.print(f"[bold]run {plan.run}[/bold]: recipe {plan.recipe.name}, {plan.recipe.description}")
    jobs = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("role", "count", "flavor", "hardware", "ports", "time-out", "$/h", "$ up to the time-out"):
        jobs.add_column(column, justify="right" if column in ("count", "time-out") or "$" in column else "left")
    for group in plan.groups:
        jobs.add_row(
            group.role,
            str(group.count),
            group.flavor,
            group.hardware or "?",
            " ".join(map(str, group.ports)) or "-",
            _hours(group.timeout_s),
            _usd(group.usd_per_hour),
            _usd(group.usd_to_timeout),
        )
    jobs.add_row(
        "all",
        str(sum(g.count for g in plan.groups)),
        "",
        "",
        "",
        "",
        _usd(plan.usd_per_hour),
        _usd(plan.usd_to_timeout),
    )
    console.print(jobs)
    for group in plan.groups:
        details = Table(box=None, pad_edge=False, show_header=False)
        details.add_column()
        details.add_column(overflow="fold")  # nothing is left out, as long as it may be
        details.add_row("image", group.image)
        details.add_row("command", shlex.join(group.command))
        for volume in group.volumes:
            writes = "read-only" if volume.get("readOnly") else "read-write"
            source = "/".join(part for part in (volume["source"], volume.get("path")) if part)
            details.add_row("volume", f"{volume['type']} {source} at {volume['mountPath']} ({writes})")
        if group.network_group:
            details.add_row("network group", group.network_group)
        details.add_row("environment", " ".join(f"{name}={value}" for name, value in group.environment.items()))
        details.add_row("secrets", " ".join(group.secrets))
        details.add_row("labels", " ".join(f"{name}={value}" for name, value in group.labels.items()))
        console.print(f"\n[bold]{group.role}[/bold]")
        console.print(details)
    values = Table(box=None, pad_edge=False, show_header=False)
    for name, value in plan.derived.items():
        values.add_row(name, f"{value:g}" if isinstance(value, float) else str(value))
    console.print("\n[bold]derived[/bold]")
    console.print(values)
    console.print("\n[bold]each engine[/bold]")
    console.print(shlex.join(["python3", *plan.engine_command[1:]]), markup=False)


def _hours(seconds: int) -> str:
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds / 60:g} min"


def _usd(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"
