"""`asyncgrpo bench proxy`: what the proxy costs, against a plain aiohttp proxy and, where installed, vllm-router.

Each proxy in turn has one core to itself; two upstreams that answer at once and the load generator share another. All
are processes of their own; the load generator and the upstreams need a fraction of what a proxy needs (see `direct`).
Requests are a trainer's: 512 token ids in, 256 tokens with logprobs out.
"""

import asyncio
import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import aiohttp
import uvicorn
import uvloop
from aiohttp import web

from jobs.bench_wire import MODEL, WIRE, Generator, Load, Upstream, response
from jobs.bundle import app_dir
from jobs.completions import Completions
from jobs.errors import RunFailed
from jobs.upstream import LISTENER_OPTIONS, PoolListener, UnknownModel, tune_process

IN_FLIGHT = 384
"""What the published reference recipe keeps in flight."""
REQUESTS = 6_000
RATE = 500.0
RATE_REQUESTS = 2_500
PROMPT_TOKENS = 512
COMPLETION_TOKENS = 256
ROUNDS = 5
START_TIMEOUT_S = 30.0


class FixedPool:
    """Engines that are always there, under one version. Implements `jobs.upstream.Pool`."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = {str(index): url for index, url in enumerate(urls)}
        self._names = list(self._urls)

    def resolve(self, model: str | None) -> str:
        """Knows one version."""
        if model in (MODEL, WIRE):
            return WIRE
        raise UnknownModel(str(model))

    def public_name(self, name: str) -> str:
        """The trainer's name for it."""
        return MODEL

    def candidates(self, name: str) -> Sequence[str]:
        """All."""
        return self._names

    def ready(self) -> Sequence[str]:
        """All."""
        return self._names

    def url(self, engine: str) -> str:
        """As given."""
        return self._urls[engine]

    async def wait_for(self, name: str) -> None:
        """Never waits."""

    def begin(self, name: str) -> None:
        """Nothing is counted."""

    def end(self, name: str) -> None:
        """Nothing is counted."""

    def failed(self, engine: str, reason: str) -> None:
        """Says so: no engine fails in a benchmark."""
        sys.stderr.write(f"engine {engine} failed: {reason}\n")

    def missing(self, engine: str, name: str) -> None:
        """Says so: no version is missing in a benchmark."""
        sys.stderr.write(f"engine {engine} lacks {name}\n")

    def max_model_len(self) -> int | None:
        """Room enough."""
        return 32768

    def subscribe(self, listener: PoolListener) -> None:
        """Nothing ever happens."""


def serve_ours(port: int, urls: Sequence[str]) -> None:
    """The proxy's data plane over a fixed pool."""
    tune_process()
    uvicorn.run(Completions(FixedPool(urls), {}), host="127.0.0.1", port=port, **LISTENER_OPTIONS)


def serve_plain(port: int, urls: Sequence[str]) -> None:
    """A reverse proxy that routes nothing: aiohttp on both sides, whole bodies, the upstreams in turn."""

    turns = itertools.cycle(urls)
    sessions: list[aiohttp.ClientSession] = []

    async def close(app: web.Application) -> None:
        await sessions[0].close()

    async def forward(request: web.Request) -> web.Response:
        body = await request.read()
        headers = {"Content-Type": request.content_type}
        async with sessions[0].request(
            request.method, next(turns) + request.path, data=body, headers=headers
        ) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

    async def start() -> web.Application:
        sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", forward)
        app.on_cleanup.append(close)
        return app

    uvloop.install()
    web.run_app(start(), host="127.0.0.1", port=port, print=None, access_log=None)


def serve_upstream(port: int, completion_tokens: int) -> None:
    """An upstream that answers at once."""

    async def main() -> None:
        answer = response(completion_tokens)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Upstream(answer), "127.0.0.1", port, backlog=1024)
        await server.serve_forever()

    uvloop.run(main())


def generate(port: int, total: int, in_flight: int, rate: float) -> None:
    """The load generator; prints its result as JSON."""

    async def main() -> Load:
        return await Generator("127.0.0.1", port, total, in_flight, rate, PROMPT_TOKENS).run()

    json.dump(asdict(uvloop.run(main())), sys.stdout)


@dataclass(frozen=True)
class Figures:
    """One proxy in one round."""

    requests_per_s: float
    cpu_us: float
    """Processor time of the proxy for one request."""
    p50_ms: float
    p99_ms: float
    errors: int


@contextmanager
def child(arguments: Sequence[str], cores: Sequence[int]) -> Iterator[subprocess.Popen[bytes]]:
    """A process in one of the roles below, or vllm-router, on some cores; ended at the end."""
    command = [sys.executable, "-m", "jobs.bench_proxy", *arguments]
    if arguments[0] == "vllm-router":
        _, port, *urls = arguments
        command = [
            "vllm-router",
            "--host",
            "127.0.0.1",
            "--port",
            port,
            "--worker-urls",
            *urls,
            "--policy",
            "cache_aware",
        ]
        command += ["--prometheus-port", str(free_port()), "--log-level", "error"]
    output = subprocess.PIPE if arguments[0] == "load" else subprocess.DEVNULL  # vllm-router talks a lot
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(app_dir())}, stdout=output)
    try:
        os.sched_setaffinity(process.pid, cores)
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def measure(port: int, pid: int, cores: Sequence[int]) -> Figures:
    """Full load for throughput and processor time, then a fixed rate for latencies."""
    load(port, IN_FLIGHT * 2, IN_FLIGHT, 0, cores)
    before = cpu_s(pid)
    full = load(port, REQUESTS, IN_FLIGHT, 0, cores)
    spent = cpu_s(pid) - before
    steady = load(port, RATE_REQUESTS, 64, RATE, cores)
    return Figures(
        full.requests / full.wall_s,
        spent / full.requests * 1e6,
        steady.quantile_ms(0.5),
        steady.quantile_ms(0.99),
        full.errors + steady.errors,
    )


def load(port: int, total: int, in_flight: int, rate: float, cores: Sequence[int]) -> Load:
    """Runs the load generator in a process of its own."""
    with child(["load", str(port), str(total), str(in_flight), str(rate)], cores) as process:
        assert process.stdout
        return Load(**json.loads(process.stdout.read()))


def cpu_s(pid: int) -> float:
    """Processor time of a process and its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_up(port: int) -> None:
    """Returns when something answers there."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=1):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunFailed(f"nothing answers on port {port} after {START_TIMEOUT_S:g} s: {error}") from error
            time.sleep(0.05)


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def compare(rounds: int = ROUNDS) -> dict[str, Figures]:
    """Measures every proxy in turn, round after round; medians."""
    every = sorted(os.sched_getaffinity(0))
    proxy_cores, load_cores = every[:1], every[1:2] or every[:1]
    figures: dict[str, list[Figures]] = {}
    with ExitStack() as stack:

        def start(cores: Sequence[int], *arguments: str) -> int:
            port = free_port()
            process = stack.enter_context(child([*arguments[:1], str(port), *arguments[1:]], cores))
            pids[port] = process.pid
            wait_until_up(port)
            return port

        pids: dict[int, int] = {}
        upstreams = [start(load_cores, "upstream", str(COMPLETION_TOKENS)) for _ in range(2)]
        urls = [f"http://127.0.0.1:{port}" for port in upstreams]
        ports = {
            "asyncgrpo": start(proxy_cores, "ours", *urls),
            "plain aiohttp": start(proxy_cores, "plain", *urls),
        }
        if shutil.which("vllm-router"):
            ports["vllm-router"] = start(proxy_cores, "vllm-router", *urls)
        ports["direct"] = upstreams[0]
        for _ in range(rounds):
            for name, port in ports.items():
                figures.setdefault(name, []).append(measure(port, pids[port], load_cores))
    return {name: median(each) for name, each in figures.items()}


def median(figures: Sequence[Figures]) -> Figures:
    """Each figure's median; of errors the sum."""
    rates, cpu_us, p50_ms, p99_ms, errors = zip(*map(astuple, figures), strict=True)
    middle = statistics.median
    return Figures(middle(rates), middle(cpu_us), middle(p50_ms), middle(p99_ms), sum(errors))


def main(as_json: bool = False, rounds: int = ROUNDS) -> None:
    """Prints the table, or the same as JSON."""
    table = compare(rounds)
    if as_json:
        sys.stdout.write(json.dumps(table, default=asdict, indent=1) + "\n")
        return
    sys.stdout.write(f"{'':16}{'requests/s':>12}{'CPU us':>9}{'p50 ms':>9}{'p99 ms':>9}{'errors':>8}\n")
    for name, each in table.items():
        sys.stdout.write(
            f"{name:16}{each.requests_per_s:12.0f}{each.cpu_us:9.0f}{each.p50_ms:9.2f}{each.p99_ms:9.2f}{each.errors:8}\n"
        )


def role(arguments: Sequence[str]) -> None:
    """One of the processes of a comparison."""
    kind, port, *rest = arguments
    if kind == "ours":
        serve_ours(int(port), rest)
    elif kind == "plain":
        serve_plain(int(port), rest)
    elif kind == "upstream":
        serve_upstream(int(port), int(rest[0]))
    else:
        generate(int(port), int(rest[0]), int(rest[1]), float(rest[2]))


if __name__ == "__main__":
    role(sys.argv[1:])
