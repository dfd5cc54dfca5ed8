"""Replica, proxy and trainer killed at every stage of a sync and in the middle of completions: real processes, real
sockets, a trainer that sends what TRL sends. Whatever happens, each rollout gets one result, of the very adapter that
it asked for (`Scene.check`)."""

import asyncio
import itertools
import signal
import statistics
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from jobs.names import parse_wire
from tests.scenes import RUN, Driver, Replica, Scene, scene

PHASES = (
    "before publish",
    "during publish",
    "between publish and load",
    "during load",
    "between load and unload",
    "during unload",
    "after unload",
    "in the middle of completions",
)
CELLS = list(itertools.product((signal.SIGKILL, signal.SIGTERM), PHASES))
PACE = ("--sim-load-s", "0.3", "--sim-decode-tokens-per-s", "40")
"""A load takes 0.3 s, a completion of 8 tokens 0.2 s."""
IN_FLIGHT = 16

Strike = Callable[[], Awaitable[None]]
Condition = Callable[[dict[str, Any]], bool]


def version_is(version: int, state: str) -> Condition:
    return lambda now: any(v["version"] == version and v["state"] == state for v in now["versions"])


def loading(version: int) -> Condition:
    """Every ready replica was sent the load and none has proved it."""

    def met(now: dict[str, Any]) -> bool:
        ready = [replica for replica in now["replicas"] if replica["state"] == "ready"]
        begun = [str(version) in each["load_attempts"] and version not in each["adapters"] for each in ready]
        return bool(ready) and all(begun)

    return met


async def sync(scene: Scene, version: int, phase: str, strike: Strike) -> None:
    """One weight sync of TRL's, struck in one phase. A trainer that was killed in it does not go on."""
    driver, old = scene.driver, version - 2

    async def struck(when: str) -> bool:
        if phase == when:
            await strike()
        return scene.driver is not driver

    await driver.do("/pause?mode=keep")
    if await struck("before publish"):
        return
    if phase == "during publish":
        scene.moto.refuse(seconds=0.4)
    if phase == "during load":
        await slower(scene, "load")
    await driver.begin_load(version)
    if phase == "during publish":
        await scene.until(version_is(version, "publishing"))
    if await struck("during publish"):
        return
    assert (await driver.finish())["status"] == 200
    if await struck("between publish and load"):
        return
    await driver.do("/resume")
    if phase == "during load":
        await scene.until(loading(version))
    if await struck("during load"):
        return
    if phase == "between load and unload":
        await scene.until(scene.serving(version, 2))
    if await struck("between load and unload"):
        return
    if phase == "during unload":
        await slower(scene, "unload")
    await driver.unload(old)
    if phase == "during unload":
        await scene.until(version_is(old, "retiring"))
    if phase == "after unload":
        await scene.until(version_is(old, "retired"))
    if await struck("during unload") or await struck("after unload"):
        return
    await driver.do("roll", version=version)
    if phase == "in the middle of completions":
        await answers(scene.driver, version, 1)
        await scene.until(lambda now: now["completions"]["in_flight"])
    await struck("in the middle of completions")


async def slower(scene: Scene, where: str) -> None:
    """The next load or unload takes half a second longer on each replica that is ready."""
    names = {replica["name"] for replica in (await scene.status())["replicas"] if replica["state"] == "ready"}
    await asyncio.gather(*(r.fault(where, delay_s=0.5) for r in scene.replicas if r.name in names))


async def answers(driver: Driver, version: int, count: int) -> None:
    """Returns when the driver got so many more results under the version."""
    before = len(driver.answered)
    async with asyncio.timeout(30):
        while sum(answer["version"] == version for answer in driver.answered[before:]) < count:
            await asyncio.sleep(0.01)


def only_pauses(run: Scene) -> None:
    """What the trainer saw of a proxy that was restarted: broken connections, and no error of the proxy's."""
    errors = {error for answer in run.answered() for error in answer["errors"]}
    assert errors <= {"ServerDisconnectedError", "ClientOSError"}, errors


async def killed_replica(folder: Path) -> None:
    """One replica after another."""
    async with scene(folder, 3, IN_FLIGHT, *PACE, versions=2) as run:
        version, deaths = 2, []
        for number, (signum, phase) in enumerate(CELLS):
            victim, version = run.replicas[number % 3], version + 1

            async def strike(victim: Replica = victim, signum: int = signum) -> None:
                deaths.append(await victim.kill(signum))

            await sync(run, version, phase, strike)
            await answers(run.driver, version, IN_FLIGHT)
            await victim.start()
            await run.until(run.serving(version, 2))
        await run.until(run.serving(version, 3))
        await run.driver.stop()
        now = await run.status()
        run.check()
        assert not [answer for answer in run.answered() if answer["errors"]], "the trainer noticed"
        assert now["completions"]["lost"] == now["completions"]["in_flight"] == now["generation_stall_s"] == 0
        assert now["completions"]["redispatched"] > 0
        waited = {(signum.name, phase): run.waited_s(at) for (signum, phase), at in zip(CELLS, deaths, strict=True)}
        assert max(waited.values()) < 1, waited
        assert await run.held() == {f"{RUN}.1.v{n}" for n in (version - 1, version)}


async def killed_proxy(folder: Path) -> None:
    async with scene(folder, 2, IN_FLIGHT, *PACE, versions=2) as run:
        for version, (signum, phase) in enumerate(CELLS, 3):
            await sync(run, version, phase, lambda signum=signum: run.restart_proxy(signum))
            await answers(run.driver, version, IN_FLIGHT)
            await run.until(run.serving(version, 2))
        await run.driver.stop()
        run.check()
        only_pauses(run)
        assert (await run.status())["completions"]["lost"] == 0


async def killed_trainer(folder: Path) -> None:
    async with scene(folder, 2, IN_FLIGHT, *PACE, versions=2) as run:
        for signum, phase in CELLS:

            async def strike(signum: int = signum) -> None:
                await asyncio.gather(run.driver.kill(signum), run.proxy.kill(signum))
                run.attempt += 1
                await run.start_trainer(IN_FLIGHT, versions=2)

            await sync(run, 3, phase, strike)
            await answers(run.driver, 2, IN_FLIGHT)
            await run.until(run.serving(2, 2))
        await run.driver.stop()
        run.check()
        assert (await run.status())["completions"]["lost"] == 0
        await run.until(lambda now: not now["completions"]["in_flight"])
        names = [parse_wire(name) for name in await run.held()]
        assert {name.attempt for name in names if name} == {run.attempt}, "an attempt left adapters behind"


def test_every_part_is_killed_at_every_stage(tmp_path: Path) -> None:
    """Three runs at the same time: each waits for most of its time."""

    async def main() -> None:
        async with asyncio.TaskGroup() as runs:
            for cells in (killed_replica, killed_proxy, killed_trainer):
                folder = tmp_path / cells.__name__
                folder.mkdir()
                runs.create_task(cells(folder))

    asyncio.run(main())


def test_all_but_the_trainer_killed_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, 2, IN_FLIGHT, *PACE, versions=2) as run:
            await asyncio.gather(*(replica.kill() for replica in run.replicas))
            await run.until(lambda now: now["completions"]["parked"] == IN_FLIGHT)
            assert await run.driver.sync(3) < 1, "a sync waits for no replica"
            await asyncio.gather(*(replica.start() for replica in run.replicas))
            await answers(run.driver, 3, IN_FLIGHT)
            assert not [answer for answer in run.answered() if answer["errors"]], "the trainer noticed"
            await asyncio.gather(run.proxy.kill(), *(replica.kill() for replica in run.replicas))
            await asyncio.gather(run.start_proxy(), *(replica.start() for replica in run.replicas))
            await run.driver.sync(4)
            await answers(run.driver, 4, IN_FLIGHT)
            await run.driver.stop()
            run.check()
            only_pauses(run)

    asyncio.run(main())


def test_a_killed_proxy_before_a_bucket_that_lags(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, 2, IN_FLIGHT, *PACE, versions=2) as run:
            run.moto.disturb(lag_s=2.5, rate=0.05)
            for version, phase in enumerate(("during publish", "between publish and load"), 3):
                await sync(run, version, phase, run.restart_proxy)
                await answers(run.driver, version, IN_FLIGHT)
                await run.until(run.serving(version, 2))
            await run.driver.stop()
            run.check()
            only_pauses(run)

    asyncio.run(main())


def test_two_hundred_rollouts_in_flight_and_the_proxy_killed_in_a_sync(tmp_path: Path) -> None:
    async def main() -> None:
        pace = ("--sim-load-s", "0.3", "--sim-decode-tokens-per-s", "8", "--max-num-seqs", "256")
        async with scene(tmp_path, 2, 200, *pace) as run:
            await run.until(lambda now: now["completions"]["in_flight"] == 200)
            await sync(run, 2, "between publish and load", run.restart_proxy)
            await answers(run.driver, 2, 200)
            await run.driver.stop()
            run.check()
            only_pauses(run)
            assert sum(bool(answer["errors"]) for answer in run.answered()) >= 150, "they were not in flight"

    asyncio.run(main())


def test_a_bucket_that_lags_throttles_and_goes_away_stalls_nobody(tmp_path: Path) -> None:
    """The time of its absence is shorter than a minute; nothing that is done about it knows the time."""

    async def main() -> None:
        async with scene(tmp_path, 2, IN_FLIGHT, *PACE) as run:
            run.moto.disturb(lag_s=2.5, rate=0.05)
            seconds = []
            for version in range(2, 10):
                seconds.append(await run.driver.sync(version, staleness=4))
                await asyncio.sleep(0.7)  # a step of the trainer's
            # Rollouts of a version that no replica has fetched yet can only wait for the bucket.
            await run.until(lambda now: any(9 in replica["adapters"] for replica in now["replicas"]))
            run.moto.refuse(seconds=5)
            before = len(run.answered())
            away = await run.driver.sync(10, staleness=4)
            assert away > 3 and len(run.answered()) > before + IN_FLIGHT, "rollouts go on while a publish waits"
            await answers(run.driver, 10, IN_FLIGHT)
            await run.driver.stop()
            now = await run.status()
            run.check()
            assert statistics.median(seconds) <= 0.3, seconds
            assert now["generation_stall_s"] == now["completions"]["lost"] == 0
            assert now["bucket_throttled"] > 0
            assert not [answer for answer in run.answered() if answer["errors"]], "the trainer noticed"

    asyncio.run(main())
