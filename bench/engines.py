"""How many tokens a second the engines of one replica give: `python -m bench.engines serve|measure|alike`.

`serve` runs a real replica Job (`role replica`) with a moto bucket, publishes an adapter and loads it on each engine,
and stays. `measure` loads the first N of them in each of its cells, and prints and writes a table. `alike` compares
answers for tokens alone with vLLM's own. The model is what `python -m bench.models` built.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import load, same
from jobs import lease, machine, manifest, model_fetch, probe, replica
from jobs.bucket import Bucket
from jobs.cache import cache_dir
from jobs.http import KEY_HEADER
from jobs.names import WireName
from jobs.recipe import Recipe
from jobs.spec import ModelRef, RunSpec, spec_key

RUN, ATTEMPT, VERSION = "bench", 1, 1
WIRE = str(WireName(RUN, ATTEMPT, VERSION))
LEASE_S = 7200


@dataclass(frozen=True)
class Cell:
    """One load: on the first `engines` of them, each with cores of its own if `pinned`."""

    engines: int
    in_flight: int
    way: str = "tokens"
    seeded: bool = False
    pinned: bool = False
    profile: bool = False
    """Take a profile of the first engine's processes meanwhile, with py-spy; costs it a little."""

    @classmethod
    def read(cls, text: str) -> "Cell":
        """`ENGINESxIN-FLIGHT[:WAY[:seeded]]`, of which the way is `tokens` if left out."""
        shape, *more = text.split(":")
        engines, in_flight = map(int, shape.split("x"))
        return cls(engines, in_flight, *more[:1], seeded="seeded" in more[1:])


STOCK = [Cell(1, n, "vllm", seeded=True) for n in (384, 768, 128)]
"""vLLM as it is, asked as TRL 1.16 asks."""
PLAN = [
    *STOCK,
    Cell(1, 384, "vllm"),
    Cell(1, 384, "generate"),
    Cell(1, 384, seeded=True),
    *(Cell(1, n) for n in (384, 768, 128)),
    Cell(4, 768, "vllm", seeded=True),
    Cell(4, 768, seeded=True),
    *(Cell(4, n) for n in (768, 384, 128)),
    Cell(4, 768, pinned=True),
    *(Cell(2, n) for n in (768, 384, 128)),
    *(Cell(8, n) for n in (768, 384)),
    Cell(8, 768, pinned=True),
    *(Cell(6, n) for n in (768, 384)),
    Cell(3, 768),
    Cell(1, 384, "vllm", seeded=True, profile=True),
    Cell(1, 384, profile=True),
    Cell(8, 1536),
    Cell(4, 1536),
]


def recipe(model: Path, engines: int, flags: Mapping[str, Any]) -> Recipe:
    """A run's recipe, as far as a replica reads it."""
    return Recipe.from_dict(
        {
            "name": "bench",
            "model": {"id": str(model), "dtype": "auto"},
            "dataset": {"load": "bench.models:prompts"},
            "reward": {"functions": ["bench.models:vowels"]},
            "lora": {"r": 1, "alpha": 2},
            "replica": {
                "count": 1,
                "engines": engines,
                "request_seeds": True,  # the cells say whether there are seeds
                "vllm": {"max_model_len": 4096, **flags},
            },
            "jobs": {"lease_s": LEASE_S},
        }
    )


def write_adapter(directory: Path, config: Mapping[str, Any]) -> None:
    """A random adapter of rank 1 over all linear layers, small enough to change little."""
    import numpy
    from safetensors.numpy import save_file

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    draw = numpy.random.default_rng(0)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (outputs, inputs) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = (draw.standard_normal((1, inputs)) * 0.02).astype("f4")
            tensors[f"{prefix}.lora_B.weight"] = (draw.standard_normal((outputs, 1)) * 0.02).astype("f4")
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "bench",
        "r": 1,
        "lora_alpha": 2,
        "bias": "none",
        "target_modules": sorted(name.rpartition(".")[2] for name in shapes),
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))


def serve(model: Path, directory: Path, engines: int, flags: Mapping[str, Any], port: int) -> int:
    """Runs the replica until it ends; `DIR/ready.json` is there once every engine has the adapter.

    Its engines listen on `port` and those after it.
    """
    from moto.server import ThreadedMotoServer

    directory.mkdir(parents=True, exist_ok=True)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, bucket_port = server.get_host_and_port()
    key = secrets.token_hex(32)
    environ = {
        "AWS_ENDPOINT_URL": f"http://{host}:{bucket_port}",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "ASYNCGRPO_BUCKET": f"s3://{RUN}",
        "ASYNCGRPO_RUN": RUN,
        "ASYNCGRPO_KEY": key,
        "ASYNCGRPO_CACHE": str(cache_dir()),
        **{f"ASYNCGRPO_BIND_{replica.PORT + i}": f"127.0.0.1:{port + i}" for i in range(engines)},
    }
    import boto3

    boto3.client(
        "s3",
        endpoint_url=environ["AWS_ENDPOINT_URL"],
        region_name="us-east-1",
        aws_access_key_id="bench",
        aws_secret_access_key="bench",
    ).create_bucket(Bucket=RUN)
    bucket = Bucket.from_env(environ)
    whole = machine.resolve(
        recipe(model, engines, flags), probe.machine(len(probe.gpus(os.environ))), model_fetch.weights_bytes(str(model))
    )
    spec = RunSpec(RUN, whole, ModelRef("path", str(model), "bench"))
    bucket.put(spec_key(RUN), spec.to_json())
    lease.renew(bucket, RUN)
    write_adapter(directory / "adapter", json.loads((model / "config.json").read_text()))
    where = publish(bucket, directory / "adapter", key)
    command = [sys.executable, "asyncgrpo.py", "role", "replica"]
    with (directory / "replica.log").open("wb") as log:
        job = subprocess.Popen(command, env={**os.environ, **environ}, stdout=log, stderr=subprocess.STDOUT)
    signal.signal(signal.SIGTERM, lambda *_: job.terminate())
    state = {"key": key, "port": port, "engines": engines, "label": json.dumps(flags), "supervisor": job.pid}
    threading.Thread(target=_load_all, args=(state, where, directory), daemon=True).start()
    return job.wait()


def publish(bucket: Bucket, adapter: Path, key: str) -> str:
    """Puts the adapter into the bucket as the proxy does; what a load names it by."""
    name = WireName(RUN, ATTEMPT, VERSION)
    made = manifest.build(adapter, name, "bench").sign(key)
    prefix = manifest.adapter_prefix(RUN, ATTEMPT, VERSION)
    for file in made.files:
        bucket.put_file(f"{prefix}/{file}", adapter / file)
    bucket.put(manifest.manifest_key(RUN, ATTEMPT, VERSION), made.to_json())
    return f"manifest:{manifest.manifest_key(RUN, ATTEMPT, VERSION)}"


def _load_all(state: dict[str, Any], where: str, directory: Path) -> None:
    started = time.monotonic()
    ready: dict[int, float] = {}
    while len(ready) < state["engines"]:
        for engine in set(range(state["engines"])) - set(ready):
            with suppress(OSError):
                _call(state, engine, "/health")
                body = {"lora_name": WIRE, "lora_path": where, "load_inplace": False}
                _call(state, engine, "/v1/load_lora_adapter", body)
                ready[engine] = round(time.monotonic() - started, 1)
        time.sleep(0.5)
    (directory / "ready.json").write_text(json.dumps({**state, "start_s": ready}))


def _call(state: Mapping[str, Any], engine: int, path: str, body: Any = None) -> bytes:
    request = urllib.request.Request(
        f"http://127.0.0.1:{state['port'] + engine}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={KEY_HEADER: state["key"], "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return bytes(answer.read())


@dataclass(frozen=True)
class Processes:
    """An engine's two kinds of process."""

    server: int
    scheduler: list[int]

    @property
    def pids(self) -> list[int]:
        """All of them."""
        return [self.server, *self.scheduler]


def processes(state: Mapping[str, Any]) -> list[Processes]:
    """The processes of each engine, in the order of their ports."""
    found: dict[int, Processes] = {}
    for pid in load.children(state["supervisor"]):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"--port" in words:
            port = int(words[words.index(b"--port") + 1])
            found.setdefault(port, Processes(pid, load.children(pid)))
    return [found[port] for port in sorted(found)]


def pin(engines: list[Processes], number: int, pinned: bool) -> None:
    """Gives each of the first `number` engines cores of its own, or lets all run anywhere."""
    available = probe.cores()
    for index, engine in enumerate(engines):
        each = len(available) // number
        own = available[index * each : (index + 1) * each] if pinned and index < number else available
        for pid in engine.pids:
            for task in Path(f"/proc/{pid}/task").glob("*"):
                with suppress(OSError):
                    os.sched_setaffinity(int(task.name), own)


def measure(
    directory: Path,
    out: Path,
    cells: Iterable[Cell],
    vocabulary: int,
    warm_s: float,
    measure_s: float,
    deadline_s: float,
) -> None:
    """Runs the cells until the deadline; a line for each goes to `OUT/engines.jsonl` and to stdout."""
    started = time.monotonic()
    state = json.loads((directory / "ready.json").read_text())
    out.mkdir(parents=True, exist_ok=True)
    found = processes(state)
    headers = {KEY_HEADER: state["key"]}
    print(f"engines up after {state['start_s']} s", flush=True)
    print(
        "engines in-flight way      seed pin   tokens/s steps/s server-ms scheduler-ms GPU-% GPU-GB failed", flush=True
    )
    for cell in cells:
        if cell.engines > len(found):
            continue
        if time.monotonic() - started > deadline_s - warm_s - measure_s - 3:
            print(f"left out for want of time: {cell}")
            continue
        pin(found, cell.engines, cell.pinned)
        urls = [f"http://127.0.0.1:{state['port'] + engine}" for engine in range(cell.engines)]
        shape = load.Shape(WIRE, vocabulary=vocabulary, seeded=cell.seeded, way=cell.way)
        used = found[: cell.engines]
        kinds = {
            "server": [engine.server for engine in used],
            "scheduler": [pid for engine in used for pid in engine.scheduler],
        }
        with Profiles(cell, used[0], out, warm_s, measure_s), GpuWatch(warm_s + measure_s / 2) as gpu:
            result = asyncio.run(load.run(urls, headers, shape, cell.in_flight, warm_s, measure_s, kinds))
        row = {"label": state["label"], **asdict(cell), **asdict(result), "gpu": gpu.seen}
        with (out / "engines.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{cell.engines:7} {cell.in_flight:9} {cell.way:8} {'yes' if cell.seeded else 'no':4} "
            f"{'yes' if cell.pinned else 'no':4} {result.tokens_per_s:9,.0f} {result.steps_per_s:7.1f} "
            f"{result.cpu['server']:9.4f} {result.cpu['scheduler']:12.4f} {gpu.seen[0]:5} {gpu.seen[1] / 1000:6.1f} "
            f"{result.failed:6}{' profiled' if cell.profile else ''}",
            flush=True,
        )


def alike(directory: Path, out: Path, vocabulary: int) -> None:
    """Compares answers for tokens alone with vLLM's own (bench/same.py), by the adapter and by the base model."""
    state = json.loads((directory / "ready.json").read_text())
    out.mkdir(parents=True, exist_ok=True)
    url, headers = f"http://127.0.0.1:{state['port']}", {KEY_HEADER: state["key"]}
    rows = {model: asyncio.run(same.measure(url, headers, model, vocabulary)) for model in (WIRE, "bench")}
    for model, row in rows.items():
        print(f"{model}:", *(f"{what}: {json.dumps(found)}" for what, found in row.items()), sep="\n ", flush=True)
    with (out / "same.jsonl").open("a") as file:
        file.write(json.dumps({"label": state["label"], **rows}) + "\n")


class GpuWatch:
    """What the driver says of the GPU, asked once after `after_s`: (use in percent, memory in MiB)."""

    def __init__(self, after_s: float) -> None:
        self.seen: tuple[int, int] = (0, 0)
        self._timer = threading.Timer(after_s, self._look)

    def __enter__(self) -> "GpuWatch":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()

    def _look(self) -> None:
        command = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
        with suppress(OSError, subprocess.SubprocessError, ValueError):
            answer = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
            self.seen = max(tuple(map(int, line.split(","))) for line in answer.splitlines())  # type: ignore[assignment]


class Profiles:
    """Runs py-spy on both processes of an engine during a profiled cell."""

    def __init__(self, cell: Cell, engine: Processes, out: Path, warm_s: float, measure_s: float) -> None:
        self._commands = []
        if cell.profile:
            for kind, pid in (("server", engine.server), ("scheduler", max(engine.scheduler, key=load.cpu_s))):
                file = out / f"profile-{cell.way}-{kind}.txt"
                self._commands.append(
                    [
                        "py-spy",
                        "record",
                        "-d",
                        str(int(measure_s)),
                        "-r",
                        "100",
                        "-f",
                        "raw",
                        "-o",
                        str(file),
                        "-p",
                        str(pid),
                    ]
                )
        self._warm_s = warm_s
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> None:
        def start() -> None:
            for command in self._commands:
                with suppress(OSError):
                    self._running.append(
                        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                    )

        self._timer = threading.Timer(self._warm_s, start)
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.join()
        for process in self._running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def main(words: list[str]) -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("serve")
    serving.add_argument("directory", type=Path)
    serving.add_argument("--model", type=Path, required=True)
    serving.add_argument("--engines", type=int, default=8)
    serving.add_argument("--port", type=int, default=replica.PORT)
    serving.add_argument("--flag", action="append", default=[], metavar="NAME=JSON")
    measuring, comparing = commands.add_parser("measure"), commands.add_parser("alike")
    for each in (measuring, comparing):
        each.add_argument("directory", type=Path)
        each.add_argument("out", type=Path)
        each.add_argument("--vocabulary", type=int, default=32000)
    measuring.add_argument("--warm", type=float, default=4.0)
    measuring.add_argument("--seconds", type=float, default=7.0)
    measuring.add_argument("--deadline", type=float, default=3600.0)
    measuring.add_argument(
        "--cells", nargs="+", help="3x768 1x384:vllm:seeded: engines x in flight, way, seeds; instead of the plan"
    )
    chosen = parser.parse_args(words)
    if chosen.command == "serve":
        flags = {name: json.loads(value) for name, _, value in (flag.partition("=") for flag in chosen.flag)}
        return serve(chosen.model.resolve(), chosen.directory.resolve(), chosen.engines, flags, chosen.port)
    if chosen.command == "alike":
        alike(chosen.directory, chosen.out, chosen.vocabulary)
        return 0
    cells = [Cell.read(each) for each in chosen.cells] if chosen.cells else PLAN
    measure(chosen.directory, chosen.out, cells, chosen.vocabulary, chosen.warm, chosen.seconds, chosen.deadline)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
