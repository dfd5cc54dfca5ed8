"""`role replica`: the supervisor of a replica Job. It starts one server per engine and keeps watch over them.

The Job lives as long as all of its engines do, and as long as somebody leads the run.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from jobs import bundle, lease, machine, model_fetch, packages, probe, processes, versions
from jobs.bucket import SHOWN_S, Bucket
from jobs.errors import RunFailed
from jobs.leader import StandIn
from jobs.plan import resolve
from jobs.roster import replica_key
from jobs.spec import VLLM_SERVER, RunSpec

log = logging.getLogger(__name__)

PORT = 8000
"""Port of the first engine; the others count on from it."""
GRACE_S = 8.0
"""What engines get after SIGTERM: vLLM stops within 1 s on a CPU (measured); the Hub's grace time is 30 s."""
KEEP_ALIVE_S = 75
"""Idle time after which an engine closes a connection. Above any client's pool time (aiohttp's is 15 s), so that no
request meets a connection that is being closed."""
POLL_S = 0.2
TAIL_LINES = 40

WatchLease = Callable[[threading.Event, Callable[[str], None]], None]

MIDDLEWARE = "jobs.middleware.ReplicaMiddleware"
OUR_SERVER = "jobs.vllm_server"
CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # or the first completion takes 21 s (measured)
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the engine's worker is one more process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""For engines without a GPU (measured on two cores with two engines)."""


@dataclass(frozen=True)
class Place:
    """Where one engine runs: its number in the Job, what it listens on, and the GPUs it sees (none: a CPU machine)."""

    engine: int
    host: str
    port: int
    gpus: tuple[str, ...] = ()


def places(engines: int, environ: Mapping[str, str], gpus: list[str], parallel: int = 1) -> list[Place]:
    """Spreads a Job's engines over its GPUs, each on `parallel` of them.

    Engine i listens on every interface at port 8000 + i, unless `ASYNCGRPO_BIND_<port>` = "host:port" says otherwise.

    With GPUs, there are enough for one engine (jobs.machine).
    """
    groups = [tuple(gpus[i : i + parallel]) for i in range(0, len(gpus) - parallel + 1, parallel)]
    found = []
    for engine in range(engines):
        host, _, port = environ.get(f"ASYNCGRPO_BIND_{PORT + engine}", f"0.0.0.0:{PORT + engine}").rpartition(":")
        group = engine % len(groups) if groups else 0
        found.append(Place(engine, host, int(port), groups[group] if groups else ()))
    return found


def engine_command(spec: RunSpec, place: Place, model: str, replica: int, python: str = sys.executable) -> list[str]:
    """The command line of one engine: vLLM's flags from the recipe, and what a replica needs on top."""
    recipe = resolve(spec.recipe)
    flags = recipe.replica.vllm | {
        "model": model,
        "served_model_name": spec.model.served,
        "host": place.host,
        "port": place.port,
        # Engines with one seed would give the same samples to the same unseeded request.
        "seed": spec.seed * 1000 + replica * recipe.replica.engine_count + place.engine,
        "middleware": MIDDLEWARE,
        "disable_uvicorn_access_log": True,
    }
    module = OUR_SERVER if spec.engine_module == VLLM_SERVER else spec.engine_module
    return [python, "-m", module, *arguments(flags)]


def arguments(flags: Mapping[str, Any]) -> list[str]:
    """Flags of `vllm serve` as arguments: `a_b = 1` is --a-b 1, true is --a-b, false is --no-a-b, a list repeats."""
    found: list[str] = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            found.append(flag)
        elif value is False:
            found.append(f"--no-{flag[2:]}")
        elif isinstance(value, list):
            found += [flag, *map(str, value)]
        else:
            found += [flag, str(value)]
    return found


def engine_environment(
    environ: Mapping[str, str], spec: RunSpec, place: Place, replica: int, adapters: Path
) -> dict[str, str]:
    """The environment of one engine. On a CPU machine, what `environ` says itself wins over `CPU_ENVIRONMENT`."""
    defaults = {} if place.gpus else dict(CPU_ENVIRONMENT)
    if cache := environ.get("ASYNCGRPO_CACHE"):
        # What one engine compiled, or found out about its model (on a CPU by importing everything again: 13 s beside a
        # trainer on two cores), the next ones need not; else it is lost with the Job's home directory.
        defaults |= {"VLLM_CACHE_ROOT": f"{cache}/vllm", "TRITON_CACHE_DIR": f"{cache}/triton"}
    if spec.model.kind != "hub":
        defaults["HF_HUB_OFFLINE"] = "1"
    own = {
        "PYTHONPATH": str(bundle.app_dir()),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        "ASYNCGRPO_ADAPTERS": str(adapters),
        "ASYNCGRPO_REPLICA": str(replica),
        "ASYNCGRPO_ENGINE": spec.engine,
        "ASYNCGRPO_REQUEST_SEEDS": str(int(spec.recipe.replica.request_seeds)),
    }
    if place.gpus:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
    return {**defaults, **model_fetch.hub_environment(environ), **own}


def run(environ: Mapping[str, str]) -> int:
    """Runs the replica that the environment describes until its engines or its run end.

    Returns 0 when the run is over (its lease expired or was ended), 143 when SIGTERM ended the Job.

    Raises:
        ConfigError: this version of vLLM is not supported.
        RunFailed: an engine ended by itself, with the last lines of its log; or the watch over the lease did.
    """
    bucket = Bucket.from_env(environ)
    spec = RunSpec.read(bucket, environ["ASYNCGRPO_RUN"], SHOWN_S)
    if spec.engine_module == VLLM_SERVER:
        versions.check_vllm(packages.installed("vllm"))
    index = int(environ.get("ASYNCGRPO_REPLICA", "0"))
    model = model_fetch.obtain(spec.model, bucket, environ)
    adapters = Path(tempfile.mkdtemp(prefix="asyncgrpo-adapters-", dir=environ.get("ASYNCGRPO_CACHE")))
    gpus = probe.gpus(environ)
    # A launcher that knew the machine has decided all this; a replica of the user's own decides by what is here.
    recipe = machine.resolve(spec.recipe, probe.machine(len(gpus)), model_fetch.weights_bytes(model))
    spec = replace(spec, recipe=recipe)
    replica = Replica()
    for place in places(recipe.replica.engine_count, environ, gpus, machine.gpus_of_engine(recipe.replica.vllm)):
        command = engine_command(spec, place, model, index)
        environment = engine_environment(environ, spec, place, index, adapters)
        replica.engines.append(Engine(command, environment))

    def watch(stop: threading.Event, expired: Callable[[str], None]) -> None:
        lease.watch(bucket, spec.run, spec.recipe.jobs.lease_s, stop, expired)

    stand_in = StandIn.from_env(bucket, spec, f"replica {index}", environ)
    if stand_in is not None:
        stand_in.start()
    try:
        with announced(bucket, spec.run, index, environ):
            return replica.run(watch)
    finally:
        if stand_in is not None:
            stand_in.close(over=False)
        shutil.rmtree(adapters, ignore_errors=True)


@contextlib.contextmanager
def announced(bucket: Bucket, run: str, index: int, environ: Mapping[str, str]) -> Iterator[None]:
    """Tells the proxy where this replica is, while it runs, if `ASYNCGRPO_URLS` says so: one URL per engine, by commas.

    On Hugging Face Jobs whoever leads does that; a machine of the user's own has nobody else.
    """
    key, urls = replica_key(run, index), [url for url in environ.get("ASYNCGRPO_URLS", "").split(",") if url]
    if urls:
        bucket.put(key, json.dumps({"index": index, "job_id": "", "urls": urls}).encode())
    try:
        yield
    finally:
        if urls:
            bucket.delete([key])


@dataclass
class Engine:
    """One engine's process. Its output goes on to the Job's log, and its last lines are kept."""

    command: list[str]
    environment: dict[str, str]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    process: subprocess.Popen[bytes] | None = None
    _reader: threading.Thread | None = None

    def start(self) -> None:
        """Starts the process, which dies with this one even if this one is killed."""
        parent = os.getpid()
        self.process = subprocess.Popen(
            self.command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: processes.die_with_parent(parent),
        )
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._copy, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def last_words(self) -> str:
        """The last lines that the ended process wrote."""
        if self._reader is not None:
            self._reader.join(1.0)
        return "".join(self.tail).rstrip()

    def _copy(self, output: IO[bytes]) -> None:
        for line in output:
            self.tail.append(line.decode(errors="replace"))
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


class Replica:
    """The engines of one Job."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self._term = threading.Event()
        self._expired: str | None = None

    def run(self, watch_lease: WatchLease) -> int:
        """See `run` of this module. `watch_lease` calls back with the reason when the run is over."""
        signal.signal(signal.SIGTERM, lambda *_: self._term.set())
        stop = threading.Event()
        watcher = threading.Thread(target=watch_lease, args=(stop, self._expire), name="lease", daemon=True)
        try:
            for engine in self.engines:
                engine.start()
            watcher.start()
            return self._watch(watcher)
        finally:
            stop.set()
            processes.end([engine.process for engine in self.engines if engine.process], GRACE_S)

    def _expire(self, reason: str) -> None:
        self._expired = reason

    def _watch(self, watcher: threading.Thread) -> int:
        while True:
            watched = watcher.is_alive()
            if self._term.wait(POLL_S):
                log.info("SIGTERM: ending the engines")
                return 128 + signal.SIGTERM
            if self._expired is not None:
                log.info("ending the replica: %s", self._expired)
                return 0
            if not watched:
                raise RunFailed("nobody watches the run's lease any more: the replica could outlive its run")
            for number, engine in enumerate(self.engines):
                status = engine.process.poll() if engine.process else None
                if status is not None:
                    raise RunFailed(
                        f"engine {number} ended with status {status}. Its last lines:\n{engine.last_words()}"
                    )
