"""`asyncgrpo emulate`: one run against the stand-in, with the very code that launches it on Hugging Face Jobs."""

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from huggingface_hub.constants import HF_HOME

from emulator import gpus
from emulator.bucket import BucketServer, MotoServer
from emulator.bucket_programs import PROGRAMS, ProgramServer, find
from emulator.faults import Faults, parse
from emulator.injector import Injector
from emulator.job_environment import Image, find_image, image_table
from emulator.live_mount import LAG, Lag
from emulator.profiles import PROFILES
from emulator.serve import Emulator
from jobs import live, logs, machine, model_fetch, plot, preflight, probe, recipe, record, reward_server, tiny
from jobs.bucket import BucketSettings
from jobs.cache import cache_dir
from jobs.errors import AsyncgrpoError, ConfigError, NotFound
from jobs.interrupts import INTERRUPTED, interruptible
from jobs.labels import run_name
from jobs.launch import Glance, Launch
from jobs.plan import resolve
from jobs.recipe import Recipe
from jobs.roster import Role
from jobs.site import HUB, Site
from jobs.spec import Engine, Transport

log = logging.getLogger(__name__)

POLL_S = 0.5
"""How often the run is looked at: the stand-in has no quota to spare."""
SIM_ENGINE = "emulator.sim_engine"


@dataclass(frozen=True)
class Options:
    """What the user chose on the command line; None where they left the choice to the recipe."""

    recipe: str
    config: str | None = None
    overrides: tuple[str, ...] = ()
    replicas: int | None = None
    steps: int | None = None
    engine: Engine = "vllm"
    bucket: str = "moto"
    transport: Transport = "s3"
    tls: bool = False
    run_name: str | None = None
    faults: str | None = None
    seed: int = 0
    gpus: str | None = None
    images: tuple[str, ...] = ()
    as_json: bool = False


def emulate(options: Options) -> int:
    """Runs the recipe to its end and writes `runs/<run>/`. Returns the exit status: 0, or 130 when interrupted.

    Raises:
        ConfigError: bad input, before anything is started.
        RunFailed: the run was started and did not finish.
    """
    started_at = _process_started_at()
    logs.to_stderr(logging.WARNING)
    chosen = _recipe(options)
    devices = () if options.engine == "sim" else gpus.places(options.gpus, probe.gpus(os.environ), chosen)
    own = gpus.machine_of_a_replica(probe.machine(len(set(devices))), devices, chosen)
    chosen = machine.resolve(chosen, own, model_fetch.weights_bytes(chosen.model.id))
    faults = parse(options.faults or "")
    faults.check(chosen.replica.count)
    wanted = options.run_name or f"{chosen.name}-{time.strftime('%m%d-%H%M%S')}".lower()
    if (run := run_name(wanted)) != wanted:
        click.echo(f"--run {wanted!r} is no run's name: it is called {run}", err=True)
    bucket = _bucket(options.bucket)
    if faults.of_bucket and not isinstance(bucket, MotoServer):
        raise ConfigError(
            f"--bucket {options.bucket}: only moto can be made to misbehave; leave the bucket out of --faults."
        )
    images = image_table(options.images, gpus.image_environment(os.environ) if devices else {})
    preflight.check(resolve(chosen), local=True, pythons=_pythons(chosen, images))
    folder = record.folder(run)
    if (folder / record.SUMMARY).exists():
        raise ConfigError(f"{folder} already holds a run: choose another name with --run, or remove it.")
    with interruptible():
        try:
            summary = _run(options, chosen, run, folder, bucket, devices, images, faults, started_at)
        except AsyncgrpoError:
            if options.as_json and (told := record.read(folder)):
                click.echo(json.dumps(told))
            raise
        except KeyboardInterrupt:
            click.echo("interrupted: every Job was cancelled", err=True)
            return INTERRUPTED
    _tell(summary, folder, options.as_json)
    return 0


def serve(bucket: str, tls: bool, images: tuple[str, ...]) -> int:
    """Starts only the stand-in, prints its environment as KEY=value lines, and waits for Ctrl-C."""
    table = image_table(images, {})
    with interruptible(), Emulator(bucket=_bucket(bucket), https=tls, images=table) as emulator:
        for name, value in emulator.environment().items():
            click.echo(f"{name}={value}")
        sys.stdout.flush()
        click.echo(f"volumes: {emulator.mounts}", err=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


def _run(
    options: Options,
    chosen: Recipe,
    run: str,
    folder: Path,
    bucket: BucketSettings | BucketServer,
    devices: tuple[str, ...],
    images: Mapping[str, Image],
    faults: Faults,
    started_at: float,
) -> dict[str, Any]:
    seen: list[Glance] = []
    lag = Lag(
        LAG.mean_s if faults.mount_lag_s is None else faults.mount_lag_s,
        LAG.missing_s if faults.mount_missing_s is None else faults.mount_missing_s,
        LAG.listing_s if faults.mount_listing_s is None else faults.mount_listing_s,
    )
    emulator = Emulator(bucket=bucket, devices=devices, images=images, https=options.tls, lag=lag, logs=folder / "logs")
    injector = Injector(faults, options.seed)
    summary: dict[str, Any] = {}
    try:
        emulator.start()
        if emulator.certificate:
            os.environ.update(emulator.certificate.environment())  # huggingface_hub reads it when it first connects
        injector.attach(emulator)
        if options.transport == "mount":
            click.echo(f"volumes: {emulator.mounts}", err=True)
        site = Site(
            endpoint=emulator.endpoint,
            token=emulator.token,
            namespace=emulator.owner.name,
            bucket=emulator.bucket,
            environment=_of_this_machine(os.environ),
            poll_s=POLL_S,
            secrets=reward_server.secrets(os.environ),
        )
        kind, _, model = chosen.model.id.partition(":")
        model_dir = (
            tiny.build(model) if kind == "tiny" else Path(chosen.model.id) if Path(chosen.model.id).is_dir() else None
        )
        engine_module = SIM_ENGINE if options.engine == "sim" else None
        with Launch(site, chosen, run, options.engine, engine_module, options.seed, options.transport) as launch:
            launch.start(model_dir)
            with live.view() as view:

                def look(glance: Glance) -> None:
                    seen[:] = [glance]
                    view.show(glance)
                    injector.look(glance, launch.crew)

                try:
                    summary = launch.follow(look)
                    with contextlib.suppress(NotFound):
                        launch.fetch_final(folder)
                except AsyncgrpoError as error:
                    summary = launch.summary() | {"error": str(error)}
                    raise
    finally:
        orphans = emulator.stop()
        if seen or summary:
            progress = seen[-1].progress if seen else {}
            summary |= {
                "wall_s": round(time.time() - started_at, 2),
                "first_step_s": record.since(started_at, progress.get("first_step_at")),
                "orphans": len(orphans),
                "faults": options.faults,
            }
            record.write(folder, summary)
            plot.reward_plot(progress.get("history") or [], f"{chosen.name}: {run}", folder / "reward.png")
    return summary


def _of_this_machine(environ: Mapping[str, str]) -> dict[str, str]:
    """What every Job may use of this machine: its caches, and the Hub that has models and data sets."""
    hub = {"ASYNCGRPO_HUB": environ.get("HF_ENDPOINT") or HUB, "HF_HOME": HF_HOME}
    offline = {"HF_HUB_OFFLINE": said} if (said := environ.get("HF_HUB_OFFLINE")) else {}
    return {"ASYNCGRPO_CACHE": str(cache_dir()), **hub, **offline}


def _recipe(options: Options) -> Recipe:
    chosen = recipe.load(options.recipe, options.config, options.overrides)
    if options.replicas is not None:
        if options.replicas < 1:
            raise ConfigError(f"--replicas {options.replicas}: at least 1 is needed.")
        chosen = replace(chosen, replica=replace(chosen.replica, count=options.replicas))
    if options.steps is not None:
        if options.steps < 1:
            raise ConfigError(f"--steps {options.steps}: at least 1 is needed.")
        chosen = replace(chosen, trainer={**chosen.trainer, "max_steps": options.steps})
    return chosen


def _pythons(chosen: Recipe, images: Mapping[str, Image]) -> dict[Role, str]:
    """The interpreter of each role whose image is not this program's own environment."""
    named: dict[Role, str] = {"replica": chosen.jobs.image, "trainer": chosen.jobs.image_of_trainer}
    found = {role: find_image(name, images) for role, name in named.items()}
    return {role: image.python for role, image in found.items() if image and image.python != sys.executable}


def _bucket(choice: str) -> BucketSettings | BucketServer:
    """The S3 bucket that the user named, or the server to start for this emulation."""
    server, _, profile = choice.partition(":")
    if server == "moto" and (profile or "hub") in PROFILES:
        return MotoServer(profile or "hub")
    if choice in PROGRAMS:
        find(choice)
        return ProgramServer(choice)
    if choice.startswith("s3://"):
        return BucketSettings.from_env({**os.environ, "ASYNCGRPO_BUCKET": choice})
    known = [*(f"moto:{name}" for name in PROFILES), *PROGRAMS]
    raise ConfigError(
        f"--bucket {choice}: expected moto, {', '.join(known)}, or s3://bucket[/prefix] (keys and endpoint from AWS_*)."
    )


def _tell(summary: dict[str, Any], folder: Path, as_json: bool) -> None:
    first, last = summary.get("reward_first"), summary.get("reward_last")
    if first is not None and last is not None:
        click.echo(f"reward {first:.3f} -> {last:.3f} in {summary['steps']} steps, {summary['wall_s']:.0f} s", err=True)
    click.echo(f"summary: {folder / record.SUMMARY}", err=True)
    if (folder / "final").exists():
        click.echo(f"adapter: {folder / 'final'}", err=True)
    if (folder / "reward.png").exists():
        click.echo(f"reward:  {folder / 'reward.png'}", err=True)
    click.echo(f"logs:    {folder / 'logs'}", err=True)
    click.echo("next:    asyncgrpo recipes NAME > mine.toml, change it, asyncgrpo emulate mine.toml", err=True)
    if as_json:
        click.echo(json.dumps(summary))


def _process_started_at() -> float:
    """When this command was started, in Unix seconds: starting the interpreter and unpacking the archive count."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError):
        return time.time()
    return time.time() - (up_s - ticks / os.sysconf("SC_CLK_TCK"))
