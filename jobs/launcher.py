"""`asyncgrpo launch`: from the command line to a run on Hugging Face Jobs, or to its plan."""

import contextlib
import hashlib
import json
import logging
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import JobHardwareInfo

from jobs import (
    bundle,
    costs,
    hub,
    labels,
    live,
    logs,
    machine,
    model_fetch,
    plan,
    plan_view,
    preflight,
    probe,
    recipe,
    record,
    replica,
    reward_server,
    tiny,
)
from jobs.bucket import BucketSettings
from jobs.errors import ConfigError, NotFound, RunFailed
from jobs.interrupts import INTERRUPTED, interruptible
from jobs.launch import Glance, Launch
from jobs.recipe import Recipe
from jobs.roster import Role
from jobs.site import HUB, Site
from jobs.spec import VLLM_SERVER, ModelRef, RunSpec, Transport

log = logging.getLogger(__name__)

PRICES_PATIENCE_S = 5.0
"""How long prices are asked for in a dry run: without them the plan is as good."""
UNKNOWN = "UNKNOWN"
"""Stands in a dry run's plan for what only the environment could tell: namespace, bucket, archive."""


@dataclass(frozen=True)
class Options:
    """What the user chose on the command line."""

    recipe: str
    config: str | None = None
    overrides: tuple[str, ...] = ()
    run_name: str | None = None
    resume: bool = False
    namespace: str | None = None
    bucket: str | None = None
    transport: Transport = "s3"
    seed: int = 0
    dry_run: bool = False
    no_jobs: bool = False
    follow: bool = False
    as_json: bool = False


def launch(options: Options, environ: Mapping[str, str]) -> int:
    """Starts the run, or shows its plan. Returns the exit status: 0, or 130 after Ctrl-C; raises what else went wrong.

    Raises:
        ConfigError: bad input, before anything is started.
        RunFailed: a Job could not be started, or the run that was followed failed; everything was cancelled.
    """
    logs.to_stderr(logging.WARNING)
    chosen = plan.resolve(recipe.load(options.recipe, options.config, options.overrides))
    preflight.check(chosen, local=False)
    if options.resume and options.run_name is None:
        raise ConfigError("--resume: which run? Name it with --run.")
    wanted = options.run_name or f"{chosen.name}-{time.strftime('%m%d-%H%M%S')}".lower()
    run = labels.run_name(wanted)
    if run != wanted:
        _say(f"run {wanted!r} is called {run} in the bucket, in labels and on the wire")
    if options.no_jobs and options.dry_run:
        raise ConfigError("--dry-run shows the plan of the Jobs, and --no-jobs starts none: leave one of them out.")
    if options.no_jobs:
        return _prepare(options, environ, chosen, run)
    if options.dry_run:
        site, hardware = _dry_site(options, environ), _prices(options, environ)
    else:
        site = Site.from_env(environ, options.namespace, options.bucket)
        hardware = hub.patiently(site.hub().list_jobs_hardware)
    for words in preflight.check_servers(chosen, site.local):
        log.warning("%s", words)
    chosen = _for_machine(chosen, site, hardware)
    started = Launch(site, chosen, run, "vllm", None, options.seed, options.transport, options.resume)
    made = make_plan(started, hardware)
    if options.dry_run:
        _print_plan(made, options.as_json)
        return 0
    with interruptible():
        try:
            return _start(started, options, made)
        except KeyboardInterrupt:
            _say("interrupted: every Job was cancelled")
            return INTERRUPTED


def _prepare(options: Options, environ: Mapping[str, str], chosen: Recipe, run: str) -> int:
    """Claims a run for machines of the user's own, and prints the environment that its roles need."""
    settings = BucketSettings.from_env({**environ, **({"ASYNCGRPO_BUCKET": options.bucket} if options.bucket else {})})
    site = Site(environ.get("HF_ENDPOINT") or HUB, environ.get("HF_TOKEN") or "", options.namespace or "", settings)
    # Each replica looks at its own machine when it starts; all are taken to compute in what suits this one.
    chosen = replace(chosen, model=machine.resolve(chosen, probe.machine(len(probe.gpus(environ))), None).model)
    Launch(site, chosen, run, "vllm", None, options.seed, options.transport, options.resume).claim(_model_dir(chosen))
    own = {"ASYNCGRPO_RUN": run, "ASYNCGRPO_KEY": secrets.token_hex(32)}
    own |= reward_server.secrets(environ)
    environment = {**settings.environment(), **settings.secrets(), **own}
    _print(json.dumps(environment) if options.as_json else "\n".join(f"{k}={v}" for k, v in environment.items()))
    return 0


def _for_machine(chosen: Recipe, site: Site, hardware: list[JobHardwareInfo]) -> Recipe:
    """The recipe with what depends on the replicas' machines: the emulator's Jobs have none of their flavor's GPUs."""
    flavors = {flavor.name: flavor for flavor in hardware}
    replicas, trainer = flavors.get(chosen.jobs.replica_flavor), flavors.get(chosen.jobs.trainer_flavor)
    if site.local or not replicas:
        return machine.resolve(chosen, probe.machine(0), None)
    return machine.resolve(
        chosen,
        machine.of_flavor(replicas),
        _weights_bytes(chosen, site),
        max(1, machine.of_flavor(trainer).gpus) if trainer else 1,
    )


def _weights_bytes(chosen: Recipe, site: Site) -> int | None:
    """Size of the base model's weights; None if nobody tells."""
    if (directory := _model_dir(chosen)) is not None:
        return model_fetch.weights_bytes(str(directory))
    try:
        files = site.hub().model_info(chosen.model.id, files_metadata=True).siblings or []
    except hub.UNSURE as error:
        log.warning("the size of %s is not known, so each GPU gets one engine: %s", chosen.model.id, error)
        return None
    return sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors")) or None


def make_plan(started: Launch, hardware: list[JobHardwareInfo]) -> plan.Plan:
    """The plan of a launch that has not begun; raises ConfigError for a flavor that the Hub does not have."""
    archive = bundle.archive()
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest() if archive else UNKNOWN
    if archive is None and not started.site.local:
        archive = Path("asyncgrpo.pyz")  # of a dry run from a source checkout: `start` refuses it
    jobs = started.plans(archive, sha256)
    deadline = time.time() + started.recipe.jobs.timeout_s
    roles: tuple[Role, ...] = ("trainer", "replica")
    own = {role: jobs[role].labels | labels.of_job(started.run, role, 0, 0, deadline) for role in roles}
    names = [*started.site.bucket.secrets(), *started.site.secrets, "ASYNCGRPO_KEY", "HF_TOKEN"]
    model = ModelRef("hub", started.recipe.model.id, started.recipe.model.id)
    spec = RunSpec(started.run, started.recipe, model, "vllm", VLLM_SERVER, started.transport, started.seed)
    engine = replica.engine_command(spec, replica.Place(0, "0.0.0.0", replica.PORT), model.source, 0)
    return plan.plan(started.run, started.recipe, jobs, own, names, engine, hardware)


def _start(started: Launch, options: Options, made: plan.Plan) -> int:
    began_at = time.time()
    model_dir = _model_dir(started.recipe)
    folder = record.folder(started.run) if options.follow else Path()
    with started:
        started.start(model_dir)
        _say(f"run {started.run}: {_count(started.recipe)} started, {_usd(made)}")
        if not options.follow:
            jobs = {f"{role} {index}": job_id for role, index, job_id in started.crew.places()}
            started.detach()
            for line in ("status", "logs", "scale --replicas N", "stop"):
                verb, _, more = line.partition(" ")
                _say(f"next: asyncgrpo {verb} {started.run} {more}".rstrip())
            if options.as_json:
                _print(json.dumps({"run": started.run, "jobs": jobs, "bucket": started.site.bucket.url}))
            return 0
        glances: list[Glance] = []

        def look(glance: Glance) -> None:
            glances[:] = [glance]
            view.show(glance)

        try:
            with live.view() as view:
                summary = started.follow(look)
        except RunFailed as error:
            summary = started.summary() | {"wall_s": round(time.time() - began_at, 2), "error": str(error)}
            record.write(folder, summary)
            if options.as_json:
                _print(json.dumps(summary))
            raise
        prices = costs.usd_per_minute(hub.patiently(started.site.hub().list_jobs_hardware))
        summary |= {
            "wall_s": round(time.time() - began_at, 2),
            "first_step_s": record.since(began_at, glances[-1].progress.get("first_step_at")),
            "cost_usd": costs.of_jobs(glances[-1].jobs.values(), prices),
        }
    record.write(folder, summary)
    _say(f"summary: {folder / record.SUMMARY}")
    with contextlib.suppress(NotFound):
        started.fetch_final(folder)
        _say(f"adapter: {folder / 'final'}")
    if options.as_json:
        _print(json.dumps(summary))
    return 0


def _dry_site(options: Options, environ: Mapping[str, str]) -> Site:
    """The site as far as the environment tells it: a plan can be had before there is a token or a bucket."""
    try:
        return Site.from_env(environ, options.namespace, options.bucket)
    except ConfigError as error:
        log.warning("the plan is not whole: %s", error)
    bucket = options.bucket or environ.get("ASYNCGRPO_BUCKET") or f"s3://{UNKNOWN}"
    endpoint = environ.get("AWS_ENDPOINT_URL") or UNKNOWN
    settings = BucketSettings(bucket, "https://s3.hf.co" if endpoint == UNKNOWN else endpoint, UNKNOWN, UNKNOWN)
    own = reward_server.secrets(environ)
    where, token = environ.get("HF_ENDPOINT") or HUB, environ.get("HF_TOKEN") or ""
    return Site(where, token, options.namespace or UNKNOWN, settings, secrets=own)


def _prices(options: Options, environ: Mapping[str, str]) -> list[JobHardwareInfo]:
    api = hub.connect(environ.get("HF_ENDPOINT") or HUB, environ.get("HF_TOKEN") or "")
    try:
        return hub.patiently(lambda: api.list_jobs_hardware(token=environ.get("HF_TOKEN") or False), PRICES_PATIENCE_S)
    except hub.UNSURE as error:
        log.warning("prices are not known, and flavors are not checked: %s", error)
        return []


def _print_plan(made: plan.Plan, as_json: bool) -> None:
    if as_json:
        _print(json.dumps(made.to_dict()))
    else:
        plan_view.show(made, sys.stdout)


def _model_dir(chosen: Recipe) -> Path | None:
    """The directory of a model that no Hub has."""
    kind, _, name = chosen.model.id.partition(":")
    if kind == "tiny":
        return tiny.build(name)
    return Path(chosen.model.id) if Path(chosen.model.id).is_dir() else None


def _count(chosen: Recipe) -> str:
    return (
        f"1 trainer ({chosen.jobs.trainer_flavor}) and {chosen.replica.count} replicas ({chosen.jobs.replica_flavor})"
    )


def _usd(made: plan.Plan) -> str:
    return (
        f"${made.usd_per_hour:.2f} an hour, at most ${made.usd_to_timeout:.2f}"
        if made.usd_per_hour
        else "price unknown"
    )


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
