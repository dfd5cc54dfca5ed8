"""A run in which every part is a process that can be killed: simulated engines behind the real middleware, the proxy on
a socket that this process holds, a trainer as `tests.driver` plays it, and the emulator's bucket."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp

from emulator.bucket import MotoServer
from emulator.sim_model import STATES, Sampling, Table, adapted, base_table, sample
from jobs import bundle
from jobs.bucket import Bucket
from jobs.http import KEY_HEADER
from jobs.manifest import Manifest
from jobs.names import wire_name
from tests.adapters import write_adapter
from tests.driver import MAX_TOKENS, prompt
from tests.engines import KEY, engine_environ, sim_command

RUN = "matrix"
END = 151_643
"""The simulated engine's end token, where the model's directory names none."""
LINE_BYTES = 1 << 20
LOOK_S = 0.03
"""Between two looks at the proxy's status: often enough to catch what takes 0.3 s."""
WAIT_S = 30.0
"""Longest that anything here takes, on a machine that is busy with other tests."""


class Process:
    """A process of the scene; `log` is the file with what it writes to its standard error."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._running: asyncio.subprocess.Process | None = None

    async def launch(self, command: list[str], environ: dict[str, str], **options: Any) -> asyncio.subprocess.Process:
        with self.log.open("ab") as file:
            self._running = await asyncio.create_subprocess_exec(
                *command,
                env={
                    **os.environ,
                    **environ,
                    "PYTHONPATH": str(bundle.app_dir()),
                    "ASYNCGRPO_PARENT": str(os.getpid()),
                },
                stderr=file,
                limit=LINE_BYTES,
                **options,
            )
        return self._running

    @property
    def pid(self) -> int:
        assert self._running is not None
        return self._running.pid

    async def kill(self, signum: int = signal.SIGKILL) -> float:
        """Sends the signal and returns when the process has ended; the time of the signal."""
        at = time.monotonic()
        if self._running is not None:
            if self._running.returncode is None:
                self._running.send_signal(signum)
            async with asyncio.timeout(20):
                await self._running.wait()
        return at


class Replica(Process):
    """A simulated engine that takes its time. Started again it is a machine of its own at the same address."""

    def __init__(self, index: int, scene: "Scene") -> None:
        super().__init__(scene.folder / f"replica-{index}.err")
        self.index, self._scene, self.starts = index, scene, 0
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.name = f"r{index}"

    async def start(self) -> None:
        self.starts += 1
        home = self._scene.folder / f"replica-{self.index}-{self.starts}"
        home.mkdir()
        flags = ("--middleware", "jobs.middleware.ReplicaMiddleware", "--sim-log", str(home / "log"))
        command = sim_command(self.port, *flags, *self._scene.flags)
        await self.launch(command, engine_environ(home / "adapters", self._scene.environ))

    async def fault(self, where: str, **fields: Any) -> None:
        async with self._scene.session.post(f"{self.url}/sim/fault", json={"where": where, **fields}) as answer:
            assert answer.status == 200, await answer.text()

    def boots(self) -> list[list[dict[str, Any]]]:
        """The log of each of its boots; the last line of one that was killed may be cut short."""
        found = []
        for start in range(1, self.starts + 1):
            log = self._scene.folder / f"replica-{self.index}-{start}" / "log"
            lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
            found.append([json.loads(line) for line in lines])
        return found


class Driver(Process):
    """The trainer. `answered` are its rollouts' results, `events` all else that it told."""

    def __init__(self, scene: "Scene", attempt: int) -> None:
        super().__init__(scene.folder / f"driver-{attempt}.err")
        self.attempt, self._scene = attempt, scene
        self.answered: list[dict[str, Any]] = []
        self.rollouts: int | None = None
        self._done: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def start(self, in_flight: int) -> None:
        command = [sys.executable, "-m", "tests.driver", self._scene.url, str(in_flight)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._reader = asyncio.create_task(self._read(await self.launch(command, {}, **pipes)))

    async def _read(self, running: asyncio.subprocess.Process) -> None:
        assert running.stdout is not None
        async for line in running.stdout:
            event = json.loads(line)
            if event["event"] == "answered":
                self.answered.append({**event, "attempt": self.attempt})
            elif event["event"] == "stopped":
                self.rollouts = event["rollouts"]
            else:
                self._done.put_nowait(event)

    async def begin(self, what: str, **fields: Any) -> None:
        """Has it do something; `finish` waits for that."""
        assert self._running is not None and self._running.stdin is not None
        self._running.stdin.write(json.dumps({"do": what, **fields}).encode() + b"\n")
        await self._running.stdin.drain()

    async def finish(self) -> dict[str, Any]:
        async with asyncio.timeout(60):
            return await self._done.get()

    async def do(self, what: str, **fields: Any) -> dict[str, Any]:
        await self.begin(what, **fields)
        done = await self.finish()
        assert done["status"] == 200, (what, fields, done)
        return done

    async def begin_load(self, version: int) -> None:
        body = {"lora_name": f"trl-policy-v{version}", "lora_path": str(self.adapter(version)), "load_inplace": False}
        await self.begin("/v1/load_lora_adapter", body=body)

    async def load(self, version: int) -> float:
        """Publishes a version; seconds that the trainer waited."""
        await self.begin_load(version)
        done = await self.finish()
        assert done["status"] == 200, done
        return float(done["at"] - done["began"])

    async def unload(self, version: int) -> None:
        """As TRL: whatever the answer is."""
        await self.begin("/v1/unload_lora_adapter", body={"lora_name": f"trl-policy-v{version}"})
        await self.finish()

    async def sync(self, version: int, staleness: int = 1) -> float:
        """One weight sync as TRL does it; seconds that the trainer waited for the load."""
        await self.do("/pause?mode=keep")
        seconds = await self.load(version)
        await self.do("/resume")
        if version - staleness - 1 >= 1:
            await self.unload(version - staleness - 1)
        await self.do("roll", version=version)
        return seconds

    def adapter(self, version: int) -> Path:
        """The directory that it saves the version to, with weights of this attempt's own."""
        directory = self._scene.output / str(self.attempt) / ".vllm_lora" / f"trl-policy-v{version}"
        return directory if directory.exists() else write_adapter(directory, seed=1000 * self.attempt + version)

    async def stop(self) -> None:
        """Lets the rollouts in flight be answered, and ends."""
        await self.do("stop")
        assert self._running is not None and self._running.stdin is not None
        self._running.stdin.close()
        await self.kill()
        await self._reader


class Scene:
    """All of it. `flags` are those of the simulated engine."""

    def __init__(self, folder: Path, moto: MotoServer, session: aiohttp.ClientSession, flags: tuple[str, ...]) -> None:
        self.folder, self.moto, self.session, self.flags = folder, moto, session, flags
        settings = moto.settings
        self.environ = {**settings.environment(), **settings.secrets(), "ASYNCGRPO_RUN": RUN, "ASYNCGRPO_KEY": KEY}
        self.output = folder / "output"
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.url = "http://{}:{}".format(*self.listener.getsockname())
        self.replicas: list[Replica] = []
        self.drivers: list[Driver] = []
        self.proxy = Process(folder / "proxy.err")
        self.attempt = 1

    @property
    def driver(self) -> Driver:
        """The trainer of this attempt."""
        return self.drivers[-1]

    async def start_proxy(self) -> None:
        descriptor = self.listener.fileno()
        command = bundle.command("role", "proxy", "--fd", str(descriptor))
        for replica in self.replicas:
            command += ["--replica", replica.url]
        own = {"ASYNCGRPO_ATTEMPT": str(self.attempt), "ASYNCGRPO_OUTPUT_DIR": str(self.output / str(self.attempt))}
        await self.proxy.launch(command, {**self.environ, **own}, pass_fds=[descriptor])

    async def restart_proxy(self, signum: int = signal.SIGKILL) -> None:
        """Ends the proxy and starts it again, as the trainer's supervisor does when it finds it dead."""
        await self.proxy.kill(signum)
        await self.start_proxy()

    async def start_trainer(self, in_flight: int, versions: int = 0) -> None:
        """Starts an attempt: the proxy and the driver, with so many syncs."""
        (self.output / str(self.attempt)).mkdir(parents=True)
        self.drivers.append(Driver(self, self.attempt))
        await asyncio.gather(self.start_proxy(), self.driver.start(in_flight))
        for version in range(1, versions + 1):
            await self.driver.sync(version)

    async def status(self) -> dict[str, Any]:
        """The proxy's status; empty while it does not answer."""
        try:
            async with self.session.get(f"{self.url}/asyncgrpo/status") as answer:
                found: dict[str, Any] = await answer.json()
                return found
        except (aiohttp.ClientError, OSError):
            return {}

    async def until(self, condition: Callable[[dict[str, Any]], Any]) -> None:
        """Returns when the proxy's status is as it should be."""

        deadline, now = time.monotonic() + WAIT_S, {}
        while not (now := await self.status()) or not condition(now):
            assert time.monotonic() < deadline, f"not in time: {json.dumps(now)}"
            await asyncio.sleep(LOOK_S)

    def serving(self, version: int, count: int) -> Callable[[dict[str, Any]], bool]:
        """The condition that so many replicas are ready and proved the version."""

        def enough(now: dict[str, Any]) -> bool:
            able = [r for r in now["replicas"] if r["state"] == "ready" and version in r["adapters"]]
            return len(able) >= count

        return enough

    # What came of it

    def answered(self) -> list[dict[str, Any]]:
        return [answer for driver in self.drivers for answer in driver.answered]

    def check(self) -> None:
        """What must hold whatever happened."""
        tables = cache(lambda attempt, version: self._table(attempt, version))
        for driver in self.drivers:
            numbers = Counter(answer["rollout"] for answer in driver.answered)
            assert set(numbers.values()) <= {1}, "a rollout was answered twice"
        last = self.driver
        assert last.rollouts is not None and len(last.answered) == last.rollouts, "a rollout was lost"
        for answer in self.answered():
            assert answer["model"] == f"trl-policy-v{answer['version']}"
            assert len(answer["tokens"]) == len(answer["logprobs"]) >= 1
            expected = sampled(tables(answer["attempt"], answer["version"]), answer["prompt"], answer["seed"])
            assert (answer["tokens"], answer["logprobs"]) == expected, "other weights than asked for"
        self._check_engines()

    def _check_engines(self) -> None:
        digests: dict[str, set[str]] = {}
        for boot in (boot for replica in self.replicas for boot in replica.boots()):
            held: set[str] = set()
            for event in boot:
                name = event.get("model", "")
                if event["event"] == "load" and event["status"] == 200:
                    held.add(name)
                    digests.setdefault(name, set()).add(event["digest"])
                elif event["event"] == "unload":
                    held.discard(name)
                elif event["event"] == "completion":
                    assert event["outcome"] != "refused", f"an engine was asked for what it does not hold: {event}"
                    assert name in held or name == "tiny" or event["outcome"] == "dropped", f"{event} without a load"
        bucket = Bucket(self.moto.settings)
        for key in bucket.list(f"runs/{RUN}/adapters/"):
            if key.endswith("/manifest.json"):
                manifest = Manifest.from_json(bucket.get(key))
                assert manifest.verify_signature(KEY)
                digests.setdefault(manifest.wire_name, set()).add(manifest.digest)
        assert all(len(each) == 1 for each in digests.values()), "a name stands for two adapters"
        assert {wire_name(RUN, a["attempt"], a["version"]) for a in self.answered()} <= set(digests)

    def _table(self, attempt: int, version: int) -> Table:
        driver = next(driver for driver in self.drivers if driver.attempt == attempt)
        return adapted(base_table("tiny"), driver.adapter(version), 8)

    def waited_s(self, at: float, but: int | None = None) -> float:
        """How long the rollouts that were under way at that time had to wait from then on, but those of one version."""
        return max(a["at"] - at for a in self.answered() if a["asked"] < at < a["at"] and a["version"] != but)

    async def held(self) -> set[str]:
        """The wire names that the replicas hold, in their own words."""
        names: set[str] = set()
        for replica in self.replicas:
            async with self.session.get(f"{replica.url}/asyncgrpo/replica") as answer:
                names |= set((await answer.json())["adapters"])
        return names


def sampled(table: Table, prompt_number: int, seed: int) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of a rollout under a version, as the simulated engine samples them."""
    tokens = prompt(prompt_number)
    found = sample(table, tokens[-1], Sampling(MAX_TOKENS, 1.0, END), random.Random(hash((seed, 0, tuple(tokens)))))
    assert len(found.rows[0]) == STATES
    return found.tokens, found.logprobs()


@asynccontextmanager
async def scene(folder: Path, replicas: int, in_flight: int, *flags: str, versions: int = 1) -> AsyncIterator[Scene]:
    """A scene in which rollouts under way are answered; after the block nothing of it is left."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, headers={KEY_HEADER: KEY}) as session:
        moto = MotoServer()
        await asyncio.to_thread(moto.start)
        made = Scene(folder, moto, session, flags)
        try:
            made.replicas += [Replica(index, made) for index in range(replicas)]
            await asyncio.gather(*(replica.start() for replica in made.replicas), made.start_trainer(in_flight))
            await made.until(lambda now: all(replica["state"] == "ready" for replica in now["replicas"]))
            for version in range(1, versions + 1):
                await made.driver.sync(version)
            await made.until(made.serving(versions, replicas))
            yield made
        finally:
            for process in (*made.drivers, made.proxy, *made.replicas):
                await process.kill()
            made.listener.close()
            await asyncio.to_thread(moto.stop)
