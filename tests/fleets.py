"""A run for tests, all in one process and on one loop: simulated engines behind the real middleware, a moto bucket, and
the real proxy, each on a socket of its own."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

from emulator.sim_engine import application
from emulator.sim_faults import Fault
from emulator.sim_state import Engine, Settings
from jobs.bucket import Bucket
from jobs.http import KEY_HEADER
from jobs.middleware import ReplicaMiddleware
from jobs.proxy import ProxySettings, serve
from jobs.recipe import Proxy
from tests.adapters import write_adapter
from tests.engines import KEY

RUN, ATTEMPT = "run", 2
SETTINGS = Settings(
    "tiny", "tiny", max_model_len=256, enable_lora=True, max_loras=6, max_cpu_loras=12, max_lora_rank=8, dtype="float32"
)
WAIT_S = 20.0
"""Longest that anything here takes, on a machine that is busy with other tests."""


def wire(version: int) -> str:
    return f"{RUN}.{ATTEMPT}.v{version}"


class Server(uvicorn.Server):
    """Leaves the signals of the test process alone."""

    @contextmanager
    def capture_signals(self) -> Any:
        yield


class Sim:
    """A simulated engine. Started again it is another boot on the same port."""

    def __init__(self, name: str, folder: Path, bucket: Mapping[str, str], settings: Settings = SETTINGS) -> None:
        self.name, self.settings, self.port, self.starts = name, settings, 0, 0
        self.history: list[dict[str, Any]] = []
        self._folder, self._bucket = folder / name, bucket
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> "Sim":
        self.starts += 1
        self.engine = Engine(self.settings)
        self.engine.events = Events(self.history)
        environ = {
            **self._bucket,
            "ASYNCGRPO_KEY": KEY,
            "ASYNCGRPO_ADAPTERS": str(self._folder / str(self.starts)),
            "ASYNCGRPO_REPLICA": self.name,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }
        hook = f"middleware_{id(self)}"
        setattr(sys.modules[__name__], hook, lambda app: ReplicaMiddleware(app, environ))
        app = application(self.engine, lambda: None, environ, [f"{__name__}.{hook}"])
        self._frozen, self._waiting = asyncio.Event(), asyncio.Event()
        self._frozen.set()

        async def freezable(scope: Any, receive: Any, send: Any) -> None:
            if not self._frozen.is_set():
                self._waiting.set()
            await self._frozen.wait()
            await app(scope, receive, send)

        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._server = Server(uvicorn.Config(freezable, lifespan="off", log_level="error"))
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        await until(lambda: self._server.started)
        return self

    async def kill(self) -> None:
        """Ends it as SIGKILL does: every connection is cut."""
        if self._task is None:
            return
        task, self._task = self._task, None
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        for sequence in list(self.engine.running):
            sequence.cancel()
        self._server.should_exit = self._server.force_exit = True
        await task

    def freeze(self) -> None:
        """Answers nothing more, as after SIGSTOP; connections stay."""
        self._frozen.clear()
        self._waiting.clear()

    async def asked(self) -> None:
        """Returns once somebody waits for an answer of it while it is frozen."""
        await self._waiting.wait()

    def thaw(self) -> None:
        self._frozen.set()

    def fault(self, where: str, **fields: Any) -> None:
        self.engine.faults.add(Fault.read({"where": where, **fields}))

    def events(self, kind: str, model: str | None = None) -> list[dict[str, Any]]:
        """What it did, over all of its boots."""
        return [e for e in self.history if e["event"] == kind and model in (None, e.get("model"))]


class Events(list[dict[str, Any]]):
    """An engine's log that writes to the history of all boots."""

    def __init__(self, history: list[dict[str, Any]]) -> None:
        self._history = history

    def append(self, event: dict[str, Any]) -> None:
        self._history.append(event)


class RunningProxy:
    """A proxy that serves, and a client of it."""

    def __init__(self, settings: ProxySettings, listener: socket.socket, session: aiohttp.ClientSession) -> None:
        self.settings, self.session, self._stop = settings, session, asyncio.Event()
        self.url = "http://{}:{}".format(*listener.getsockname())
        self.task = asyncio.create_task(serve(settings, listener, self._stop))

    async def stop(self) -> None:
        self._stop.set()
        await self.task

    async def call(self, method: str, path: str, json: Any = None, **kwargs: Any) -> tuple[int, Any]:
        """Status and body of an answer, as JSON where it is some."""
        async with self.session.request(method, self.url + path, json=json, **kwargs) as response:
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.text())

    async def get(self, path: str) -> Any:
        return (await self.call("GET", path))[1]

    async def status(self) -> Any:
        return await self.get("/asyncgrpo/status")

    async def states(self) -> dict[str, str]:
        return {replica["name"]: replica["state"] for replica in (await self.status())["replicas"]}

    async def versions(self) -> dict[int, str]:
        return {version["version"]: version["state"] for version in (await self.status())["versions"]}

    async def load(self, version: int, path: Path, **fields: Any) -> tuple[int, Any]:
        body = {"lora_name": f"trl-policy-v{version}", "lora_path": str(path), "load_inplace": False, **fields}
        status, answer = await self.call("POST", "/v1/load_lora_adapter", body)
        return status, answer["error"]["message"] if isinstance(answer, dict) else answer

    async def unload(self, version: int) -> tuple[int, Any]:
        return await self.call("POST", "/v1/unload_lora_adapter", {"lora_name": f"trl-policy-v{version}"})

    async def complete(self, version: int | None, prompt: int = 0, **fields: Any) -> tuple[int, Any]:
        """A completion as TRL asks for it; of the base model if `version` is None."""
        model = "tiny" if version is None else f"trl-policy-v{version}"
        tokens = [3 + (prompt + n) % 50 for n in range(20)]
        body = {"model": model, "prompt": tokens, "max_tokens": 8, "n": 1, "return_token_ids": True, "logprobs": 0}
        body["ignore_eos"] = True
        return await self.call("POST", "/v1/completions", {**body, "seed": prompt, **fields})

    async def until_ready(self, *names: str) -> None:
        async def ready() -> bool:
            states = await self.states()
            return all(states.get(name) == "ready" for name in names)

        await until(ready)

    async def until_served(self, version: int, *names: str) -> None:
        """Returns when all these replicas proved the version."""

        async def served() -> bool:
            replicas = {r["name"]: r for r in (await self.status())["replicas"]}
            return all(version in replicas[name]["adapters"] and replicas[name]["state"] == "ready" for name in names)

        await until(served)


class TestRun:
    """The bucket, the engines and the trainer's directory of a run."""

    __test__ = False

    def __init__(self, folder: Path, bucket: Mapping[str, str], session: aiohttp.ClientSession) -> None:
        self.folder, self.bucket, self.session = folder, bucket, session
        self.output = folder / "output"
        self.output.mkdir()
        self.sims: list[Sim] = []
        self.proxies: list[RunningProxy] = []

    async def add_sim(self, **settings: Any) -> Sim:
        sim = Sim(str(len(self.sims)), self.folder / "replicas", self.bucket, replace(SETTINGS, **settings))
        self.sims.append(await sim.start())
        return sim

    def settings(self, retry_s: float = 10.0, **proxy: Any) -> ProxySettings:
        return ProxySettings(
            run=RUN,
            bucket=Bucket.from_env(self.bucket, retry_s=retry_s),
            key=KEY,
            headers={KEY_HEADER: KEY},
            attempt=ATTEMPT,
            output_dir=self.output,
            replicas={sim.name: sim.url for sim in self.sims},
            proxy=Proxy(**proxy),
        )

    async def proxy(self, settings: ProxySettings | None = None, **fields: Any) -> RunningProxy:
        """Starts a proxy over all engines and waits until they are ready."""
        settings = settings or self.settings(**fields)
        listener = socket.create_server(("127.0.0.1", 0))
        proxy = RunningProxy(settings, listener, self.session)
        self.proxies.append(proxy)
        await proxy.until_ready(*settings.replicas)
        return proxy

    def adapter(self, version: int, seed: int | None = None, **fields: Any) -> Path:
        """A directory as TRL leaves it."""
        directory = self.output / ".vllm_lora" / f"trl-policy-v{version}"
        return write_adapter(directory, seed=version if seed is None else seed, **fields)

    async def sync(self, proxy: RunningProxy, version: int) -> None:
        """Publishes a version and waits until every engine serves it."""
        assert (await proxy.load(version, self.adapter(version)))[0] == 200
        await proxy.until_served(version, *(sim.name for sim in self.sims))


@asynccontextmanager
async def run_of(folder: Path, bucket: Mapping[str, str], sims: int = 2, **settings: Any) -> AsyncIterator[TestRun]:
    """A run with so many engines and no proxy yet; everything is ended after the block."""
    # TRL's trainer opens a connection for each call, too.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        run = TestRun(folder, bucket, session)
        try:
            for _ in range(sims):
                await run.add_sim(**settings)
            yield run
        finally:
            for proxy in run.proxies:
                await proxy.stop()
            for sim in run.sims:
                await sim.kill()


async def until(condition: Callable[[], Any], timeout_s: float = WAIT_S) -> None:
    """Returns when the condition, or what it returns to be awaited, is true."""
    async with asyncio.timeout(timeout_s):
        while True:
            met = condition()
            if await met if asyncio.iscoroutine(met) else met:
                return
            await asyncio.sleep(0.01)
