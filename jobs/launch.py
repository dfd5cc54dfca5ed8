"""Starts a run on Hugging Face Jobs (or on the emulator, which answers as they do), follows it, leaves nothing."""

import hashlib
import json
import logging
import secrets
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import JobInfo, Volume

from jobs import bundle, deadlines, folders, labels, leader, lease
from jobs.bucket import SHOWN_POLL_S, SHOWN_S, Bucket
from jobs.crew import PORT, TERMINAL, Crew, earlier_generations
from jobs.errors import BucketError, ConfigError, NotFound, RunFailed
from jobs.leader import Leader, Leadership
from jobs.plan import resolve
from jobs.progress import progress_key
from jobs.recipe import Recipe
from jobs.roster import JobPlan, Role, replicas_prefix
from jobs.script import dependencies
from jobs.site import Site
from jobs.spec import VLLM_SERVER, Engine, ModelRef, RunSpec, Transport, final_prefix, spec_key
from jobs.summary import FIELDS, summary_key

log = logging.getLogger(__name__)

ARCHIVE = "asyncgrpo.pyz"
HUB_BUCKETS = "s3.hf.co"
"""The S3 gateway of the Hub's own buckets, which are the only ones that its Jobs can mount."""
ARCHIVE_DIR = "/asyncgrpo"
"""Where each Job sees the archive, through a read-only volume of the bucket."""
MOUNT_DIR = "/bucket"
"""Where replicas see the whole bucket with transport `mount`."""
PIP = ("python3", "-m", "pip", "install", "--quiet", "--break-system-packages")
"""How a Job installs what its image lacks; a container's own Python is nobody else's (PEP 668)."""
GROUP_RUN_CHARS, GROUP_RANDOM_BYTES = 33, 6
"""A network group's name, of at most 46 characters, begins as the run's. The rest is drawn: a run of the same name with
another bucket is another group."""
PIP_PAUSES_S = (5, 30, 120)
"""Between tries of that, each with pip's own tries of every download: a registry is seldom away for longer."""
LAUNCHER_PATIENCE_S = 60.0
"""A launcher follows from the start: it takes the lead at once, or again when the Job that took it has gone."""


def installing(packages: list[str], command: list[str]) -> list[str]:
    """What installs packages in a Job, patiently, and then becomes `command`."""
    pauses = " ".join(map(str, PIP_PAUSES_S))
    return [
        "bash",
        "-c",
        f"for pause in {pauses} 0; do {shlex.join([*PIP, *packages])} && exec {shlex.join(command)}; "
        "if [ $pause != 0 ]; then echo asyncgrpo: pip failed, trying again in $pause s >&2; sleep $pause; fi; done; "
        "echo 'asyncgrpo: jobs.trainer_packages, with what the script asks for, could not be installed, as pip says "
        "above: mend the list, or bake an image that has them, see jobs/Dockerfile' >&2; exit 1",
    ]


@dataclass(frozen=True)
class Glance:
    """One look at a run: what the trainer says, what the Hub says, and how long it has run."""

    progress: dict[str, Any]
    jobs: dict[str, JobInfo]
    elapsed_s: float


class Launch:
    """One run, from its claim in the bucket to its last Job's end. Use `with`: it cancels everything on the way out."""

    def __init__(
        self,
        site: Site,
        recipe: Recipe,
        run: str,
        engine: Engine,
        engine_module: str | None,
        seed: int,
        transport: Transport = "s3",
        resume: bool = False,
    ) -> None:
        self.site, self.recipe, self.run = site, resolve(recipe), run
        self.engine: Engine = engine
        self.engine_module = engine_module or VLLM_SERVER
        self.seed = seed
        self.transport: Transport = transport
        self.resume = resume
        self.bucket = Bucket(site.bucket)
        self.trainer_restarts = 0
        self._network_group: str | None = None
        if recipe.jobs.network == "group":
            self._network_group = f"{run[:GROUP_RUN_CHARS]}-{secrets.token_hex(GROUP_RANDOM_BYTES)}"
        self._crew: Crew | None = None
        self._leader: Leader | None = None
        self._lease_at = float("-inf")

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        if self._crew is None:
            return
        try:
            lease.end(self.bucket, self.run)  # a Job that escapes the listing below ends itself
        except BucketError as error:
            log.error("the run's lease could not be ended: %s", error)
        self._crew.cancel()

    def detach(self) -> None:
        """Leaves the run to its own Jobs: nothing is cancelled any more, and the trainer leads as soon as it is up."""
        if self._leader is not None:
            self._leader.leadership.release()
        self._crew = None

    @property
    def crew(self) -> Crew:
        """The run's Jobs; there once `start` was called."""
        assert self._crew is not None
        return self._crew

    def claim(self, model_dir: Path | None = None) -> tuple[Path | None, str]:
        """Claims the run's name and brings the model into the bucket; returns this program's archive and its sha256.

        A bucket that is not there is made.

        `model_dir` holds a model that no Hub has; it travels through the bucket.

        With `resume` the run is one that ended before it was done, and goes on in a new attempt; seed, engine and
        transport are those that it began with.

        Raises:
            ConfigError: the run's name is taken in this bucket; or, to resume, there is no such run, it is done, it
                was meant for another model or adapter, or it changed meanwhile.
        """
        if self.resume:
            return self._reclaim(model_dir)
        self.bucket.ensure()
        archive, spec = self._spec(model_dir)
        if not self.bucket.put_new(spec_key(self.run), spec.to_json()):
            raise ConfigError(
                f"run {self.run!r} is already in the bucket {self.site.bucket.url}: choose another with --run, or "
                "--resume that one."
            )
        lease.renew(self.bucket, self.run)
        return archive, spec.archive_sha256

    def _reclaim(self, model_dir: Path | None) -> tuple[Path | None, str]:
        try:
            content, etag = self.bucket.get_tagged(spec_key(self.run))
        except NotFound as error:
            raise ConfigError(
                f"--resume: there is no run {self.run!r} in the bucket {self.site.bucket.url}; see --run and --bucket."
            ) from error
        was, progress = RunSpec.from_json(content), self._progress()
        for field, before, now in (
            ("model.id", was.recipe.model.id, self.recipe.model.id),
            ("[lora]", was.recipe.lora, self.recipe.lora),
        ):
            if before != now:
                raise ConfigError(
                    f"--resume: {field} of run {self.run} is {before} and would become {now}, which its checkpoints "
                    "do not fit. Leave it as it was, or start a new run."
                )
        if progress.get("state") == "done" and progress.get("max_steps") == self.recipe.settings.get("max_steps"):
            raise ConfigError(
                f"--resume: run {self.run} is done, after {progress['step']} steps. For more of them raise "
                "trainer.max_steps."
            )
        # The order of the prompts follows from the seed, and what was trained on is counted in it.
        self.seed, self.engine, self.engine_module = was.seed, was.engine, was.engine_module
        self.transport = was.transport
        archive, spec = self._spec(model_dir)
        if not self.bucket.put_if(spec_key(self.run), spec.to_json(), etag):
            raise ConfigError(f"--resume: somebody else resumes run {self.run} right now.")
        records = self.bucket.list(replicas_prefix(self.run))
        self.bucket.delete([*records, leader.leader_key(self.run), leader.wanted_key(self.run)])
        if progress:
            told = {**progress, "state": "starting", "reason": None}
            self.bucket.put(progress_key(self.run), json.dumps(told).encode())
        lease.renew(self.bucket, self.run)
        return archive, spec.archive_sha256

    def _spec(self, model_dir: Path | None) -> tuple[Path | None, RunSpec]:
        """This program's archive, and what the bucket is told of the run."""
        archive = bundle.archive()
        sha256 = hashlib.sha256(archive.read_bytes()).hexdigest() if archive else ""
        return archive, RunSpec(
            run=self.run,
            recipe=self.recipe,
            model=self._model(model_dir),
            engine=self.engine,
            engine_module=self.engine_module,
            transport=self.transport,
            seed=self.seed,
            created_at=time.time(),
            archive_sha256=sha256,
        )

    def start(self, model_dir: Path | None = None) -> None:
        """Claims the run, brings archive and model into the bucket and starts replicas and trainer side by side.

        Raises:
            ConfigError: see `claim`; or the run to resume still has living Jobs.
            RunFailed: the Hub refused a Job.
        """
        hub, namespace = self.site.hub(), self.site.namespace
        earlier = earlier_generations(hub, namespace, self.run) if self.resume else {}
        archive, sha256 = self.claim(model_dir)
        self._deliver(archive, sha256)
        plans = self.plans(archive, sha256)
        job_secrets = {
            **self.site.bucket.secrets(),
            **self.site.secrets,
            "ASYNCGRPO_KEY": secrets.token_hex(32),
            "HF_TOKEN": self.site.token,
        }
        self._crew = Crew(
            hub,
            namespace,
            self.run,
            self.bucket,
            plans,
            job_secrets,
            initiator=str(self.site.whoami()["id"]),
            earlier=earlier,
        )
        self._crew.roster.write(self.bucket, job_secrets["ASYNCGRPO_KEY"])
        leadership = Leadership(self.bucket, self.run, "launcher", LAUNCHER_PATIENCE_S)
        self._leader = Leader(self.bucket, self.run, self._crew, self.recipe.replica.count, leadership)
        leadership.hold()
        for index in range(self.recipe.replica.count):
            self._crew.start("replica", index)
        self._crew.start("trainer")

    def plans(self, archive: Path | None, sha256: str) -> dict[Role, JobPlan]:
        """What the Jobs of each role are started with, secrets apart. Starts and sends nothing."""
        command, volumes = self._delivery(archive, sha256)
        ports = [PORT + engine for engine in range(self.recipe.replica.engine_count)]
        mounts = [self._mount(MOUNT_DIR)] if self.transport == "mount" else []
        return {
            "replica": self._plan("replica", command, [*volumes, *mounts], ports),
            "trainer": self._plan("trainer", command, volumes, []),
        }

    def follow(self, seen: Callable[[Glance], None]) -> dict[str, Any]:
        """Follows the run to its end, keeps its crew complete, and returns its summary.

        `seen` is called about once per `poll_s` with the latest look.

        Raises:
            RunFailed: with the reason, in the words of what failed.
        """
        assert self._leader is not None
        started = time.monotonic()
        watch = deadlines.Watch(self.recipe.jobs)
        while True:
            now = time.monotonic()
            jobs = self.crew.jobs()
            progress = self._progress()
            trainer = jobs.get(self.crew.job_id("trainer"))
            if trainer is None or trainer.status.stage == "SCHEDULING":
                self._renew_lease(now)
            if not self._leader.tend(jobs, progress.get("proxy") or {}):
                self.crew.adopt(jobs)  # another one leads, and may have filled a place anew
            seen(Glance(progress, jobs, now - started))
            if trainer is not None and trainer.status.stage in TERMINAL:
                progress = self._progress()
                seen(Glance(progress, jobs, now - started))
                if progress.get("state") == "done":
                    return self.summary(SHOWN_S)
                self._trainer_ended(trainer, progress)
            else:
                self._check(watch, jobs, progress, now)
            time.sleep(self.site.poll_s)

    def fetch_final(self, folder: Path) -> None:
        """Brings the trained adapter of a run that is done into `folder`/final.

        Raises:
            NotFound: the run has left none: a script of the user's own ends as it likes.
        """
        folders.receive(self.bucket, final_prefix(self.run), folder / "final", SHOWN_S)

    def summary(self, within_s: float = 0.0) -> dict[str, Any]:
        """The summary as the trainer left it in the bucket, or what is known without one.

        A replica that was started again had died, whether a proxy lived to see it or not.
        """
        try:
            found = self.bucket.get_json(summary_key(self.run), within_s)
        except NotFound:
            found = {
                **dict.fromkeys(FIELDS),
                "run": self.run,
                "recipe": self.recipe.name,
                "engine": self.engine,
                "transport": self.transport,
                "replicas": self.recipe.replica.count,
            }
        deaths = max(found["replica_deaths"] or 0, self.crew.restarts)
        return {**found, "bucket": self.site.bucket.url, "replica_deaths": deaths}

    def _progress(self) -> dict[str, Any]:
        try:
            return self.bucket.get_json(progress_key(self.run))
        except NotFound:
            return {}

    def _trainer_ended(self, job: JobInfo, progress: Mapping[str, Any]) -> None:
        if progress.get("state") == "failed":
            raise RunFailed(f"the trainer failed: {progress.get('reason')}")
        why = leader.why_over(job.status.stage, progress.get("state"), self.trainer_restarts)
        if why is not None and job.status.stage != "CANCELED":
            raise RunFailed(f"{why}: {job.status.message or job.status.stage}. Its last lines:\n{self._tail(job)}")
        if why is not None:
            raise RunFailed(f"{why}: somebody stopped the run")
        log.warning("the trainer was ended (%s): starting a new attempt", job.status.message or job.status.stage)
        if self._leader is not None and self._leader.leadership.held:
            self.trainer_restarts += 1
            self.crew.start("trainer")

    def _check(
        self, watch: deadlines.Watch, jobs: Mapping[str, JobInfo], progress: Mapping[str, Any], now: float
    ) -> None:
        replicas = self.crew.replicas()
        down = [index for index in replicas if self.crew.given_up(index)]
        if replicas and len(down) == len(replicas):
            job = jobs[self.crew.job_id("replica", down[0])]
            raise RunFailed(f"no replica stays up. The last lines of replica {down[0]}:\n{self._tail(job)}")
        for overdue in watch.look({each: jobs[each] for each in self.crew.job_ids() if each in jobs}, progress, now):
            if overdue.fatal or self.trainer_restarts >= leader.MAX_TRAINER_RESTARTS:
                raise RunFailed(overdue.words)
            log.warning("%s: another Job takes its place", overdue.words)
            self.crew.end(overdue.job_id)
            if overdue.role == "trainer":
                self.trainer_restarts += 1
                self.crew.start("trainer")

    def _renew_lease(self, now: float) -> None:
        """Keeps replicas from ending themselves while the trainer waits for its machine."""
        if now - self._lease_at >= self.recipe.jobs.lease_s / lease.RENEWALS_PER_LEASE:
            self._lease_at = now
            lease.renew(self.bucket, self.run)

    def _tail(self, job: JobInfo) -> str:
        lines = self.site.hub().fetch_job_logs(job_id=job.id, namespace=self.site.namespace)
        return "\n".join(list(lines)[-30:])

    def _model(self, model_dir: Path | None) -> ModelRef:
        if model_dir is None:
            return ModelRef("hub", self.recipe.model.id, self.recipe.model.id)
        if self.site.local and Path(self.recipe.model.id).is_dir():
            return ModelRef("path", str(model_dir.resolve()), model_dir.name)  # every Job runs on this machine
        digest = hashlib.sha256()
        files = sorted(path for path in model_dir.rglob("*") if path.is_file())
        for path in files:
            digest.update(f"{path.relative_to(model_dir)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        prefix = f"models/{digest.hexdigest()[:16]}"
        present = set(self.bucket.list(f"{prefix}/"))
        for path in files:
            if (key := f"{prefix}/{path.relative_to(model_dir).as_posix()}") not in present:
                self.bucket.put_file(key, path)
        return ModelRef("bucket", prefix, self.recipe.model.id.partition(":")[2] or model_dir.name)

    def _deliver(self, archive: Path | None, sha256: str) -> None:
        """Puts the archive into the bucket, once for all runs that use it."""
        if archive is not None and not self.bucket.list(key := f"archives/{sha256}/{ARCHIVE}"):
            self.bucket.put_file(key, archive)
            deadline = time.monotonic() + SHOWN_S
            while not self.bucket.list(key) and time.monotonic() < deadline:  # a Job's volume must find it
                time.sleep(SHOWN_POLL_S)

    def _delivery(self, archive: Path | None, sha256: str) -> tuple[list[str], list[Volume]]:
        """The command that starts this program in a Job, and the volume that brings it there.

        A bucket that the Hub cannot mount, for it is not one of its own, is read by a few lines of Python instead.
        """
        if archive is None:
            if not self.site.local:
                raise ConfigError("Jobs need asyncgrpo.pyz: make it with ./build.sh build and launch from it.")
            return ["python3", *bundle.command()[1:]], []
        prefix = f"archives/{sha256}"
        if not self._mountable:
            source = resources.files("jobs").joinpath("fetch_archive.py").read_text()
            return ["python3", "-c", source, f"{prefix}/{ARCHIVE}", sha256], []
        return ["python3", f"{ARCHIVE_DIR}/{ARCHIVE}"], [self._mount(ARCHIVE_DIR, prefix)]

    def _mount(self, path: str, folder: str = "") -> Volume:
        """The bucket, or a folder of it, as a directory that Jobs may read.

        Raises:
            ConfigError: the Hub cannot mount it.
        """
        if not self._mountable:
            raise ConfigError(
                f"--transport mount: the Hub mounts buckets of its own only, and AWS_ENDPOINT_URL = "
                f"{self.site.bucket.endpoint} is not https://{HUB_BUCKETS}/<namespace>. Use --transport s3."
            )
        name, _, below = self.site.bucket.url.removeprefix("s3://").partition("/")
        # The bucket's namespace is the endpoint's path; it need not be the one that the Jobs run in.
        namespace = urlsplit(self.site.bucket.endpoint).path.strip("/") or self.site.namespace
        source = f"{namespace}/{name}"
        inside = f"{below}/{folder}".strip("/") or None
        return Volume(type="bucket", source=source, mount_path=path, path=inside, read_only=True)

    @property
    def _mountable(self) -> bool:
        return self.site.local or urlsplit(self.site.bucket.endpoint).hostname == HUB_BUCKETS

    def _plan(self, role: Role, command: list[str], volumes: list[Volume], ports: list[int]) -> JobPlan:
        settings = self.recipe.jobs
        command, script = [*command, "role", role], self.recipe.script
        packages = [*settings.trainer_packages, *(dependencies(script.text) if script else [])]
        if role == "trainer" and packages and not self.site.local:
            command = installing(packages, command)
        environment = {**self.site.bucket.environment(), "HF_ENDPOINT": self.site.endpoint, **self.site.environment}
        if not self.site.local:
            environment.pop("AWS_CA_BUNDLE", None)  # a file of this machine
        if any(volume.mount_path == MOUNT_DIR for volume in volumes):
            environment["ASYNCGRPO_MOUNT"] = MOUNT_DIR
        return JobPlan(
            image=settings.image_of_trainer if role == "trainer" else settings.image,
            command=command,
            flavor=settings.replica_flavor if role == "replica" else settings.trainer_flavor,
            environment=environment,
            timeout_s=settings.timeout_s,
            volumes=volumes,
            ports=ports,
            labels={
                "asyncgrpo-recipe": labels.label(self.recipe.name),
                "asyncgrpo-model": labels.label(self.recipe.model.id),
            },
            network_group=self._network_group,
        )
