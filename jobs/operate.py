"""What can be done to a run from any machine, by its labels and its bucket alone: look at it, stop it, change its size.

Also `reap`: ends Jobs of runs that nobody leads any more.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub import JobInfo

from jobs import costs, hub, job_logs, labels, leader, lease
from jobs.bucket import Bucket
from jobs.crew import TERMINAL, Crew
from jobs.errors import ConfigError, NotFound
from jobs.progress import progress_key
from jobs.roster import Roster
from jobs.site import Site
from jobs.spec import RunSpec

OVERDUE_S = 300.0
"""How long after its deadline a Job is reaped: the Hub ends Jobs at their time-out, give or take."""


class Operation:
    """One run, seen from anywhere. Raises ConfigError if the run is not in the site's bucket."""

    def __init__(self, site: Site, run: str) -> None:
        self.site, self.run = site, labels.run_name(run)
        self.bucket = Bucket(site.bucket)
        self.spec = RunSpec.read(self.bucket, self.run)
        self.roster = Roster.read(self.bucket, self.run)
        plans, initiator = self.roster.plans, self.roster.initiator
        self.crew = Crew(site.hub(), self.roster.namespace, self.run, self.bucket, plans, {}, initiator=initiator)

    def status(self) -> dict[str, Any]:
        """How the run is: progress, replicas, Jobs, who leads, what it has cost so far."""
        prices = costs.usd_per_minute(hub.patiently(self.site.hub().list_jobs_hardware))
        jobs = sorted(self.crew.jobs().values(), key=_order)
        progress = _read(self.bucket, progress_key(self.run))
        proxy = progress.get("proxy") or {}
        asked = leader.wanted(self.bucket, self.run)
        return {
            "run": self.run,
            "recipe": self.spec.recipe.name,
            "state": _state(progress, jobs, lease.ended(self.bucket, self.run)),
            "reason": progress.get("reason"),
            "attempt": progress.get("attempt"),
            "step": progress.get("step", 0),
            "max_steps": progress.get("max_steps") or self.spec.recipe.trainer.get("max_steps"),
            "reward": (progress.get("metrics") or {}).get("reward"),
            "leader": _read(self.bucket, leader.leader_key(self.run)).get("who"),
            "replicas_wanted": self.spec.recipe.replica.count if asked is None else asked,
            "replicas": [
                {name: replica.get(name) for name in ("name", "state", "reason", "in_flight", "tokens")}
                for replica in proxy.get("replicas") or []
            ],
            "jobs": [describe(job, prices) for job in jobs],
            "cost_usd": costs.of_jobs(jobs, prices),
            "usd_per_hour": round(
                sum(60 * prices.get(str(job.flavor), 0.0) for job in jobs if job.status.stage not in TERMINAL), 2
            ),
        }

    def logs(self, role: str, index: int, follow: bool) -> Iterator[str]:
        """The log of the newest Job of a role and index.

        Raises:
            ConfigError: there is none; names those there are.
        """
        found = {job.id: labels.read(job.labels) for job in self.crew.jobs().values()}
        places = {job_id: place for job_id, place in found.items() if place is not None}
        own = [job_id for job_id, place in places.items() if (place.role, place.index) == (role, index)]
        if not own:
            known = sorted({f"{place.role} {place.index}" for place in places.values()})
            raise ConfigError(f"run {self.run} has no {role} {index}. It has: {', '.join(known) or 'no Jobs'}.")
        newest = max(own, key=lambda job_id: places[job_id].generation)
        return job_logs.lines(self.site.hub(), self.roster.namespace, newest, follow)

    def stop(self) -> list[str]:
        """Ends the run: its lease first, so that nothing is started again; then all its Jobs. Returns their ids.

        Raises:
            RunFailed: Jobs that do not end.
        """
        lease.end(self.bucket, self.run)
        alive = [job.id for job in self.crew.jobs().values() if job.status.stage not in TERMINAL]
        self.crew.cancel()
        return alive

    def scale(self, replicas: int) -> None:
        """Asks the run's leader for another number of replicas.

        Raises:
            ConfigError: less than one, or the run is over.
        """
        if replicas < 1:
            raise ConfigError(f"--replicas {replicas}: at least 1 is needed. To end the run: asyncgrpo stop {self.run}")
        if lease.ended(self.bucket, self.run):
            raise ConfigError(f"run {self.run} is over: there is nobody to start or to end replicas.")
        leader.ask_for(self.bucket, self.run, replicas)


@dataclass(frozen=True)
class Reapable:
    """A Job that should not be there any more, and why."""

    job: JobInfo
    why: str


def reapable(site: Site) -> tuple[list[Reapable], list[JobInfo]]:
    """Living Jobs of runs that are over, unled or overdue; and living Jobs that only bear a run's labels.

    A lease's age is measured by the bucket's own clock; it does not count while the run's trainer waits for its
    machine, which costs nothing. A run that is not in the site's bucket is judged by its Jobs' deadline alone, and only
    if the token's own user started them.
    """
    bucket, me = Bucket(site.bucket), str(site.whoami()["id"])
    found: list[Reapable] = []
    foreign: list[JobInfo] = []
    runs: dict[str, tuple[Roster | None, str | None]] = {}
    placed = [(job, labels.read(job.labels)) for job in hub.list_jobs(site.hub(), site.namespace)]
    alive = [(job, place) for job, place in placed if place is not None and job.status.stage not in TERMINAL]
    for job, place in alive:
        if place.run not in runs:
            waiting = [each for each, its in alive if its.run == place.run and each.status.stage == "SCHEDULING"]
            runs[place.run] = _judge(bucket, place.run, waiting)
        roster, over = runs[place.run]
        if (
            roster is None
            and (job.initiator is None or job.initiator.id != me or not _ours_by_command(job, place.role))
        ) or (roster is not None and not roster.owns(job)):
            foreign.append(job)
        elif over is not None:
            found.append(Reapable(job, over))
        elif place.deadline is not None and time.time() > place.deadline + OVERDUE_S:
            found.append(Reapable(job, f"its deadline passed {(time.time() - place.deadline) / 60:.0f} min ago"))
    return found, foreign


def reap(site: Site, found: Iterable[Reapable]) -> None:
    """Cancels the Jobs."""
    api = site.hub()
    for each in found:
        hub.patiently(lambda job_id=each.job.id: api.cancel_job(job_id=job_id, namespace=site.namespace))  # type: ignore[misc]


def describe(job: JobInfo, prices: Mapping[str, float]) -> dict[str, Any]:
    """A Job as status shows it."""
    place = labels.read(job.labels)
    return {
        "id": job.id,
        "role": place.role if place else None,
        "index": place.index if place else None,
        "generation": place.generation if place else None,
        "stage": job.status.stage,
        "message": job.status.message,
        "flavor": job.flavor,
        "url": job.url,
        "cost_usd": round(costs.of_job(job, prices), 4),
    }


def _judge(bucket: Bucket, run: str, waiting: Iterable[JobInfo]) -> tuple[Roster | None, str | None]:
    """The run's roster, if it is in the bucket, and why its Jobs should be over."""
    try:
        roster = Roster.read(bucket, run)
        spec = RunSpec.read(bucket, run)
    except ConfigError:
        return None, None
    if lease.ended(bucket, run):
        return roster, "its run is over"
    try:
        age_s = bucket.age_s(lease.lease_key(run))
    except NotFound:
        return roster, "its run has no lease"
    if any(roster.owns(job) and (job.labels or {})["asyncgrpo-role"] == "trainer" for job in waiting):
        return roster, None
    if age_s > spec.recipe.jobs.lease_s:
        return roster, f"its run's lease was not renewed for {age_s:.0f} s"
    return roster, None


def _ours_by_command(job: JobInfo, role: str) -> bool:
    """Whether the command is one that this program starts its roles with."""
    return " ".join([*(job.command or []), *(job.arguments or [])]).endswith(f"role {role}")


def _state(progress: Mapping[str, Any], jobs: Iterable[JobInfo], ended: bool) -> str:
    state = str(progress.get("state") or "starting")
    if state in ("done", "failed"):
        return state
    if not any(job.status.stage not in TERMINAL for job in jobs):
        return "stopped" if ended else "dead"
    return "stopping" if ended else state


def _order(job: JobInfo) -> tuple[bool, str, int, int]:
    place = labels.read(job.labels)
    assert place is not None
    return place.role != "trainer", place.role, place.index, place.generation


def _read(bucket: Bucket, key: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(bucket.get(key))
        return found
    except NotFound:
        return {}
