"""What an engine's answers mean, and engines that come, hang and go, on real sockets."""

import asyncio
import time
from pathlib import Path

import pytest

from jobs import fleet, links
from jobs.links import UNKNOWN_ERROR_TRIES, refusal_of
from tests.conftest import MotoBucket
from tests.fleets import run_of, until, wire


@pytest.mark.parametrize(
    ("status", "words", "lasting"),
    [
        (400, "LoRA rank 16 is greater than max_lora_rank 8.", True),
        (401, "This replica answers only with its run's key", True),
        (404, "Loading lora x failed: No adapter found for <path>", False),
        (404, "The model `x` does not exist.", False),
        (404, "Not Found", True),
        (408, "", False),
        (413, "too long", True),
        (429, "slow down", False),
        (502, "bad gateway", False),
        (503, "the bucket is away", False),
        (504, "", False),
        (500, "Call to add_lora method failed: LoRA rank 16 is greater than max_lora_rank 8.", True),
        (500, "Call to add_lora method failed: <path> doesn't contain tensors", True),
        (500, "Call to add_lora method failed: Error while deserializing header: header too small", True),
        (500, "out of slots", False),
    ],
)
def test_which_errors_pass(status: int, words: str, lasting: bool) -> None:
    refusal = refusal_of(status, words, tries=1)
    assert refusal.lasting is lasting
    assert words in str(refusal) or "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in str(refusal)


def test_an_unknown_error_is_tried_a_few_times() -> None:
    assert not refusal_of(500, "out of slots", UNKNOWN_ERROR_TRIES - 1).lasting
    assert refusal_of(500, "out of slots", UNKNOWN_ERROR_TRIES).lasting


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "POLL_S", 0.1)


def test_a_late_engine_is_backfilled_and_a_removed_one_drains(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ, sims=1) as run:
            proxy = await run.proxy()
            for version in (1, 2):
                await run.sync(proxy, version)
            late = await run.add_sim()
            urls = {sim.name: sim.url for sim in run.sims}
            assert (await proxy.call("POST", "/asyncgrpo/replicas", {"replicas": urls}))[0] == 200
            await proxy.until_served(1, "0", "1")
            assert [load["model"] for load in late.events("load")] == [wire(2), wire(1)]

            run.sims[0].fault("completion", delay_s=1.0, model=wire(1), count=50)
            asked = [asyncio.create_task(proxy.complete(1, prompt)) for prompt in range(20)]

            async def busy() -> bool:
                replicas = (await proxy.status())["replicas"]
                return sum(replica["in_flight"] for replica in replicas) > 0 and replicas[0]["in_flight"] > 0

            await until(busy)
            await proxy.call("POST", "/asyncgrpo/replicas", {"replicas": {"1": late.url}})
            assert (await proxy.states())["0"] == "draining"
            before = len(run.sims[0].events("completion"))
            assert {status for status, _ in await asyncio.gather(*asked)} == {200}

            async def gone() -> bool:
                return (await proxy.states())["0"] == "gone"

            await until(gone)
            await asyncio.gather(*(proxy.complete(1, prompt) for prompt in range(10)))
            assert len(run.sims[0].events("completion")) <= before + 20
            replica = (await proxy.status())["replicas"][0]
            assert (replica["deaths"], (await proxy.status())["completions"]["redispatched"]) == (0, 0)

    asyncio.run(main())


def test_a_replica_that_hangs_is_given_up_and_its_completions_go_elsewhere(
    tmp_path: Path, moto_bucket: MotoBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "POLL_TIMEOUT_S", 0.5)
    monkeypatch.setattr(fleet, "DEAD_AFTER_S", 0.5)

    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy()
            await run.sync(proxy, 1)
            hung = run.sims[1]
            hung.fault("completion", hang=True, count=100)
            asked = [asyncio.create_task(proxy.complete(1, prompt)) for prompt in range(10)]

            async def some_hang() -> bool:
                return any(r["name"] == "1" and r["in_flight"] for r in (await proxy.status())["replicas"])

            await until(some_hang)
            hung.freeze()
            assert {status for status, _ in await asyncio.gather(*asked)} == {200}
            replica = (await proxy.status())["replicas"][1]
            assert (replica["state"], replica["reason"]) == ("suspect", "no answer within 0.5 s")
            hung.engine.faults.clear()
            hung.thaw()
            await proxy.until_ready("1")
            assert (await proxy.status())["replicas"][1]["rejoins"] == 1

    asyncio.run(main())


def test_an_engine_that_comes_back_while_it_is_still_looked_at_is_used_again(
    tmp_path: Path, moto_bucket: MotoBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs, so a look at it takes its whole time; meanwhile it leaves the set and is named again."""
    monkeypatch.setattr(links, "POLL_TIMEOUT_S", 600.0)
    monkeypatch.setattr(fleet, "DEAD_AFTER_S", 600.0)

    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy()
            await run.sync(proxy, 1)
            urls = {sim.name: sim.url for sim in run.sims}
            run.sims[1].freeze()
            await run.sims[1].asked()
            assert (await proxy.call("POST", "/asyncgrpo/replicas", {"replicas": {"0": urls["0"]}}))[0] == 200

            async def gone() -> bool:
                return (await proxy.states())["1"] == "gone"

            await until(gone)
            assert (await proxy.call("POST", "/asyncgrpo/replicas", {"replicas": urls}))[0] == 200
            run.sims[1].thaw()
            await proxy.until_served(1, "0", "1")

    asyncio.run(main())


def test_an_engine_that_fails_every_completion_attracts_none(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy()
            await run.sync(proxy, 1)
            run.sims[1].fault("completion", status=500, message="CUDA error", count=10**6)
            deadline = time.monotonic() + 2
            asked = 0
            while time.monotonic() < deadline:
                assert {status for status, _ in await asyncio.gather(*(proxy.complete(1, n) for n in range(8)))} == {
                    200
                }
                asked += 8
            failed = [e for e in run.sims[1].events("completion", wire(1)) if e.get("status") == 500]
            assert len(failed) <= 8, f"{len(failed)} of {asked} completions were sent to it"
            replica = (await proxy.status())["replicas"][1]
            assert (replica["state"], replica["reason"]) == ("suspect", "CUDA error")

    asyncio.run(main())


def test_a_version_lost_by_an_engine_is_loaded_again(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy()
            await run.sync(proxy, 1)
            for sim in run.sims:
                sim.engine.adapters.clear()
            assert {(await proxy.complete(1, n))[0] for n in range(4)} == {200}
            await until(lambda: all(len(sim.events("load", wire(1))) == 2 for sim in run.sims))

    asyncio.run(main())
