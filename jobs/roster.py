"""The roster: what the Jobs of a run look like, kept in the bucket, so that any machine can lead, judge and end them.

Anybody in a namespace can give a Job the labels of a run. So a Job counts as the run's own only if whoever started it,
its image, command and flavor are those of the roster: another one is never sent a secret, nor cancelled.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from huggingface_hub import JobInfo, Volume

from jobs import labels
from jobs.bucket import Bucket
from jobs.errors import ConfigError, NotFound

Role = Literal["replica", "trainer"]


@dataclass(frozen=True)
class JobPlan:
    """All that a Job of the run is started with, secrets apart. `timeout_s` is the Hub's own limit for it.

    `ports` are those that it serves: exposed, or open to its network group if it joins one.
    """

    image: str
    command: list[str]
    flavor: str
    environment: dict[str, str]
    timeout_s: int
    volumes: list[Any] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    network_group: str | None = None


@dataclass(frozen=True)
class Roster:
    """The plans of a run's Jobs by role, where they run, and the id of the user who started them (None: unknown)."""

    run: str
    endpoint: str
    namespace: str
    initiator: str | None
    plans: Mapping[Role, JobPlan]

    def owns(self, job: JobInfo) -> bool:
        """Whether the Job is one that this run started, whatever its labels say."""
        place = labels.read(job.labels)
        if place is None or place.run != self.run or place.role not in self.plans:
            return False
        return looks_as_planned(job, self.plans[place.role], self.namespace, self.initiator)  # type: ignore[index]

    def to_json(self) -> bytes:
        """As it lies in the bucket, below its signature. Holds no secret."""
        plans = {
            role: {**asdict(plan), "volumes": [v.to_dict() for v in plan.volumes]} for role, plan in self.plans.items()
        }
        return json.dumps({**self.__dict__, "plans": plans}, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Roster":
        """Reads a roster back; raises ConfigError if it is none of this version."""
        try:
            values = json.loads(data)
            plans: dict[Role, JobPlan] = {
                role: JobPlan(**{**plan, "volumes": [Volume(**volume) for volume in plan["volumes"]]})
                for role, plan in values.pop("plans").items()
            }
            return cls(plans=plans, **values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"the roster cannot be read by this version of asyncgrpo: {error!r}") from error

    @classmethod
    def read(cls, bucket: Bucket, run: str, key: str | None = None, within_s: float = 0.0) -> "Roster":
        """The roster of `run`. With the run's key, its signature is verified: who starts Jobs gives them secrets.

        Raises:
            ConfigError: no Jobs were ever started for it from this bucket, or it was not signed with this key.
        """
        try:
            signature, _, data = bucket.get_shown(roster_key(run), within_s).partition(b"\n")
            if key is not None and not hmac.compare_digest(signature, _sign(data, key)):
                raise ConfigError(
                    f"{roster_key(run)} was not signed with the key of run {run}: no Job is started by it."
                )
            return cls.from_json(data)
        except NotFound as error:
            where = bucket.settings.url
            raise ConfigError(
                f"run {run!r} has no Jobs that were started with the bucket {where}: no {error.key}."
            ) from error

    def write(self, bucket: Bucket, key: str) -> None:
        """Puts it into the bucket, signed with the run's key, before the first Job is started."""
        bucket.put(roster_key(self.run), _sign(self.to_json(), key) + b"\n" + self.to_json())


def roster_key(run: str) -> str:
    """Key of the run's roster."""
    return f"runs/{run}/crew"


def _sign(data: bytes, key: str) -> bytes:
    return hmac.new(key.encode(), b"roster\n" + data, hashlib.sha256).hexdigest().encode()


def replicas_prefix(run: str) -> str:
    """Where the records of a run's replicas lie."""
    return f"runs/{run}/replicas/"


def replica_key(run: str, index: int) -> str:
    """Key of a replica's record: where the proxy finds it."""
    return f"{replicas_prefix(run)}{index}.json"


def looks_as_planned(job: JobInfo, plan: JobPlan, namespace: str, initiator: str | None) -> bool:
    """Whether namespace, initiator, image, command and flavor of the Job are as planned."""
    image = job.docker_image or f"hf.co/spaces/{job.space_id}"
    started_by = job.initiator.id if job.initiator else None
    return (
        job.owner.name == namespace
        and (initiator is None or started_by is None or started_by == initiator)
        and image.removeprefix("https://") == plan.image.removeprefix("https://")
        and [*(job.command or []), *(job.arguments or [])] == plan.command
        and job.flavor == plan.flavor
    )
