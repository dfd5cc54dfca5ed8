"""What the Hub knows about Jobs: their specification, stages, and labels. No HTTP, no processes."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from emulator.hardware import FLAVORS, Flavor

# Limits of labels: the docstring of huggingface_hub 2.4.0 `update_job_labels`.
LABEL = re.compile(r"[A-Za-z0-9_-]{1,100}")
EMPTY_OR_LABEL = re.compile(r"[A-Za-z0-9_-]{0,100}")
# Network names: the docstring of huggingface_hub 2.4.0 `run_job`.
GROUP = re.compile(r"[a-z0-9-]{1,46}")
ALIAS = re.compile(r"[a-z0-9-]{1,34}")
ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
DEFAULT_TIMEOUT_S = 30 * 60  # the Hub's own, when a Job asks for none
MAX_TIMEOUT_S = 30 * 24 * 3600  # an upper bound so that a mistaken unit is noticed
MAX_ATTEMPTS = 100
MAX_PORT = 65535
VOLUME_TYPES = ("bucket", "model", "dataset", "space")


class Stage(StrEnum):
    """Where a Job is in its life, in the Hub's words."""

    SCHEDULING = "SCHEDULING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    CANCELED = "CANCELED"
    ERROR = "ERROR"
    DELETED = "DELETED"

    @property
    def final(self) -> bool:
        """Whether a Job in this stage will never run again."""
        return self not in (Stage.SCHEDULING, Stage.RUNNING)


class BadRequest(ValueError):
    """A request the Hub refuses with 400; its text is what the client shows."""


class UnknownJob(KeyError):
    """No Job has this id in this namespace (404)."""


@dataclass(frozen=True)
class Volume:
    """A bucket's or repository's folder `path`, seen in the Job below `mount_path`."""

    type: str
    source: str
    mount_path: str
    revision: str | None = None
    read_only: bool | None = None
    path: str | None = None

    @property
    def writable(self) -> bool:
        """Buckets are written unless asked otherwise, repositories never are."""
        return self.type == "bucket" and not self.read_only

    def to_json(self) -> dict[str, Any]:
        """The volume as the Hub lists it, without what was not given."""
        answer: dict[str, Any] = {"type": self.type, "source": self.source, "mountPath": self.mount_path}
        for name, value in (("revision", self.revision), ("readOnly", self.read_only), ("path", self.path)):
            if value is not None:
                answer[name] = value
        return answer


@dataclass(frozen=True)
class Expose:
    """Ports reachable through the gateway; those in `public` without a token."""

    ports: tuple[int, ...] = ()
    public: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """In the words of the wire."""
        return {"ports": list(self.ports), "portsPublic": list(self.public)}


@dataclass(frozen=True)
class JobSpec:
    """What a client asked for. `secrets` holds values: they go to the process and nowhere else."""

    command: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    flavor: Flavor = FLAVORS["cpu-basic"]
    docker_image: str | None = None
    space_id: str | None = None
    timeout_s: int = DEFAULT_TIMEOUT_S
    attempts: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)
    volumes: tuple[Volume, ...] = ()
    expose: Expose = Expose()
    ssh: bool = False
    network: Mapping[str, Any] | None = None
    resource_group_id: str | None = None

    @property
    def image(self) -> str:
        """The image that the Job runs in, whichever way it was named."""
        return self.docker_image or f"hf.co/spaces/{self.space_id}"


def _strings(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadRequest(f'"{name}" must be an array of strings')
    return tuple(value)


def _variables(body: Mapping[str, Any], name: str) -> dict[str, str]:
    value = body.get(name) or {}
    if not isinstance(value, dict):
        raise BadRequest(f'"{name}" must be an object of strings')
    for key, text in value.items():
        if not ENVIRONMENT_NAME.fullmatch(key):
            raise BadRequest(f'"{name}": {key!r} is not a valid variable name')
        if isinstance(text, bool) or not isinstance(text, (str, int, float)) or "\0" in str(text):
            raise BadRequest(f'"{name}.{key}" must be a string')  # never the value: it may be a secret
    return {key: str(text) for key, text in value.items()}


def parse_labels(value: Any) -> dict[str, str]:
    """Check labels as the Hub does: keys and values of at most 100 characters of `[A-Za-z0-9_-]`.

    Raises BadRequest naming the label.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest('"labels" must be an object of strings')
    for key, text in value.items():
        if not LABEL.fullmatch(key) or not isinstance(text, str) or not EMPTY_OR_LABEL.fullmatch(text):
            raise BadRequest(
                f'"labels": {key!r}={text!r} is invalid: keys and values must be at most 100 characters'
                " and contain only alphanumeric characters, dashes and underscores"
            )
    return dict(value)


def _ports(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(port) is int and 0 < port <= MAX_PORT for port in value):
        raise BadRequest(f'"{name}" must be an array of port numbers between 1 and {MAX_PORT}')
    if len(set(value)) != len(value):
        raise BadRequest(f'"{name}" must not contain duplicates')
    return tuple(value)


def parse_expose(value: Any) -> Expose:
    """Check `{"ports": [...], "portsPublic": [...]}`; raises BadRequest unless public ports are a subset."""
    if not value:
        return Expose()
    if not isinstance(value, dict):
        raise BadRequest('"expose" must be an object')
    expose = Expose(
        _ports(value.get("ports") or [], "expose.ports"), _ports(value.get("portsPublic") or [], "expose.portsPublic")
    )
    if not set(expose.public) <= set(expose.ports):
        raise BadRequest('"expose.portsPublic" must be a subset of "expose.ports"')
    return expose


def _volumes(value: Any) -> tuple[Volume, ...]:
    volumes: list[Volume] = []
    for item in value or []:
        if not isinstance(item, dict) or item.get("type") not in VOLUME_TYPES:
            raise BadRequest(f'"volumes[].type" must be one of {", ".join(VOLUME_TYPES)}')
        source, mount_path = item.get("source"), item.get("mountPath")
        if not isinstance(source, str) or not source:
            raise BadRequest('"volumes[].source" must be a string')
        if not isinstance(mount_path, str) or not mount_path.startswith("/") or ".." in mount_path.split("/"):
            raise BadRequest('"volumes[].mountPath" must be an absolute path')
        if mount_path.rstrip("/") == "":
            raise BadRequest('"volumes[].mountPath" must not be "/"')
        path = item.get("path")
        if path is not None and (not isinstance(path, str) or ".." in path.split("/")):
            raise BadRequest('"volumes[].path" must be a relative path inside the volume')
        volumes.append(
            Volume(item["type"], source, mount_path.rstrip("/"), item.get("revision"), item.get("readOnly"), path)
        )
    mounts = [volume.mount_path for volume in volumes]
    if len(set(mounts)) != len(mounts):
        raise BadRequest('"volumes[].mountPath" must be unique')
    return tuple(volumes)


def _network(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not GROUP.fullmatch(str(value.get("group", ""))):
        raise BadRequest('"network.group" must be lowercase alphanumerics and dashes, 46 characters max')
    aliases = value.get("aliases") or []
    if not isinstance(aliases, list) or not all(isinstance(a, str) and ALIAS.fullmatch(a) for a in aliases):
        raise BadRequest('"network.aliases" must be lowercase alphanumerics and dashes, 34 characters max')
    if len(set(aliases)) != len(aliases):
        raise BadRequest('"network.aliases" must be unique within the job')
    return {"group": value["group"], "aliases": aliases}


def _count(body: Mapping[str, Any], name: str, default: int, largest: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= largest:
        raise BadRequest(f'"{name}" must be an integer between 1 and {largest}, got {value!r}')
    return value


def parse_spec(body: Any, flavors: Mapping[str, Flavor] = FLAVORS) -> JobSpec:
    """Turn the body of `POST /api/jobs/{namespace}` into a specification.

    Raises BadRequest with the field and the limit for whatever the Hub would refuse.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    command, arguments = _strings(body, "command"), _strings(body, "arguments")
    if not command and not arguments:
        raise BadRequest('"command" is required')
    image, space = body.get("dockerImage"), body.get("spaceId")
    if bool(image) == bool(space) or not isinstance(image or space, str):
        raise BadRequest('exactly one of "dockerImage" and "spaceId" is required')
    flavor = flavors.get(str(body.get("flavor") or "cpu-basic"))
    if flavor is None:
        raise BadRequest(f'"flavor" must be one of {", ".join(flavors)}, got {body.get("flavor")!r}')
    labels = parse_labels(body.get("labels"))
    if body.get("name") is not None:
        labels = parse_labels({**labels, "name": body["name"]})
    environment, secret = _variables(body, "environment"), _variables(body, "secrets")
    if both := sorted(set(environment) & set(secret)):
        raise BadRequest(f'{both[0]!r} is in both "environment" and "secrets"')
    return JobSpec(
        command=command,
        arguments=arguments,
        environment=environment,
        secrets=secret,
        flavor=flavor,
        docker_image=image,
        space_id=space,
        timeout_s=_count(body, "timeoutSeconds", DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S),
        attempts=_count(body, "attempts", 1, MAX_ATTEMPTS),
        labels=labels,
        volumes=_volumes(body.get("volumes")),
        expose=parse_expose(body.get("expose")),
        ssh=bool((body.get("ssh") or {}).get("enabled")),
        network=_network(body.get("network")),
        resource_group_id=body.get("resourceGroupId"),
    )


def now() -> datetime:
    """The present, in UTC."""
    return datetime.now(UTC)


def timestamp(moment: datetime | None) -> str | None:
    """`2026-08-01T10:00:00.123Z`, or None for what has not happened."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z" if moment else None


@dataclass(frozen=True)
class Owner:
    """Whoever owns Jobs: a user or an organisation."""

    name: str
    id: str
    type: str = "user"

    def to_json(self) -> dict[str, str]:
        """In the words of the wire."""
        return {"id": self.id, "name": self.name, "type": self.type}


@dataclass
class Job:
    """One Job. Only its stage, message, times, labels, exposed ports and `attempt` (from 1) ever change."""

    id: str
    owner: Owner
    initiator: Owner
    spec: JobSpec
    created: datetime
    initiator_type: str = "user"
    stage: Stage = Stage.SCHEDULING
    message: str | None = None
    started: datetime | None = None
    finished: datetime | None = None
    attempt: int = 1
    expose_urls: tuple[str, ...] = ()

    def start(self) -> None:
        """Its process runs: the first time fixes `started`."""
        if not self.stage.final:
            self.stage, self.message = Stage.RUNNING, None
            self.started = self.started or now()

    def finish(self, stage: Stage, message: str | None = None) -> None:
        """It is over; a Job that is over stays as it ended."""
        if not self.stage.final:
            self.stage, self.message, self.finished = stage, message, now()

    def relabel(self, labels: Mapping[str, str]) -> None:
        """Replace every label."""
        self.spec = replace(self.spec, labels=dict(labels))

    def reexpose(self, expose: Expose) -> None:
        """Replace the exposed ports."""
        self.spec = replace(self.spec, expose=expose)

    def durations(self, at: datetime) -> dict[str, int | None]:
        """Whole seconds in each stage until `at` or the end."""
        end = self.finished or at
        return {
            "schedulingSecs": int((self.started - self.created).total_seconds()) if self.started else None,
            "runningSecs": int((end - self.started).total_seconds()) if self.started else None,
            "totalSecs": int((end - self.created).total_seconds()),
        }

    def to_json(self) -> dict[str, Any]:
        """The Job as every route answers it. Secrets by name only; never a key `endpoint`, which the client adds."""
        spec = self.spec
        answer: dict[str, Any] = {
            "id": self.id,
            "type": "job",
            "createdAt": timestamp(self.created),
            "startedAt": timestamp(self.started),
            "finishedAt": timestamp(self.finished),
            "command": list(spec.command),
            "arguments": list(spec.arguments),
            "environment": dict(spec.environment),
            "secrets": dict.fromkeys(spec.secrets),
            "flavor": spec.flavor.name,
            "timeout": spec.timeout_s,
            "retry": spec.attempts - 1,
            "labels": dict(spec.labels),
            "volumes": [volume.to_json() for volume in spec.volumes],
            "expose": spec.expose.to_json(),
            "status": {"stage": self.stage.value, "message": self.message},
            "durations": self.durations(now()),
            "owner": self.owner.to_json(),
            "initiator": {**self.initiator.to_json(), "type": self.initiator_type},
            "network": spec.network,
        }
        if spec.docker_image:
            answer["dockerImage"] = spec.docker_image
        else:
            answer["spaceId"] = spec.space_id
        if spec.resource_group_id:
            answer["resourceGroupId"] = spec.resource_group_id
        if self.expose_urls:
            answer["status"]["exposeUrls"] = list(self.expose_urls)
        return answer


class JobTable:
    """All Jobs of one Hub, oldest first."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    def create(self, owner: Owner, initiator: Owner, spec: JobSpec, initiator_type: str = "user") -> Job:
        """Add a Job in stage SCHEDULING under a fresh id of 24 hex digits."""
        job = Job(secrets.token_hex(12), owner, initiator, spec, now(), initiator_type)
        self._jobs[job.id] = job
        return job

    def get(self, namespace: str, job_id: str) -> Job:
        """Raises UnknownJob unless `namespace` owns a Job of that id."""
        job = self._jobs.get(job_id)
        if job is None or job.owner.name != namespace:
            raise UnknownJob(job_id)
        return job

    def all(self) -> list[Job]:
        """Every Job, oldest first."""
        return list(self._jobs.values())

    def list(self, namespace: str, stages: Iterable[str] = (), labels: Mapping[str, str] | None = None) -> list[Job]:
        """The namespace's Jobs in one of `stages` (any, if empty) that bear all `labels`, newest first."""
        wanted = set(stages)
        return [
            job
            for job in reversed(self._jobs.values())
            if job.owner.name == namespace
            and (not wanted or job.stage in wanted)
            and all(job.spec.labels.get(key) == value for key, value in (labels or {}).items())
        ]
