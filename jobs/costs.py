"""What Jobs cost. Pure: prices and Jobs go in, US dollars come out."""

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from huggingface_hub import JobHardwareInfo, JobInfo

MINUTES_PER_HOUR = 60
UNIT_MINUTES = {"minute": 1, "hour": 60, "day": 1440}
"""Minutes in the units of price (`unitLabel` of GET /api/jobs/hardware; the Hub's own is "minute")."""


def usd_per_minute(hardware: Iterable[JobHardwareInfo]) -> dict[str, float]:
    """Prices by flavor, as the Hub lists them (`HfApi.list_jobs_hardware`)."""
    return {flavor.name: flavor.unit_cost_usd / UNIT_MINUTES[flavor.unit_label] for flavor in hardware}


def of_job(job: JobInfo, prices: Mapping[str, float], now: datetime | None = None) -> float:
    """US dollars for a Job until its end, or until `now`: each begun minute since it started to run counts.

    Waiting for hardware is free. A flavor without a known price counts nothing.
    """
    if job.started_at is None:
        return 0.0
    ended_at = job.finished_at or now or datetime.now(UTC)
    minutes = math.ceil(max(0.0, (ended_at - job.started_at).total_seconds()) / 60)
    return minutes * prices.get(str(job.flavor), 0.0)


def of_jobs(jobs: Iterable[JobInfo], prices: Mapping[str, float], now: datetime | None = None) -> float:
    """The sum over several Jobs, rounded to a hundredth of a cent."""
    return round(sum(of_job(job, prices, now) for job in jobs), 4)
