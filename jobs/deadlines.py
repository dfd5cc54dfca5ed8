"""Deadlines of a run's Jobs by role and stage: what waits, starts or keeps silent for too long. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import JobInfo

from jobs.recipe import JobSettings


@dataclass(frozen=True)
class Overdue:
    """A Job that took too long; `words` say what, the limit and its setting. `fatal`: another Job would not help."""

    job_id: str
    role: str
    words: str
    fatal: bool


@dataclass
class Watch:
    """Measures, on its own clock, for how long each Job has been as it is."""

    settings: JobSettings
    _since: dict[tuple[str, str], tuple[object, float]] = field(default_factory=dict)

    def look(self, jobs: Mapping[str, JobInfo], progress: Mapping[str, Any], now: float) -> list[Overdue]:
        """What is overdue among `jobs`, the Jobs that hold a place now. `progress` is what the trainer last wrote."""
        return [*self._scheduling(jobs, now), *self._trainer(jobs, progress, now), *self._replicas(jobs, progress, now)]

    def _scheduling(self, jobs: Mapping[str, JobInfo], now: float) -> list[Overdue]:
        limit = self.settings.schedule_deadline_s
        late: dict[str, list[JobInfo]] = {"trainer": [], "replica": []}
        all_of = {role: [job for job in jobs.values() if _role(job) == role] for role in late}
        for job in jobs.values():
            waited_s = self._for_s(job.id, "scheduling", job.status.stage == "SCHEDULING", now)
            if job.status.stage == "SCHEDULING" and waited_s > limit:
                late[_role(job)].append(job)
        return [
            Overdue(
                waiting[0].id,
                role,
                f"the Hub had no {waiting[0].flavor} for the {role} within jobs.schedule_deadline_s = {limit} s. "
                f"Choose another jobs.{role}_flavor, or wait longer.",
                fatal=True,
            )
            for role, waiting in late.items()
            # A replica may wait as long as it likes while another one has its machine.
            if waiting and len(waiting) == len(all_of[role])
        ]

    def _trainer(self, jobs: Mapping[str, JobInfo], progress: Mapping[str, Any], now: float) -> list[Overdue]:
        found = []
        for job in jobs.values():
            if _role(job) != "trainer" or job.status.stage != "RUNNING":
                continue
            starting = progress.get("state", "starting") != "training"
            start_s = self._for_s(job.id, "starting", starting, now)
            silent_s = self._for_s(job.id, "silent", progress.get("updated_at"), now)
            if starting and start_s > (limit := self.settings.start_deadline_s):
                words = f"no training step within jobs.start_deadline_s = {limit} s. Jobs: {_stages(jobs)}"
                found.append(Overdue(job.id, "trainer", words, fatal=True))
            elif progress and silent_s > (limit := self.settings.lease_s):
                words = f"the trainer's Job {job.id} has told nothing for jobs.lease_s = {limit} s"
                found.append(Overdue(job.id, "trainer", words, fatal=False))
        return found

    def _replicas(self, jobs: Mapping[str, JobInfo], progress: Mapping[str, Any], now: float) -> list[Overdue]:
        found = []
        limit = self.settings.ready_deadline_s
        engines = (progress.get("proxy") or {}).get("replicas")
        for job in jobs.values():
            if _role(job) != "replica" or job.status.stage != "RUNNING" or not engines:
                continue
            index = (job.labels or {})["asyncgrpo-index"]
            own = [engine for engine in engines if str(engine.get("name")).partition(".")[0] == index]
            ready = bool(own) and all(engine.get("state") == "ready" for engine in own)
            if self._for_s(job.id, "ready", ready, now) > limit and not ready:
                why = (
                    "; ".join(str(engine.get("reason")) for engine in own if engine.get("reason")) or "no reason known"
                )
                words = f"replica {index} was not ready within jobs.ready_deadline_s = {limit} s ({why})"
                found.append(Overdue(job.id, "replica", words, fatal=False))
        return found

    def _for_s(self, job_id: str, what: str, value: object, now: float) -> float:
        """Seconds since `what` of the Job has had this value."""
        before, since = self._since.get((job_id, what), (None, now))
        if before != value or (job_id, what) not in self._since:
            since = now
            self._since[job_id, what] = (value, now)
        return now - since


def _role(job: JobInfo) -> str:
    return (job.labels or {})["asyncgrpo-role"]


def _stages(jobs: Mapping[str, JobInfo]) -> str:
    return ", ".join(f"{_role(job)}: {job.status.stage}" for job in jobs.values())
