"""The whole loop, measured: `python -m bench.loop stock|ours|trainer OUT [--set section.field=value ...]`.

`stock`: TRL's trainer, one stock engine and the proxy of bench/stock.py. `ours`: the same recipe as `asyncgrpo emulate`
runs it, with the same lag of the bucket. `trainer`: the trainer alone, for which rollouts cost nothing
(bench/instant.py). All write `OUT/<kind>.jsonl` (the trainer's metrics of each step) and `OUT/<kind>.json` (the row of
the table), and print the row.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.instant import InstantServer
from bench.stock import StockProxy
from emulator import gpus
from emulator.bucket import MotoServer
from emulator.faults import parse
from emulator.injector import Injector
from emulator.job_environment import IMAGES, Image
from emulator.ports import free_port
from emulator.serve import Emulator
from jobs import machine, model_fetch, probe, processes, recipe, replica
from jobs.bucket import Bucket
from jobs.bundle import app_dir
from jobs.cache import cache_dir
from jobs.launch import Glance, Launch
from jobs.plan import completions_per_step, in_flight, resolve
from jobs.progress import metrics_key
from jobs.recipe import Recipe
from jobs.site import Site
from jobs.spec import ModelRef, RunSpec

RECIPE = Path(__file__).with_name("loop.toml")
STEPS_OF_THE_PUBLISHED_RUN = 500
Rows = list[dict[str, Any]]


class GpuMemory:
    """The most memory that each GPU had in use, in GB, looked up every second."""

    def __init__(self) -> None:
        self.most_gb: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "GpuMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _watch(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._stop.wait(1.0):
            with suppress(OSError, subprocess.SubprocessError, ValueError):
                lines = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()
                for index, line in enumerate(lines):
                    self.most_gb[index] = max(self.most_gb.get(index, 0.0), round(int(line) / 1000, 1))


def stock(chosen: Recipe, places: Sequence[str], lag_s: float, out: Path) -> tuple[Rows, dict[str, Any]]:
    """One engine on the first place's GPU, the trainer on the last one's."""
    with tempfile.TemporaryDirectory(prefix="stock-") as folder:
        work = Path(folder)
        (work / "mount").mkdir()
        spec = _spec("stock", chosen)
        port, proxy_port = free_port(set()), free_port(set())
        place = replica.Place(0, "127.0.0.1", port, tuple(places[:1]))
        command = replica.engine_command(spec, place, spec.model.source, 0)
        at = command.index("--middleware")
        command = [*command[:2], "vllm.entrypoints.openai.api_server", *command[3:at], *command[at + 2 :]]
        environment = replica.engine_environment(_common(), spec, place, 0, work)
        with (out / "stock-engine.log").open("wb") as log:
            engine = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            proxy = StockProxy([f"http://127.0.0.1:{port}"], work / "mount", lag_s, proxy_port)
            proxy.start()
            rows = _train(spec, f"http://127.0.0.1:{proxy_port}", places[-1:], work, out / "stock-trainer.log", engine)
            return rows, {"generation_stall_s": round(proxy.stall_s, 2), "tokens": proxy.tokens, "engines": 1}
        finally:
            processes.end([engine], 10.0)


def trainer(chosen: Recipe, places: Sequence[str], lag_s: float, out: Path) -> tuple[Rows, dict[str, Any]]:
    """The trainer alone, on all places but the first, which a replica would have; its server has everything ready."""
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        server = InstantServer(free_port(set()))
        server.start()
        rows = _train(_spec("trainer", chosen), server.url, places[1:], Path(folder), out / "trainer.log")
    return rows, {"generation_stall_s": 0.0, "tokens": server.tokens, "engines": 0}


def _spec(run: str, chosen: Recipe) -> RunSpec:
    model = str(Path(chosen.model.id).resolve())
    return RunSpec(run, resolve(chosen), ModelRef("path", model, model))


def _common() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(app_dir()), "ASYNCGRPO_CACHE": str(cache_dir())}


def _train(
    spec: RunSpec, url: str, gpus: Sequence[str], work: Path, log: Path, engine: "subprocess.Popen[bytes] | None" = None
) -> Rows:
    """The training child alone, without its supervisor and proxy, before the server at `url`; its journal."""
    (work / "spec.json").write_bytes(spec.to_json())
    output = work / "output"
    output.mkdir()
    environment = _common() | {
        "ASYNCGRPO_SPEC_FILE": str(work / "spec.json"),
        "ASYNCGRPO_MODEL_DIR": spec.model.source,
        "ASYNCGRPO_OUTPUT_DIR": str(output),
        "ASYNCGRPO_SERVER_URL": url,
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "ASYNCGRPO_PARENT": str(os.getpid()),
    }
    with log.open("wb") as file:
        command = [sys.executable, "-m", "jobs.train"]
        child = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        while child.poll() is None:
            if engine is not None and engine.poll() is not None:
                raise SystemExit("the engine ended; see its log")
            time.sleep(0.5)
        if child.returncode:
            raise SystemExit(f"the trainer failed:\n{log.read_text()[-3000:]}")
        return _read((output / "metrics.jsonl").read_bytes())
    finally:
        processes.end([child], 10.0)


def ours(
    chosen: Recipe, places: Sequence[str], lag_s: float, out: Path, faults: str = ""
) -> tuple[Rows, dict[str, Any]]:
    """What `asyncgrpo emulate` does, but the metrics of every step are kept, those of each attempt."""
    images = {"*": Image(environment=gpus.image_environment(os.environ))} if places else IMAGES
    bucket = MotoServer("hub")
    emulator = Emulator(bucket=bucket, devices=places, images=images, logs=out / "ours-logs")
    emulator.start()
    try:
        bucket.disturb(lag_s=lag_s)
        injector = Injector(parse(faults))
        injector.attach(emulator)
        site = Site(
            endpoint=emulator.endpoint,
            token=emulator.token,
            namespace=emulator.owner.name,
            bucket=emulator.bucket,
            environment={"ASYNCGRPO_CACHE": str(cache_dir())},
            poll_s=0.5,
        )
        glances: list[Glance] = []

        def look(glance: Glance) -> None:
            glances[:] = [glance]
            injector.look(glance, launch.crew)

        with Launch(site, chosen, f"ours-{int(time.time())}", "vllm", None, 0) as launch:
            launch.start(Path(chosen.model.id))
            summary = launch.follow(look)
            read, attempts = Bucket(emulator.bucket).get, range(1, summary["attempt"] + 1)
            rows = [row for attempt in attempts for row in _read(read(metrics_key(launch.run, attempt)))]
        tokens = sum((summary["replica_tokens"] or {}).values())
        engines = len((glances[0].progress.get("proxy") or {}).get("replicas") or [])
        (out / "ours-summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        return rows, {"generation_stall_s": summary["generation_stall_s"], "tokens": tokens, "engines": engines}
    finally:
        emulator.stop()


def _read(lines: bytes) -> Rows:
    return [json.loads(line) for line in lines.splitlines() if line.strip()]


def row(kind: str, chosen: Recipe, found: Rows, more: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """The row of the table, from the trainer's journal. Pure.

    All completions have one length, so they come in waves of as many as are in flight. Speeds are those of whole waves,
    from the end of the first step on: what starts when, and how long the first wave takes, is not in them. Nor are the
    steps of a trainer that was started again.
    """
    started = [at for at, each in enumerate(found) if each.get("event") == "phase" and each["name"] == "started"]
    began = found[started[0]]["time"]
    first = found[: started[1]] if len(started) > 1 else found
    steps = [each for each in first if "event" not in each and isinstance(each.get("step"), int)]
    samples = completions_per_step(chosen, processes)
    wave = max(1, round(in_flight(chosen, processes) / samples))
    whole = (len(steps) - 1) // wave * wave or len(steps) - 1
    step_s = (steps[whole]["time"] - steps[0]["time"]) / whole

    def column(name: str) -> list[float]:
        return [each[name] for each in steps if each.get(name) is not None]

    syncs = column("perf/weight_sync_s")
    return {
        "kind": kind,
        "steps": len(steps),
        "in_flight": in_flight(chosen, processes),
        "steps_measured": whole,
        "samples_per_s": round(samples / step_s, 2),
        "step_s": round(step_s, 2),
        "step_s_p50": round(statistics.median(column("perf/step_s")), 2),
        "first_step_after_s": round(steps[0]["time"] - began, 1),
        "wait_s_mean": round(statistics.fmean(column("perf/rollout_wait_s")[1:]), 2),
        "fwd_bwd_s_p50": round(statistics.median(column("perf/fwd_bwd_s")), 2),
        "mfu_percent": round(statistics.median(column("perf/mfu_fwd_bwd") or [0.0]), 1),
        "sync_s_p50": round(statistics.median(syncs), 3),
        "sync_s_max": round(max(syncs), 3),
        "trained_tokens_per_s": round(statistics.fmean(column("batch/trained_tokens_per_step")) / step_s),
        "ratio_min": round(min(column("ratio")), 5),
        "ratio_max": round(max(column("ratio")), 5),
        "staleness_mean": round(statistics.fmean(column("sample/staleness_mean")), 2),
        "stale_dropped": sum(column("sample/dropped_stale_total")),
        "h_of_500_steps": round(STEPS_OF_THE_PUBLISHED_RUN * step_s / 3600, 2),
        **more,
    }


def main(words: list[str]) -> int:
    """Reads the command line and runs one of the three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["stock", "ours", "trainer"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--gpus", default="1,0", help="replica's GPU, trainer's GPUs; none")
    parser.add_argument("--lag", type=float, default=2.5, help="seconds until an object that was written is seen")
    parser.add_argument("--faults", default="", help="of `ours`: as `asyncgrpo emulate` takes them")
    parser.add_argument("--name", help="of the row; the kind if left out")
    asked = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and end what was started
    chosen = recipe.load(str(RECIPE), overrides=asked.overrides)
    places = gpus.places(asked.gpus, probe.gpus(os.environ), chosen)
    if asked.kind == "stock":
        chosen = recipe.override(chosen, "replica.engines=1")
    own = gpus.machine_of_a_replica(probe.machine(len(set(places))), places, chosen)
    chosen = machine.resolve(chosen, own, model_fetch.weights_bytes(chosen.model.id))
    asked.out.mkdir(parents=True, exist_ok=True)
    with GpuMemory() as memory:
        if asked.kind == "ours":
            found, more = ours(chosen, places, asked.lag, asked.out, asked.faults)
        else:
            found, more = (stock if asked.kind == "stock" else trainer)(chosen, places, asked.lag, asked.out)
    name = asked.name or asked.kind
    (asked.out / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
    trainers = max(1, len(places) - 1) if places else 1
    made = row(name, chosen, found, {**more, "gpu_gb": memory.most_gb}, trainers)
    (asked.out / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n")
    print(json.dumps(made))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
