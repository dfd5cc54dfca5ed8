"""What TRL sees, with several simulated engines on real sockets. The cases A.. are public bug reports."""

import asyncio
import dataclasses
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs import control, links
from jobs.bucket import Bucket
from jobs.engine import Facts
from jobs.recipe import Ack
from tests.conftest import MotoBucket
from tests.fleets import SETTINGS, run_of, until, wire


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "POLL_S", 0.1)


def test_the_whole_sync(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy()
            assert await proxy.call("POST", "/pause?mode=keep") == (200, {"status": "paused"})
            words = "Success: LoRA adapter 'trl-policy-v1' added successfully."
            assert await proxy.load(1, run.adapter(1, scale=0.0)) == (200, words)
            assert await proxy.call("POST", "/resume") == (200, {"status": "resumed"})
            status, answer = await proxy.complete(1)
            assert (status, answer["model"]) == (200, "trl-policy-v1")
            assert len(answer["choices"][0]["token_ids"]) == 8
            await proxy.until_served(1, "0", "1")
            assert all(not sim.events("pause") and not sim.events("resume") for sim in run.sims)
            words = "Success: LoRA adapter 'trl-policy-v1' removed successfully."
            assert await proxy.unload(1) == (200, words)
            await until(lambda: not any(sim.engine.adapters for sim in run.sims))
            status, answer = await proxy.unload(1)
            assert (status, answer["error"]["message"]) == (404, "The lora adapter 'trl-policy-v1' cannot be found.")
            now = await proxy.status()
            assert (now["generation_stall_s"], now["fatal"], now["adapters_published"]) == (0, None, 1)
            assert now["versions"][0]["zero"]

    asyncio.run(main())


def test_a01_a_name_has_one_digest_over_twelve_syncs(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy()
            for version in range(1, 13):
                await run.sync(proxy, version)
                if version > 5:
                    await proxy.unload(version - 5)
            seen: dict[str, set[str]] = {}
            for sim in run.sims:
                loads = sim.events("load")
                assert [load["model"] for load in loads] == [wire(version) for version in range(1, 13)]
                for load in loads:
                    seen.setdefault(load["model"], set()).add(load["digest"])
            assert len(set.union(*seen.values())) == 12
            assert all(len(digests) == 1 for digests in seen.values())

            run.adapter(12, seed=99)
            path = run.output / ".vllm_lora" / "trl-policy-v12"
            status, words = await proxy.load(12, path, load_inplace=True)
            assert (status, words[:21]) == (400, "load_inplace = true: ")
            status, words = await proxy.load(12, path)
            assert status == 400
            assert "stands for the adapter with digest" in words
            assert all(len(sim.events("load")) == 12 for sim in run.sims)

    asyncio.run(main())


@pytest.mark.parametrize("ack", ["published", "first", "all"])
def test_a03_simultaneous_loads_are_one(tmp_path: Path, moto_bucket: MotoBucket, ack: Ack) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ, load_s=0.3) as run:
            proxy = await run.proxy(ack=ack)
            path = run.adapter(5)
            answers = await asyncio.gather(*(proxy.load(5, path) for _ in range(20)))
            assert set(answers) == {(200, "Success: LoRA adapter 'trl-policy-v5' added successfully.")}
            await proxy.until_served(5, "0", "1")
            assert [len(sim.events("load")) for sim in run.sims] == [1, 1]

            mixed: list[Any] = [proxy.load(5, path) if n % 2 else proxy.unload(5) for n in range(20)]
            for status, _ in await asyncio.gather(*mixed):
                assert status in (200, 404)
            assert await proxy.load(5, path) == (200, "Success: LoRA adapter 'trl-policy-v5' added successfully.")
            await proxy.until_served(5, "0", "1")
            digests = [{name: a.digest for name, a in sim.engine.adapters.items()} for sim in run.sims]
            assert digests[0] == digests[1]
            assert list(digests[0]) == [wire(5)]

    asyncio.run(main())


def _without_config(path: Path) -> None:
    (path / "adapter_config.json").unlink()


def _not_json(path: Path) -> None:
    (path / "adapter_config.json").write_text("{r: 8")


def _rank_16(path: Path) -> None:
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"r": 16}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_without_config, "adapter_config.json cannot be read"),
        (_not_json, "is not a JSON object"),
        (_rank_16, "LoRA rank 16 is greater than max_lora_rank 8"),
    ],
)
def test_a04_a_bad_adapter_reaches_no_engine(tmp_path: Path, moto_bucket: MotoBucket, spoil: Any, words: str) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy()
            path = run.adapter(2)
            spoil(path)
            status, message = await proxy.load(2, path)
            assert status == 400
            assert words in message
            assert not any(sim.events("load") for sim in run.sims)

    asyncio.run(main())


def test_a04_a_refusal_is_quoted_and_rolled_back_at_once(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy(ack="all")
            await run.sync(proxy, 1)
            run.sims[1].fault("load", status=400, message="I do not like it.", count=99)
            started = time.monotonic()
            status, words = await proxy.load(2, run.adapter(2))
            assert (status, words) == (500, "Loading lora trl-policy-v2 failed: replica 1: I do not like it.")
            assert time.monotonic() - started < 10
            await until(lambda: all(list(sim.engine.adapters) == [wire(1)] for sim in run.sims))
            assert len(run.sims[1].events("load", wire(2))) == 1, "a permanent error was tried again"
            await proxy.until_served(1, "0", "1")
            assert (await proxy.complete(1))[0] == 200
            assert (await proxy.complete(2))[0] == 503
            assert await proxy.versions() == {1: "live", 2: "failed"}

    asyncio.run(main())


NOT_FOUND = f"Loading lora {wire(1)} failed: No adapter found for <path>"


def test_a05_only_the_replica_that_lags_is_asked_again(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy(ack="all")
            run.sims[1].fault("load", status=404, message=NOT_FOUND, count=3)
            assert (await proxy.load(1, run.adapter(1)))[0] == 200
            replicas = (await proxy.status())["replicas"]
            assert [replica["load_attempts"] for replica in replicas] == [{"1": 1}, {"1": 4}]
            assert len(run.sims[0].events("load")) == 1

    asyncio.run(main())


def test_a05_one_that_lags_for_ever_fails_the_load_at_the_deadline(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy(ack="all", load_deadline_s=2)
            run.sims[1].fault("load", status=404, message=NOT_FOUND, count=10**6)
            status, words = await proxy.load(1, run.adapter(1))
            assert status == 500
            assert words.startswith("Loading lora trl-policy-v1 failed: not loaded within 2 s: replica 1 (")
            assert words.endswith(f"tries): {NOT_FOUND}")
            await until(lambda: not any(sim.engine.adapters for sim in run.sims))
            assert len(run.sims[0].events("load")) == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"hang": True}, "no answer"),
        ({"status": 500, "message": "out of slots"}, "out of slots"),
        ({"close": "after headers"}, "received 0 of 21 bytes"),
        ({"close": "at once"}, "disconnected"),
    ],
)
def test_a15_a_failed_sync_says_why_in_time(
    tmp_path: Path, moto_bucket: MotoBucket, fault: dict[str, Any], words: str
) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy(ack="all", load_deadline_s=2)
            run.sims[1].fault("load", count=10**6, **fault)
            started = time.monotonic()
            status, message = await proxy.load(1, run.adapter(1))
            assert time.monotonic() - started < 10
            assert status == 500
            assert "replica 1" in message
            assert words in message.lower()
            assert "replica 0" not in message
            await until(lambda: not run.sims[0].engine.adapters)
            assert not any(sim.engine.paused for sim in run.sims)
            assert await proxy.states() == {"0": "ready", "1": "ready"}

    asyncio.run(main())


def test_a10_a_dead_replica_gets_nothing_and_is_backfilled_first(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy()
            for version in (1, 2):
                await run.sync(proxy, version)
            for prompt in range(20):
                assert (await proxy.complete(2, prompt))[0] == 200
            dead = run.sims[1]
            await dead.kill()
            died = time.monotonic()
            assert (await proxy.complete(2, 1))[0] == 200
            assert time.monotonic() - died < 1, "the next completion came late"
            answers = await asyncio.gather(*(proxy.complete(2, prompt) for prompt in range(100)))
            assert {status for status, _ in answers} == {200}
            assert (await proxy.get("/health"))["status"] == "degraded"

            before = len(dead.history)
            await dead.start()
            await proxy.until_served(2, "0", "1")
            back = dead.history[before:]
            first = next((n for n, e in enumerate(back) if e.get("seed") is not None), len(back))
            loaded = [e["model"] for e in back[:first] if e["event"] == "load"]
            assert loaded == [wire(2), wire(1)], "newest first, and all before any completion"
            replica = (await proxy.status())["replicas"][1]
            assert (replica["deaths"], replica["rejoins"]) == (1, 1)
            answers = await asyncio.gather(*(proxy.complete(2, prompt) for prompt in range(100)))
            assert {status for status, _ in answers} == {200}
            assert any(e.get("seed") is not None for e in dead.history[before + first :]), "it gets completions again"
            assert (await proxy.status())["completions"]["lost"] == 0

    asyncio.run(main())


def test_a_load_that_takes_seconds_stalls_nobody(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy()
            await run.sync(proxy, 1)
            for sim in run.sims:
                sim.fault("load", delay_s=1.5)
            started = time.monotonic()
            assert (await proxy.load(2, run.adapter(2)))[0] == 200
            acknowledged = time.monotonic() - started
            waiting = asyncio.create_task(proxy.complete(2))
            for prompt in range(10):
                assert (await proxy.complete(1, prompt))[0] == 200
            assert await proxy.states() == {"0": "ready", "1": "ready"}
            assert (await waiting)[0] == 200
            assert time.monotonic() - started > 1.5
            assert acknowledged < 1
            now = await proxy.status()
            assert (now["completions"]["parked_total"], now["generation_stall_s"]) == (1, 0)

    asyncio.run(main())


def test_health_is_503_until_it_is_known_what_is_served_and_200_ever_after(
    tmp_path: Path, moto_bucket: MotoBucket
) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ, sims=1) as run:
            await run.sims[0].kill()
            settings = run.settings()
            proxy = await run.proxy(dataclasses.replace(settings, replicas={}))
            status, body = await proxy.call("GET", "/health")
            assert (status, body["status"]) == (503, "starting")
            await proxy.call("POST", "/asyncgrpo/replicas", {"replicas": settings.replicas})
            assert (await proxy.call("GET", "/server_info"))[0] == 503
            await run.sims[0].start()
            await proxy.until_ready("0")
            assert (await proxy.call("GET", "/health"))[1]["status"] == "ok"
            await run.sims[0].kill()
            await until(lambda: _is(proxy.states(), {"0": "suspect"}))
            status, body = await proxy.call("GET", "/health")
            assert (status, body["status"]) == (200, "parking")
            waiting = asyncio.create_task(proxy.complete(None))
            await until(lambda: _parked(proxy, 1))
            await run.sims[0].start()
            assert (await waiting)[0] == 200

    asyncio.run(main())


def test_what_the_recipe_promises_is_told_before_any_engine_is_there(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ, sims=2) as run:
            await run.sims[0].kill()
            await run.sims[1].kill()
            promised = Facts("tiny", "torch.float32", 256, 6, 8)
            settings = run.settings()
            proxy = await run.proxy(replace(settings, replicas={}, promise=promised))
            status, body = await proxy.call("GET", "/health")
            assert (status, body["status"]) == (200, "starting")
            config = (await proxy.call("GET", "/server_info?config_format=json"))[1]["vllm_config"]
            assert config["lora_config"] == {"max_loras": 6, "max_lora_rank": 8}
            assert (await proxy.call("GET", "/v1/models"))[1]["data"][0]["max_model_len"] == 256
            assert (await proxy.load(1, run.adapter(1)))[0] == 200
            waiting = asyncio.create_task(proxy.complete(1))
            await until(lambda: _parked(proxy, 1))
            run.sims[0].settings = replace(SETTINGS, max_model_len=128)
            await run.sims[0].start()
            await run.sims[1].start()
            await proxy.call("POST", "/asyncgrpo/replicas", {"replicas": settings.replicas})
            assert (await waiting)[0] == 200
            await until(lambda: _is(proxy.states(), {"0": "suspect", "1": "ready"}))
            states = {each["name"]: each for each in (await proxy.status())["replicas"]}
            assert "its max_model_len is 128 and the trainer was told 256" in states["0"]["reason"]
            assert states["1"]["state"] == "ready"

    asyncio.run(main())


async def _is(found: Any, expected: Any) -> bool:
    return bool(await found == expected)


async def _parked(proxy: Any, count: int) -> bool:
    return bool((await proxy.status())["completions"]["parked"] == count)


def test_a_sync_before_the_first_engine_is_served_when_it_comes(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ, sims=1) as run:
            await run.sims[0].kill()
            promise = Facts("tiny", "torch.float32", 256, 6, 8)
            settings = dataclasses.replace(run.settings(), replicas={}, promise=promise)
            proxy = await run.proxy(settings)
            assert (await proxy.call("GET", "/health"))[0] == 200
            info = (await proxy.get("/server_info?config_format=json"))["vllm_config"]
            assert info["lora_config"] == {"max_loras": 6, "max_lora_rank": 8}
            assert (await proxy.load(1, run.adapter(1)))[0] == 200
            waiting = [asyncio.create_task(proxy.complete(1, prompt)) for prompt in range(5)]
            await until(lambda: _parked(proxy, 5))
            await run.sims[0].start()
            await proxy.call("POST", "/asyncgrpo/replicas", {"replicas": {"0": run.sims[0].url}})
            assert {status for status, _ in await asyncio.gather(*waiting)} == {200}

    asyncio.run(main())


def test_a_load_that_no_engine_ever_takes_is_answered_before_trl_gives_up(
    tmp_path: Path, moto_bucket: MotoBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert control.SYNC_DEADLINE_S < 1800
    monkeypatch.setattr(control, "SYNC_DEADLINE_S", 0.5)

    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ, sims=1) as run:
            proxy = await run.proxy(ack="first")
            await run.sims[0].kill()
            await until(lambda: _is(proxy.states(), {"0": "suspect"}))
            status, words = await proxy.load(1, run.adapter(1))
            assert status == 504
            start = (
                "Loading lora trl-policy-v1 took longer than 0.5 s: no replica is ready (replica 0 is suspect: Client"
            )
            assert words.startswith(start)
            assert await proxy.versions() == {1: "failed"}

    asyncio.run(main())


def test_the_server_is_the_smallest_of_its_engines(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ, sims=1) as run:
            await run.add_sim(max_model_len=128, max_loras=4)
            proxy = await run.proxy()
            info = (await proxy.get("/server_info?config_format=json"))["vllm_config"]
            assert info["lora_config"] == {"max_loras": 4, "max_lora_rank": 8}
            assert info["parallel_config"] == {"data_parallel_size": 1}
            assert info["model_config"]["dtype"] == "torch.float32"
            await run.sync(proxy, 1)
            cards = (await proxy.get("/v1/models"))["data"]
            assert [(card["id"], card["parent"], card["max_model_len"]) for card in cards] == [
                ("tiny", None, 128),
                ("trl-policy-v1", "tiny", None),
            ]
            other = await run.add_sim(dtype="bfloat16")
            less = await run.add_sim(max_loras=2)
            urls = {sim.name: sim.url for sim in run.sims}
            await proxy.call("POST", "/asyncgrpo/replicas", {"replicas": urls})
            await until(lambda: _is(proxy.states(), {"0": "ready", "1": "ready", "2": "suspect", "3": "suspect"}))
            reasons = [replica["reason"] for replica in (await proxy.status())["replicas"][2:]]
            assert reasons[0].startswith("its dtype is 'torch.bfloat16' and the run's is 'torch.float32'")
            assert reasons[1].startswith("its max_loras is 2 and the trainer was told 4")
            assert not other.events("completion") and not less.events("completion")

    asyncio.run(main())


def test_slots_are_never_overfilled(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ, sims=1, max_loras=2) as run:
            proxy = await run.proxy()
            for version in (1, 2):
                await run.sync(proxy, version)
            status, words = await proxy.load(3, run.adapter(3))
            assert status == 400
            assert words.startswith("max_loras = 2: every adapter slot is taken by a live version")
            await proxy.unload(1)
            await run.sync(proxy, 3)
            assert list(run.sims[0].engine.adapters) == [wire(2), wire(3)]

    asyncio.run(main())


def test_an_unload_waits_for_completions_in_flight(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ, sims=1) as run:
            proxy = await run.proxy()
            await run.sync(proxy, 1)
            run.sims[0].fault("completion", delay_s=1.0, model=wire(1))
            asked = asyncio.create_task(proxy.complete(1))
            await until(lambda: _in_flight(proxy))
            assert (await proxy.unload(1))[0] == 200
            assert await proxy.versions() == {1: "retiring"}
            assert (await asked)[0] == 200
            await until(lambda: _is(proxy.versions(), {1: "retired"}))
            order = [e["event"] for e in run.sims[0].history if e["event"] in ("completion", "unload")]
            assert order[-2:] == ["completion", "unload"]

    asyncio.run(main())


async def _in_flight(proxy: Any) -> bool:
    return bool((await proxy.status())["completions"]["in_flight"])


def test_a_retired_version_still_asked_for_is_revived(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy()
            await run.sync(proxy, 1)
            await proxy.unload(1)
            await until(lambda: _is(proxy.versions(), {1: "retired"}))
            assert (await proxy.complete(1))[0] == 200
            await until(lambda: not any(sim.engine.adapters for sim in run.sims))
            status, answer = await proxy.complete(7)
            assert (status, answer["error"]["message"]) == (404, "The model `trl-policy-v7` does not exist.")

    asyncio.run(main())


def test_an_engine_that_serves_the_base_under_every_name_is_found_at_the_first_sync_that_can_show_it(
    tmp_path: Path, moto_bucket: MotoBucket
) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy()
            run.sims[1].fault("completion", base=True, count=10**6)
            assert (await proxy.load(1, run.adapter(1, scale=0.0)))[0] == 200
            await proxy.until_served(1, "0", "1")
            assert {(await proxy.complete(1, prompt))[0] for prompt in range(10)} == {200}
            assert (await proxy.load(2, run.adapter(2)))[0] == 200
            answers = await asyncio.gather(*(proxy.complete(2, prompt) for prompt in range(20)))
            assert {status for status, _ in answers} == {200}
            await until(lambda: _is(proxy.states(), {"0": "ready", "1": "suspect"}))
            reason = (await proxy.status())["replicas"][1]["reason"]
            assert reason.startswith(f"cannot serve {wire(2)}: the canary is the base model's, bit for bit")
            for version in (3, 4):
                assert (await proxy.load(version, run.adapter(version)))[0] == 200
                assert {(await proxy.complete(version, prompt))[0] for prompt in range(10)} == {200}
            used = [e["model"] for e in run.sims[1].events("completion") if e["seed"] is not None]
            assert set(used) <= {wire(1)}, "it was used for what it does not serve"
            now = await proxy.status()
            assert (now["fatal"], now["completions"]["lost"]) == (None, 0)

    asyncio.run(main())


def test_a_single_engine_that_serves_the_base_ends_the_run_and_answers_nothing(
    tmp_path: Path, moto_bucket: MotoBucket
) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ, sims=1) as run:
            proxy = await run.proxy()
            run.sims[0].fault("completion", base=True, count=10**6)
            assert (await proxy.load(1, run.adapter(1, scale=0.0)))[0] == 200
            assert (await proxy.complete(1))[0] == 200
            assert (await proxy.status())["fatal"] is None, "a zero adapter is the base"
            assert (await proxy.load(2, run.adapter(2)))[0] == 200
            status, answer = await proxy.complete(2)
            assert status == 503
            words = f"no replica can serve {wire(2)}: replica 0: the canary is the base model's, bit for bit"
            assert answer["error"]["message"].startswith(words)
            assert (await proxy.status())["fatal"].startswith(words)
            assert not [e for e in run.sims[0].events("completion", wire(2)) if e["seed"] is not None]

    asyncio.run(main())


def test_what_no_replica_can_serve_is_fatal_in_their_words(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy()
            for sim in run.sims:
                sim.fault("load", status=400, message=f"no room on {sim.name}", count=99)
            assert (await proxy.load(1, run.adapter(1)))[0] == 200, "it was durable and valid"
            status, answer = await proxy.complete(1)
            assert status == 503
            words = f"no replica can serve {wire(1)}: replica 0: no room on 0; replica 1: no room on 1"
            assert answer["error"]["message"] == words
            assert (await proxy.status())["fatal"] == words

    asyncio.run(main())


@pytest.mark.parametrize("where", ["outside", "link", "file link"])
def test_only_what_the_trainer_saved_is_published(tmp_path: Path, moto_bucket: MotoBucket, where: str) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ, sims=1) as run:
            proxy = await run.proxy()
            inside = run.adapter(1)
            outside = tmp_path / "outside"
            shutil.copytree(inside, outside)
            path = outside
            if where == "link":
                path = run.output / "link"
                path.symlink_to(outside)
            elif where == "file link":
                path = inside
                (path / "adapter_config.json").unlink()
                (path / "adapter_config.json").symlink_to(outside / "adapter_config.json")
            status, words = await proxy.load(1, path)
            assert status == 400
            assert "is not below the output directory" in words
            assert Bucket.from_env(moto_bucket.environ).list("") == []

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "tiny", "lora_path": "/x"}, "The lora adapter 'tiny' conflicts with a served base model."),
        ({"lora_name": "mine", "lora_path": "/x"}, "lora_name = 'mine': expected 'trl-policy-v1' ..."),
        ({"lora_name": "run.1.v1", "lora_path": "manifest:runs/run/spec.json"}, "is not where the manifest of"),
        ({"lora_name": "trl-policy-v1", "lora_path": "/nowhere"}, "is not below the output directory"),
    ],
)
def test_a_load_that_cannot_be_is_never_404(
    tmp_path: Path, moto_bucket: MotoBucket, body: dict[str, str], words: str
) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ, sims=1) as run:
            proxy = await run.proxy()
            status, answer = await proxy.call("POST", "/v1/load_lora_adapter", body)
            assert status == 400
            assert words in answer["error"]["message"]

    asyncio.run(main())
