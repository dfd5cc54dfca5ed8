"""The crew: the Jobs of a run. Starts them through huggingface_hub, starts a dead replica again, and ends them all."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from huggingface_hub import HfApi, JobInfo

from jobs import hub as hub_calls
from jobs import labels
from jobs.bucket import Bucket
from jobs.errors import ConfigError, RunFailed
from jobs.http import group_url
from jobs.roster import JobPlan, Role, Roster, replica_key

log = logging.getLogger(__name__)

__all__ = ["PORT", "TERMINAL", "Crew", "JobPlan", "Role"]

PORT = 8000
"""Port of a replica's first engine; the others count on from it."""
MAX_RESTARTS = 5
"""How often in a row one replica is started again before the run goes on without it."""
STEADY_S = 600.0
"""A replica that ran this long before it ended was well: its restarts are counted anew. Ten times a slow start."""
RESTART_PAUSE_S = 1.0
"""Pause before the first restart of a replica; doubles with each, up to a minute."""
CREATE_TRIES = 3
SETTLE_LOOKS, SETTLE_PAUSE_S = 3, 1.0
"""How often, and how far apart, a Job is looked for whose creation was not answered: it may appear a little later."""
CANCEL_PAUSE_S = 0.5
CANCEL_PATIENCE_S = 120.0
"""How long Jobs are cancelled again before the user is told to do it: longer than a Hub that is away for a minute."""
TERMINAL = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
"""Stages that a Job never leaves (huggingface_hub.JobStage)."""


@dataclass
class _Post:
    """One place of the crew: the Job that holds it, how often it was filled, and how often in a row it fell empty."""

    job_id: str
    generation: int
    failures: int = 0
    restart_at: float | None = None
    leaving: bool = False
    dismissed: bool = False


class Crew:
    """Starts, watches, restarts and cancels the Jobs of one run. Not thread-safe: one thread leads.

    `initiator` is the id of the user who starts the Jobs, if it is known: Jobs of others are never taken for the run's.
    `earlier` has the last generation of each place in an earlier launch of the run (`earlier_generations`).
    """

    def __init__(
        self,
        hub: HfApi,
        namespace: str,
        run: str,
        bucket: Bucket,
        plans: Mapping[Role, JobPlan],
        secrets: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        initiator: str | None = None,
        earlier: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        self._hub, self._namespace, self._run, self._bucket = hub, namespace, run, bucket
        self._plans, self._secrets, self._clock, self._initiator = plans, dict(secrets), clock, initiator
        self._posts: dict[tuple[Role, int], _Post] = {}
        self._announced: dict[int, list[str]] = {}
        self._earlier = dict(earlier or {})
        self.restarts = 0

    @property
    def roster(self) -> Roster:
        """What the run's Jobs look like."""
        return Roster(self._run, self._hub.endpoint, self._namespace, self._initiator, self._plans)

    def start(self, role: Role, index: int = 0) -> str:
        """Starts the Job for a place and returns its id. An answer that got lost does not start a second one.

        Raises:
            RunFailed: the Hub refused it, in the Hub's words.
        """
        post = self._posts.get((role, index))
        generation = post.generation + 1 if post else self._earlier.get((role, index), -1) + 1
        job_id = self._create(role, index, generation)
        self._posts[role, index] = _Post(job_id, generation, post.failures if post else 0)
        self._announced.pop(index, None) if role == "replica" else None
        return job_id

    def jobs(self) -> dict[str, JobInfo]:
        """The run's Jobs by id, from one listing. Jobs that only bear its labels are left out."""
        roster = self.roster
        found = hub_calls.list_jobs(self._hub, self._namespace, {labels.RUN: self._run})
        return {job.id: job for job in found if roster.owns(job)}

    def adopt(self, jobs: Mapping[str, JobInfo] | None = None) -> None:
        """Takes over the Jobs of an earlier leader: of each place the newest generation, a living Job first."""
        for job in sorted((self.jobs() if jobs is None else jobs).values(), key=_age):
            place = labels.read(job.labels)
            if place is None:
                continue
            key: tuple[Role, int] = (place.role, place.index)  # type: ignore[assignment]
            if key not in self._posts or self._posts[key].generation < place.generation:
                self._posts[key] = _Post(job.id, place.generation)

    def job_id(self, role: Role, index: int = 0) -> str:
        """Id of the Job that holds the place now."""
        return self._posts[role, index].job_id

    def job_ids(self) -> list[str]:
        """Ids of the Jobs that hold a place now."""
        return [job_id for _, _, job_id in self.places()]

    def places(self) -> list[tuple[Role, int, str]]:
        """Role, index and Job of each place."""
        return [(role, index, post.job_id) for (role, index), post in self._posts.items() if not post.dismissed]

    def end(self, job_id: str) -> None:
        """Cancels one Job; if it held a replica's place, `tend` fills that again."""
        self._cancel(job_id)

    def replicas(self) -> list[int]:
        """Indexes of the replicas that are there or to be started again, those that leave included."""
        return sorted(index for (role, index), post in self._posts.items() if role == "replica" and not post.dismissed)

    def given_up(self, index: int) -> bool:
        """Whether the replica ended too often to be started again."""
        return self._posts["replica", index].restart_at == float("inf")

    def tend(self, jobs: Mapping[str, JobInfo]) -> None:
        """Announces replicas whose addresses are known and starts dead ones again, with back-off and a bound.

        Of several Jobs for one place the newest stays: a creation that nobody answered may have made one after all.
        """
        self._sort_out(jobs)
        for (role, index), post in list(self._posts.items()):
            job = jobs.get(post.job_id)
            if role != "replica" or post.leaving or job is None:
                continue
            if job.status.stage in TERMINAL:
                self._restart_when_due(index, post, job)
            elif (urls := self._urls(index, post, job)) and self._announced.get(index) != urls:
                self._announce(index, post.job_id, urls)

    def retire(self, index: int) -> None:
        """Takes a replica out of the proxy's sight, so that it gets no new completions; it is not started again."""
        post = self._posts["replica", index]
        if not post.leaving:
            self._bucket.delete([replica_key(self._run, index)])
            self._announced.pop(index, None)
            post.leaving = True

    def dismiss(self, index: int) -> None:
        """Cancels a retired replica."""
        post = self._posts["replica", index]
        self._cancel(post.job_id)
        post.dismissed = post.leaving = True

    def cancel(self, role: Role | None = None, patience_s: float = CANCEL_PATIENCE_S) -> None:
        """Cancels every Job of the run (of `role`, if given) until two listings in a row show none alive.

        Raises:
            RunFailed: some are still alive after `patience_s`, or the Hub does not answer; names the Jobs and the fix.
        """
        deadline, clean = self._clock() + patience_s, 0
        fix = f"They cost money. Try again: asyncgrpo stop {self._run}"
        while True:
            try:
                jobs = self.jobs().values()
            except hub_calls.UNSURE as error:
                raise RunFailed(
                    f"the Jobs of run {self._run} could not be listed to be cancelled: {error}. {fix}"
                ) from error
            alive = [
                job
                for job in jobs
                if job.status.stage not in TERMINAL and role in (None, (job.labels or {})["asyncgrpo-role"])
            ]
            clean = 0 if alive else clean + 1
            if clean == 2:
                return
            if self._clock() > deadline:
                raise RunFailed(f"Jobs that do not end: {', '.join(job.id for job in alive)}. {fix}")
            for job in alive:
                self._cancel(job.id)
            time.sleep(CANCEL_PAUSE_S)

    def _cancel(self, job_id: str) -> None:
        try:
            self._hub.cancel_job(job_id=job_id, namespace=self._namespace)
        except hub_calls.UNSURE as error:
            log.debug("cancel %s: %s", job_id, error)

    def _sort_out(self, jobs: Mapping[str, JobInfo]) -> None:
        for job in jobs.values():
            place = labels.read(job.labels)
            post = self._posts.get((place.role, place.index)) if place else None  # type: ignore[arg-type]
            if place is None or post is None or job.id == post.job_id or job.status.stage in TERMINAL:
                continue
            if place.generation > post.generation:
                post.job_id, post.generation, post.restart_at = job.id, place.generation, None
            else:
                log.warning("%s %d has a second Job %s: cancelling it", place.role, place.index, job.id)
                self._cancel(job.id)

    def _restart_when_due(self, index: int, post: _Post, job: JobInfo) -> None:
        now = self._clock()
        if post.restart_at is None:
            post.failures = 1 if _ran_s(job) >= STEADY_S else post.failures + 1
            why = job.status.message or job.status.stage
            if not self._restart_later(index, post, why):
                return
            log.warning("replica %d ended (%s): starting another in its place", index, why)
        if post.restart_at is not None and now >= post.restart_at:
            try:
                self.start("replica", index)
                self.restarts += 1
            except RunFailed as error:
                post.failures += 1
                self._restart_later(index, post, str(error))

    def _restart_later(self, index: int, post: _Post, why: str) -> bool:
        """Sets when the replica is started again; False if it ended too often."""
        if post.failures > MAX_RESTARTS:
            log.error("replica %d ended (%s) and was started again %d times: it stays down", index, why, MAX_RESTARTS)
            post.restart_at = float("inf")
            return False
        post.restart_at = self._clock() + min(RESTART_PAUSE_S * 2 ** (post.failures - 1), 60.0)
        return True

    def _urls(self, index: int, post: _Post, job: JobInfo) -> list[str]:
        plan = self._plans["replica"]
        if plan.network_group is None:
            return list(job.status.expose_urls or [])
        return [group_url(alias(index, post.generation), port) for port in plan.ports]

    def _announce(self, index: int, job_id: str, urls: list[str]) -> None:
        record = {"index": index, "job_id": job_id, "urls": urls}
        self._bucket.put(replica_key(self._run, index), json.dumps(record).encode())
        self._announced[index] = urls

    def _create(self, role: Role, index: int, generation: int) -> str:
        plan = self._plans[role]
        own = labels.of_job(self._run, role, index, generation, time.time() + plan.timeout_s)
        environment = {**plan.environment, "ASYNCGRPO_RUN": self._run}
        if role == "replica":
            environment["ASYNCGRPO_REPLICA"] = str(index)
        for tries_left in reversed(range(CREATE_TRIES)):
            try:
                return self._hub.run_job(
                    image=plan.image,
                    command=plan.command,
                    env=environment,
                    secrets=self._secrets,
                    flavor=plan.flavor,
                    timeout=plan.timeout_s,
                    name=f"{self._run}-{role}-{index}",
                    labels={**plan.labels, **own},
                    volumes=plan.volumes or None,
                    expose=None if plan.network_group else plan.ports or None,
                    network_group=plan.network_group,
                    network_aliases=[alias(index, generation)] if plan.network_group and role == "replica" else None,
                    namespace=self._namespace,
                ).id
            except hub_calls.UNSURE as error:
                # 500s after a created Job are reported, and POST has no idempotency key: look before posting again.
                if hub_calls.passing(error) and (found := self._find(own)):
                    return found
                if not hub_calls.passing(error) or not tries_left:
                    raise RunFailed(f"{role} {index} could not be started on flavor {plan.flavor}: {error}") from error
        raise AssertionError("unreachable")

    def _find(self, own: Mapping[str, str]) -> str | None:
        """The living Job with exactly these labels, looked for several times."""
        for _ in range(SETTLE_LOOKS):
            time.sleep(SETTLE_PAUSE_S)
            for job in self.jobs().values():
                if job.labels and own.items() <= job.labels.items() and job.status.stage not in TERMINAL:
                    return job.id
        return None


def alias(index: int, generation: int) -> str:
    """The name of one replica Job in the run's network group.

    The next one in its place has another, so that no two answer to one name while the first is on its way out.
    """
    return f"replica-{index}-{generation}"


def earlier_generations(hub: HfApi, namespace: str, run: str) -> dict[tuple[str, int], int]:
    """The last generation of each place (role, index) that the run ever had Jobs for.

    Raises:
        ConfigError: one of them is alive.
    """
    found: dict[tuple[str, int], int] = {}
    for job in hub_calls.list_jobs(hub, namespace, {labels.RUN: run}):
        if (place := labels.read(job.labels)) is None:
            continue
        if job.status.stage not in TERMINAL:
            raise ConfigError(
                f"--resume: run {run} still has Jobs, such as {job.id} ({place.role} {place.index}, "
                f"{job.status.stage}). It goes on by itself; or stop it first: asyncgrpo stop {run}"
            )
        found[place.role, place.index] = max(place.generation, found.get((place.role, place.index), 0))
    return found


def _age(job: JobInfo) -> tuple[bool, float]:
    """Sorts living Jobs before dead ones, and newer before older."""
    return job.status.stage in TERMINAL, -(job.created_at.timestamp() if job.created_at else 0.0)


def _ran_s(job: JobInfo) -> float:
    """Seconds for which the Job was running."""
    return (job.finished_at - job.started_at).total_seconds() if job.started_at and job.finished_at else 0.0
