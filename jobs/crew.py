"""The crew: the Jobs of a run. Starts them through huggingface_hub, and starts a dead replica again."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from huggingface_hub import HfApi, JobInfo
from huggingface_hub.errors import HfHubHTTPError

from jobs.bucket import Bucket
from jobs.errors import RunFailed

log = logging.getLogger(__name__)

Role = Literal["replica", "trainer"]

PORT = 8000
"""Port of a replica's first engine; the others count on from it."""
MAX_RESTARTS = 5
"""How often one replica is started again before the run goes on without it."""
RESTART_PAUSE_S = 1.0
"""Pause before the first restart of a replica; doubles with each, up to a minute."""
CREATE_TRIES = 3
TERMINAL = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
"""Stages that a Job never leaves (huggingface_hub.JobStage)."""


@dataclass(frozen=True)
class JobPlan:
    """All that a Job of the run is started with, secrets apart."""

    image: str
    command: list[str]
    flavor: str
    environment: dict[str, str]
    timeout_s: int
    volumes: list[Any] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)


@dataclass
class _Post:
    """One place of the crew: the Job that holds it and how often it was filled."""

    job_id: str
    generation: int
    restart_at: float | None = None


def labels(run: str, role: Role, index: int, generation: int) -> dict[str, str]:
    """Labels by which any machine finds a run's Jobs again; [A-Za-z0-9_-], at most 100 characters each (Hub's rule)."""
    return {
        "asyncgrpo-run": run,
        "asyncgrpo-role": role,
        "asyncgrpo-index": str(index),
        "asyncgrpo-generation": str(generation),
    }


class Crew:
    """Starts, watches, restarts and cancels the Jobs of one run. Not thread-safe: one thread leads."""

    def __init__(
        self,
        hub: HfApi,
        namespace: str,
        run: str,
        bucket: Bucket,
        plans: Mapping[Role, JobPlan],
        secrets: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hub, self._namespace, self._run, self._bucket = hub, namespace, run, bucket
        self._plans, self._secrets, self._clock = plans, dict(secrets), clock
        self._posts: dict[tuple[Role, int], _Post] = {}
        self._announced: dict[int, list[str]] = {}
        self.restarts = 0

    def start(self, role: Role, index: int = 0) -> str:
        """Starts the Job for a place and returns its id. An answer that got lost does not start a second one."""
        post = self._posts.get((role, index))
        generation = post.generation + 1 if post else 0
        job_id = self._create(role, index, generation)
        self._posts[role, index] = _Post(job_id, generation)
        self._announced.pop(index, None) if role == "replica" else None
        return job_id

    def jobs(self) -> dict[str, JobInfo]:
        """The run's Jobs by id, from one listing."""
        found = self._hub.list_jobs(namespace=self._namespace, labels={"asyncgrpo-run": self._run})
        return {job.id: job for job in found}

    def adopt(self) -> None:
        """Takes over the Jobs that an earlier leader started: the newest generation of each place."""
        for job in self.jobs().values():
            own = job.labels or {}
            role = own.get("asyncgrpo-role")
            if role not in ("replica", "trainer"):
                continue
            place: tuple[Role, int] = (role, int(own.get("asyncgrpo-index", 0)))  # type: ignore[assignment]
            generation = int(own.get("asyncgrpo-generation", 0))
            if place not in self._posts or self._posts[place].generation < generation:
                self._posts[place] = _Post(job.id, generation)

    def job_id(self, role: Role, index: int = 0) -> str:
        """Id of the Job that holds the place now."""
        return self._posts[role, index].job_id

    def given_up(self, index: int) -> bool:
        """Whether the replica ended too often to be started again."""
        return self._posts["replica", index].restart_at == float("inf")

    def tend(self, jobs: Mapping[str, JobInfo]) -> None:
        """Announces replicas whose addresses are known and starts dead ones again, with back-off and a bound."""
        for (role, index), post in list(self._posts.items()):
            if role != "replica":
                continue
            job = jobs.get(post.job_id)
            if job is None:
                continue
            if job.status.stage in TERMINAL:
                self._restart_when_due(index, post, job)
            elif job.status.expose_urls and self._announced.get(index) != job.status.expose_urls:
                self._announce(index, post.job_id, list(job.status.expose_urls))

    def cancel(self) -> None:
        """Cancels every Job of the run until two listings in a row show none alive."""
        clean = 0
        while clean < 2:
            alive = [job for job in self.jobs().values() if job.status.stage not in TERMINAL]
            clean = 0 if alive else clean + 1
            for job in alive:
                try:
                    self._hub.cancel_job(job_id=job.id, namespace=self._namespace)
                except HfHubHTTPError as error:
                    log.debug("cancel %s: %s", job.id, error)
            if alive:
                time.sleep(0.2)

    def _restart_when_due(self, index: int, post: _Post, job: JobInfo) -> None:
        now = self._clock()
        if post.restart_at is None:
            why = job.status.message or job.status.stage
            if post.generation >= MAX_RESTARTS:
                log.error(
                    "replica %d ended (%s) and was started again %d times: it stays down", index, why, MAX_RESTARTS
                )
                post.restart_at = float("inf")
                return
            post.restart_at = now + min(RESTART_PAUSE_S * 2**post.generation, 60.0)
            log.warning("replica %d ended (%s): starting another in its place", index, why)
        if now >= post.restart_at:
            self.start("replica", index)
            self.restarts += 1

    def _announce(self, index: int, job_id: str, urls: list[str]) -> None:
        record = {"index": index, "job_id": job_id, "urls": urls}
        self._bucket.put(f"runs/{self._run}/replicas/{index}.json", json.dumps(record).encode())
        self._announced[index] = urls

    def _create(self, role: Role, index: int, generation: int) -> str:
        plan, own = self._plans[role], labels(self._run, role, index, generation)
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
                    labels=own,
                    volumes=plan.volumes or None,
                    expose=plan.ports or None,
                    namespace=self._namespace,
                ).id
            except HfHubHTTPError as error:
                # 500s after a created Job are reported, and POST has no idempotency key: look before posting again.
                for job in self.jobs().values():
                    if job.labels and own.items() <= job.labels.items():
                        return job.id
                status = error.response.status_code if error.response is not None else 0
                if (status and status < 500 and status != 429) or not tries_left:
                    raise RunFailed(f"{role} {index} could not be started on flavor {plan.flavor}: {error}") from error
                time.sleep(1.0)
        raise AssertionError("unreachable")
