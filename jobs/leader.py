"""Who leads a run: one of its processes at a time, known by a heartbeat in the bucket.

The leader keeps the number of replicas: it starts what is missing, lets go what is too much, and starts a dead trainer
again. The launcher leads while it follows. When it has gone (or never stayed), the first of the run's Jobs that sees
no heartbeat takes over by a conditional PUT to `runs/<run>/leader.json`; the trainer looks sooner than replicas do.
Nobody compares clocks of two machines: a heartbeat is one that changed, on the watcher's own clock.
"""

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub import JobInfo

from jobs import hub, labels, lease, reward_server
from jobs.bucket import SHOWN_S, Bucket
from jobs.crew import TERMINAL, Crew
from jobs.deadlines import Watch
from jobs.errors import AsyncgrpoError, BucketError, ConfigError, NotFound, RunFailed
from jobs.progress import progress_key
from jobs.recipe import JobSettings
from jobs.roster import Roster
from jobs.spec import RunSpec

log = logging.getLogger(__name__)

BEAT_S = 10.0
"""Between two heartbeats of a leader."""
TRAINER_PATIENCE_S, REPLICA_PATIENCE_S = 60.0, 150.0
"""How long a Job sees no heartbeat before it leads: more than a bucket's or a launcher's short absence, less than
jobs.lease_s (600), within which a dead trainer is to be back. The trainer comes first."""
LOOK_S = 10.0
"""Between two looks of a Job that may have to lead; the Hub's quota allows 1,000 calls in 5 minutes."""
DRAIN_S = 600.0
"""How long a replica that leaves gets for its last completions; TRL's own time-out for one request."""
MAX_TRAINER_RESTARTS = 3
"""How often a trainer that was killed or preempted is started again. One that failed by its own word is not."""


def leader_key(run: str) -> str:
    """Key of the leader's heartbeat."""
    return f"runs/{run}/leader.json"


def wanted_key(run: str) -> str:
    """Key of the wanted number of replicas, once it was changed."""
    return f"runs/{run}/wanted.json"


def ask_for(bucket: Bucket, run: str, replicas: int) -> None:
    """Tells the leader how many replicas are wanted from now on."""
    bucket.put(wanted_key(run), json.dumps({"replicas": replicas}).encode())


def wanted(bucket: Bucket, run: str) -> int | None:
    """How many replicas were last asked for; None if nobody has asked since the start."""
    try:
        return int(json.loads(bucket.get(wanted_key(run)))["replicas"])
    except NotFound:
        return None


@dataclass(frozen=True)
class Changes:
    """What brings a crew to the wanted number of replicas."""

    join: list[int]
    leave: list[int]


def changes(wanted: int, present: list[int]) -> Changes:
    """The replicas to start and to let go. The lowest indexes stay: their prefixes are cached, their numbers known."""
    return Changes([i for i in range(wanted) if i not in present], [i for i in present if i >= wanted])


def drained(index: int, proxy: Mapping[str, Any]) -> bool:
    """Whether the proxy's status shows that a retired replica has no completion left: all its engines are gone."""
    engines = [e for e in proxy.get("replicas") or [] if str(e.get("name")).partition(".")[0] == str(index)]
    return bool(proxy) and all(engine.get("state") == "gone" for engine in engines)


class Leadership:
    """One process's claim to lead. `who` is shown to users ("launcher", "trainer", "replica 1")."""

    def __init__(
        self, bucket: Bucket, run: str, who: str, patience_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bucket, self._key, self._who = bucket, leader_key(run), who
        self._patience_s, self._clock = patience_s, clock
        self._nonce = uuid.uuid4().hex
        self._beats = 0
        self._beat_at = float("-inf")
        self._seen: bytes | None = None
        self._seen_at = clock()
        self.held = False

    def hold(self) -> bool:
        """Takes the lead if nobody has it, or renews it; whether this process leads now.

        Raises:
            BucketError: the bucket does not answer. A leader that cannot show it is one has lost the lead after
                `patience_s`.
        """
        now = self._clock()
        if self.held and now - self._beat_at < BEAT_S:
            return True
        self.held = self.held and now - self._beat_at < self._patience_s
        try:
            content, etag = self._bucket.get_tagged(self._key)
        except NotFound:
            return self._won(self._bucket.put_new(self._key, self._beat()), now)
        if content != self._seen:
            self._seen, self._seen_at = content, now
        told = json.loads(content)
        mine, free = told.get("nonce") == self._nonce, told.get("who") is None
        if mine or free or now - self._seen_at > self._patience_s:
            return self._won(self._bucket.put_if(self._key, self._beat(), etag), now)
        return self._won(False, now)

    def release(self) -> None:
        """Lets another process lead at once."""
        if self.held:
            self._bucket.put(self._key, json.dumps({"who": None, "nonce": self._nonce}).encode())
            self.held = False

    def _won(self, held: bool, now: float) -> bool:
        if held and not self.held:
            log.info("%s leads the run now", self._who)
        self.held = held
        if held:
            self._beat_at = now
        return held

    def _beat(self) -> bytes:
        self._beats += 1
        return json.dumps({"who": self._who, "nonce": self._nonce, "beat": self._beats}).encode()


class Leader:
    """Keeps a run's crew as it should be, while it leads."""

    def __init__(
        self,
        bucket: Bucket,
        run: str,
        crew: Crew,
        replicas: int,
        leadership: Leadership,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.crew, self.leadership = crew, leadership
        self._bucket, self._run, self._replicas, self._clock = bucket, run, replicas, clock
        self._leaving: dict[int, float] = {}
        self._adopted = False

    def leads(self) -> bool:
        """Whether this process leads, after another try to. Asks the bucket alone, for the Hub counts every call."""
        try:
            self.leadership.hold()
        except (BucketError, ValueError) as error:  # no answer, or one that is no record
            log.warning("leading the run: %s", error)
        self._adopted = self._adopted and self.leadership.held
        return self.leadership.held

    def tend(self, jobs: Mapping[str, JobInfo], proxy: Mapping[str, Any]) -> bool:
        """Does what is due for the replicas, if this process leads; returns whether it does.

        `jobs` is a listing of the run's Jobs, `proxy` the proxy's last status. A bucket that does not answer delays
        what is due; in a run that was ended or stopped nothing is.
        """
        if not self.leads():
            return False
        try:
            if not self._adopted:
                self.crew.adopt(jobs)
                self._adopted = True
            if not lease.ended(self._bucket, self._run):
                self._number(proxy)
                self.crew.tend(jobs)
        except (BucketError, ValueError) as error:
            log.warning("leading the run: %s", error)
        return self.leadership.held

    @property
    def wanted(self) -> int:
        """How many replicas there should be."""
        asked = wanted(self._bucket, self._run)
        return self._replicas if asked is None else asked

    def _number(self, proxy: Mapping[str, Any]) -> None:
        due = changes(self.wanted, self.crew.replicas())
        for index in due.join:
            try:
                log.info("replica %d joins as Job %s", index, self.crew.start("replica", index))
            except RunFailed as error:  # no quota, say: those that are there go on
                log.error("%s", error)
        for index in due.leave:
            self.crew.retire(index)
            since = self._leaving.setdefault(index, self._clock())
            if drained(index, proxy) or self._clock() - since > DRAIN_S:
                log.info("replica %d leaves", index)
                self.crew.dismiss(index)
                del self._leaving[index]


class StandIn:
    """A thread of one of the run's own Jobs, which leads when nobody else does."""

    def __init__(self, bucket: Bucket, run: str, leader: Leader, settings: JobSettings, look_s: float = LOOK_S) -> None:
        self._bucket, self._run, self.leader, self._look_s = bucket, run, leader, look_s
        self._watch = Watch(settings)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="stand-in leader", daemon=True)

    @classmethod
    def from_env(cls, bucket: Bucket, spec: RunSpec, who: str, environ: Mapping[str, str]) -> "StandIn | None":
        """The stand-in of this Job; None where there is no Hub to start Jobs at: a machine of the user's own."""
        if not (environ.get("HF_TOKEN") and environ.get("HF_ENDPOINT") and environ.get("JOB_ID")):
            return None
        try:
            roster = Roster.read(bucket, spec.run, environ.get("ASYNCGRPO_KEY", ""), SHOWN_S)
        except ConfigError as error:
            log.warning("%s", error)
            return None
        patience_s = TRAINER_PATIENCE_S if who == "trainer" else REPLICA_PATIENCE_S
        names = [*bucket.settings.secrets(), "ASYNCGRPO_KEY", "HF_TOKEN"]
        crew = Crew(
            hub.connect(environ["HF_ENDPOINT"], environ["HF_TOKEN"]),
            roster.namespace,
            spec.run,
            bucket,
            roster.plans,
            {name: environ[name] for name in names} | reward_server.secrets(environ),
            initiator=roster.initiator,
        )
        leadership = Leadership(bucket, spec.run, who, patience_s)
        leader = Leader(bucket, spec.run, crew, spec.recipe.replica.count, leadership)
        return cls(bucket, spec.run, leader, spec.recipe.jobs)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def close(self, over: bool) -> None:
        """Ends the thread. `over`: the run is, so a leader cancels the replicas; else it lets another one lead."""
        self._stop.set()
        self._thread.join(hub.CALL_S)
        if not self.leader.leadership.held:
            return
        try:
            if over:
                self.leader.crew.cancel("replica")
            self.leader.leadership.release()
        except AsyncgrpoError as error:
            log.error("ending the lead: %s", error)

    def look(self) -> None:
        """One look: leads if nobody else does."""
        if not self.leader.leads():
            return
        jobs = self.leader.crew.jobs()
        progress = _read(self._bucket, progress_key(self._run))
        if not self.leader.tend(jobs, progress.get("proxy") or {}):
            return
        trainer = trainer_of(jobs)
        if trainer is not None and trainer.status.stage in TERMINAL:
            self._trainer_ended(trainer, progress)
            return
        crew = self.leader.crew
        posts = {job_id: jobs[job_id] for job_id in crew.job_ids() if job_id in jobs}
        for overdue in self._watch.look(posts, progress, time.monotonic()):
            if overdue.fatal:
                self._over(overdue.words)
                return
            log.warning("%s: another Job takes its place", overdue.words)
            crew.end(overdue.job_id)
            if overdue.role == "trainer":
                crew.start("trainer")

    def _trainer_ended(self, trainer: JobInfo, progress: Mapping[str, Any]) -> None:
        place = labels.read(trainer.labels)
        over = why_over(trainer.status.stage, progress.get("state"), place.generation if place else 0)
        if over is None and not lease.ended(self._bucket, self._run):
            log.warning("the trainer was ended (%s): starting a new attempt", trainer.status.message)
            self.leader.crew.start("trainer")
        else:
            self._over(over or "stopped")

    def _over(self, why: str) -> None:
        log.warning("the run is over (%s): ending its Jobs", why)
        lease.end(self._bucket, self._run)
        self.leader.crew.cancel()

    def _work(self) -> None:
        while not self._stop.wait(self._look_s):
            try:
                self.look()
            except (AsyncgrpoError, *hub.UNSURE) as error:
                log.warning("leading the run: %s", error)
            except Exception:  # whatever it was: without this thread nobody would keep the run together
                log.exception("leading the run")


def trainer_of(jobs: Mapping[str, JobInfo]) -> JobInfo | None:
    """The trainer's newest Job."""
    trainers = [job for job in jobs.values() if (place := labels.read(job.labels)) and place.role == "trainer"]
    return max(trainers, key=lambda job: int((job.labels or {})["asyncgrpo-generation"]), default=None)


def why_over(stage: str, state: str | None, restarts: int) -> str | None:
    """Why a run whose trainer Job ended in `stage` is over; None if the trainer is to be started again.

    `state` is what its progress says, `restarts` how often it was started again. One that ended before it could say
    anything would end so again.
    """
    if state in ("done", "failed"):
        return state
    if stage == "CANCELED":
        return "the trainer's Job was cancelled"
    if state is None:
        return "the trainer ended before it began to train"
    if restarts >= MAX_TRAINER_RESTARTS:
        return f"the trainer was ended {restarts + 1} times"
    return None


def _read(bucket: Bucket, key: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(bucket.get(key))
        return found
    except NotFound:
        return {}
