"""What can be done to a run from any machine, by its labels and its bucket alone: look at it, stop it, change its size.

Also `reap`: ends Jobs of runs that nobody leads any more.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub import JobInfo

from jobs import costs, hub, job_logs, labels, leader, lease
from jobs.bucket import Bucket, BucketSettings
from jobs.crew import TERMINAL, Crew
from jobs.errors import ConfigError, NotFound
from jobs.progress import progress_key
from jobs.roster import Roster, roster_key
from jobs.site import Account, Site
from jobs.spec import RunSpec

OVERDUE_S = 300.0
"""How long after its deadline a Job is reaped: the Hub ends Jobs at their time-out, give or take."""


class Operation:
    """One run, seen from anywhere. `crew` is None where its roles run on machines of the user's own."""

    def __init__(self, site: Site | None, bucket: Bucket, run: str) -> None:
        self.site, self.bucket, self.run = site, bucket, run
        self.spec = RunSpec.read(bucket, run)
        self.crew: Crew | None = None
        if site is not None:
            roster = Roster.read(bucket, run)
            self.crew = Crew(site.hub(), site.namespace, run, bucket, roster.plans, {}, initiator=roster.initiator)

    @classmethod
    def from_env(cls, environ: Mapping[str, str], bucket: str | None, run: str) -> "Operation":
        """The run as the bucket tells it: which Hub and namespace it is at, if it is at one.

        Raises:
            ConfigError: no such run in the bucket, an incomplete bucket, or no token for its Hub.
        """
        settings = BucketSettings.from_env(environ if bucket is None else {**environ, "ASYNCGRPO_BUCKET": bucket})
        opened, name = Bucket(settings), labels.run_name(run)
        RunSpec.read(opened, name)
        if not opened.list(roster_key(name)):
            return cls(None, opened, name)
        roster = Roster.read(opened, name)
        site = Site.from_env(environ, roster.namespace, bucket)
        if site.endpoint != roster.endpoint:  # the token goes where the user says, not where a bucket does
            raise ConfigError(f"run {name} is at {roster.endpoint}: set HF_ENDPOINT to it. It is {site.endpoint}.")
        return cls(site, opened, name)

    def status(self) -> dict[str, Any]:
        """How the run is: progress, replicas, Jobs, who leads, what it has cost so far."""
        prices: dict[str, float] = {}
        jobs: list[JobInfo] = []
        if self.site is not None:
            prices = costs.usd_per_minute(hub.patiently(self.site.hub().list_jobs_hardware))
            jobs = sorted(self._jobs().values(), key=_order)
        progress = _read(self.bucket, progress_key(self.run))
        proxy = progress.get("proxy") or {}
        asked = leader.wanted(self.bucket, self.run)
        return {
            "run": self.run,
            "recipe": self.spec.recipe.name,
            "state": _state(progress, None if self.site is None else jobs, lease.ended(self.bucket, self.run)),
            "reason": progress.get("reason"),
            "attempt": progress.get("attempt"),
            "step": progress.get("step", 0),
            "max_steps": progress.get("max_steps") or self.spec.recipe.settings.get("max_steps"),
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
        if self.site is None:
            raise ConfigError(
                f"run {self.run} has no Jobs: its roles run on machines of your own, and so do their logs."
            )
        found = {job.id: labels.read(job.labels) for job in self._jobs().values()}
        places = {job_id: place for job_id, place in found.items() if place is not None}
        own = [job_id for job_id, place in places.items() if (place.role, place.index) == (role, index)]
        if not own:
            known = sorted({f"{place.role} {place.index}" for place in places.values()})
            raise ConfigError(f"run {self.run} has no {role} {index}. It has: {', '.join(known) or 'no Jobs'}.")
        newest = max(own, key=lambda job_id: places[job_id].generation)
        return job_logs.lines(self.site.hub(), self.site.namespace, newest, follow)

    def stop(self) -> list[str]:
        """Ends the run: its lease first, so that nothing is started again; then all its Jobs. Returns their ids.

        Roles on machines of the user's own see that the lease has ended and end themselves.

        Raises:
            RunFailed: Jobs that do not end.
        """
        lease.end(self.bucket, self.run)
        alive = [job.id for job in self._jobs().values() if job.status.stage not in TERMINAL]
        if self.crew is not None:
            self.crew.cancel()
        return alive

    def _jobs(self) -> dict[str, JobInfo]:
        return self.crew.jobs() if self.crew is not None else {}

    def scale(self, replicas: int) -> None:
        """Asks the run's leader for another number of replicas.

        Raises:
            ConfigError: less than one, the run is over, or its roles run on machines of the user's own.
        """
        if self.site is None:
            raise ConfigError(
                f"run {self.run} has no Jobs: start or end `asyncgrpo role replica` on machines of your own."
            )
        if replicas < 1:
            raise ConfigError(f"--replicas {replicas}: at least 1 is needed. To end the run: asyncgrpo stop {self.run}")
        if lease.ended(self.bucket, self.run):
            raise ConfigError(f"run {self.run} is over: there is nobody to start or to end replicas.")
        leader.ask_for(self.bucket, self.run, replicas)


def runs(account: Account) -> list[dict[str, Any]]:
    """The runs that have living Jobs in the namespace, as their labels tell it."""
    prices = costs.usd_per_minute(hub.patiently(account.hub().list_jobs_hardware))
    alive: dict[str, list[tuple[JobInfo, labels.Place]]] = {}
    for job in hub.list_jobs(account.hub(), account.namespace):
        if (place := labels.read(job.labels)) and job.status.stage not in TERMINAL:
            alive.setdefault(place.run, []).append((job, place))
    return [
        {
            "run": run,
            "recipe": (jobs[0][0].labels or {}).get("asyncgrpo-recipe"),
            "trainer": next((str(job.status.stage) for job, place in jobs if place.role == "trainer"), None),
            "replicas": sum(place.role == "replica" for _, place in jobs),
            "usd_per_hour": round(sum(60 * prices.get(str(job.flavor), 0.0) for job, _ in jobs), 2),
        }
        for run, jobs in sorted(alive.items())
    ]


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


def _state(progress: Mapping[str, Any], jobs: Iterable[JobInfo] | None, ended: bool) -> str:
    state = str(progress.get("state") or "starting")
    if state in ("done", "failed"):
        return state
    if jobs is not None and not any(job.status.stage not in TERMINAL for job in jobs):
        return "stopped" if ended else "dead"
    return "stopping" if ended else state


def _order(job: JobInfo) -> tuple[bool, str, int, int]:
    place = labels.read(job.labels)
    assert place is not None
    return place.role != "trainer", place.role, place.index, place.generation


def _read(bucket: Bucket, key: str) -> dict[str, Any]:
    try:
        return bucket.get_json(key)
    except NotFound:
        return {}
