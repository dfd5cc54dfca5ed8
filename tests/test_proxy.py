"""The assembled proxy: restarts, proxies before proxies, settings."""

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jobs import links
from jobs import recipe as recipes
from jobs.bucket import Bucket
from jobs.bundle import app_dir
from jobs.dispatch import Limits
from jobs.errors import ConfigError
from jobs.http import KEY_HEADER
from jobs.proxy import ProxySettings, _limits, listen
from jobs.recipe import Proxy
from jobs.spec import ModelRef, RunSpec, spec_key
from tests.conftest import MotoBucket
from tests.engines import KEY
from tests.fleets import ATTEMPT, RUN, RunningProxy, TestRun, run_of, until, wire


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "POLL_S", 0.1)


def test_a_restarted_proxy_knows_what_was_live_retired_and_failed(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            first = await run.proxy(ack="all")
            for version in (1, 2, 3):
                await run.sync(first, version)
            await first.unload(1)
            run.sims[0].fault("load", status=400, message="I do not like it.")
            assert (await first.load(4, run.adapter(4)))[0] == 500
            await first.stop()

            again = await run.proxy(ack="all")
            await again.until_served(3, "0", "1")
            assert await again.versions() == {1: "retired", 2: "live", 3: "live", 4: "failed"}
            assert [len(sim.events("load", wire(3))) for sim in run.sims] == [1, 1], "what survived was loaded again"
            assert await again.load(3, run.adapter(3)) == (
                200,
                "Success: LoRA adapter 'trl-policy-v3' added successfully.",
            )
            assert (await again.complete(1))[0] == 200, "a retired version is revived"
            assert (await again.load(3, run.adapter(3, seed=77)))[0] == 400
            assert (await again.load(5, run.adapter(5)))[0] == 200

    asyncio.run(main())


PROGRAM = """
import os
from jobs import links, proxy
links.POLL_S = 0.1
fd = int(os.environ["FD"])
urls = os.environ["URLS"].split()
proxy.run(proxy.ProxySettings.from_env(os.environ, urls, fd=fd))
"""


class Supervisor:
    """Holds the listening socket and starts the proxy on it, again and again."""

    def __init__(self, run: TestRun) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://{}:{}".format(*self.listener.getsockname())
        self._environ = {
            **os.environ,
            **run.bucket,
            "PYTHONPATH": str(app_dir()),
            "ASYNCGRPO_RUN": RUN,
            "ASYNCGRPO_ATTEMPT": str(ATTEMPT),
            "ASYNCGRPO_KEY": KEY,
            "ASYNCGRPO_OUTPUT_DIR": str(run.output),
            "ASYNCGRPO_PARENT": str(os.getpid()),
            "FD": str(self.listener.fileno()),
            "URLS": " ".join(sim.url for sim in run.sims),
        }

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", PROGRAM]
        return subprocess.Popen(command, env=self._environ, pass_fds=[self.listener.fileno()])


def test_a_proxy_killed_in_the_middle_of_a_sync_answers_the_repeated_load(
    tmp_path: Path, moto_bucket: MotoBucket
) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            supervisor = Supervisor(run)
            client = RunningProxy.__new__(RunningProxy)
            client.session, client.url = run.session, supervisor.url
            child = supervisor.start()
            try:
                await client.until_ready("r0", "r1")
                assert (await client.load(1, run.adapter(1)))[0] == 200
                await client.until_served(1, "r0", "r1")
                for sim in run.sims:
                    sim.fault("load", delay_s=1.0, model=wire(2))
                assert (await client.load(2, run.adapter(2)))[0] == 200
                waiting = asyncio.create_task(_persistent(client, 2))
                await until(lambda: client_parked(client))
                child.kill()
                child.wait()
                child = supervisor.start()
                words = "Success: LoRA adapter 'trl-policy-v2' added successfully."
                assert await client.load(2, run.adapter(2)) == (200, words)
                assert await waiting == 200
                assert (await client.complete(1))[0] == 200
                await client.until_served(2, "r0", "r1")
                assert all(list(sim.engine.adapters) == [wire(1), wire(2)] for sim in run.sims)
                child.send_signal(signal.SIGTERM)
                assert child.wait(10) == 0
            finally:
                child.kill()
                child.wait()
                supervisor.listener.close()

    asyncio.run(main())


async def client_parked(client: Any) -> bool:
    return bool((await client.status())["completions"]["parked"])


async def _persistent(client: Any, version: int) -> int:
    """Asks again after a reset, as TRL does."""
    import aiohttp

    while True:
        try:
            status: int = (await client.complete(version))[0]
            return status
        except aiohttp.ClientError:
            await asyncio.sleep(0.05)


def test_a_proxy_may_stand_before_another(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            settings = run.settings(ack="all")
            hop = await run.proxy(dataclasses.replace(settings, attempt=0, output_dir=None))
            front = await run.proxy(dataclasses.replace(run.settings(ack="all"), replicas={"hop": hop.url}))
            assert (await front.load(1, run.adapter(1)))[0] == 200
            assert [list(sim.engine.adapters) for sim in run.sims] == [[wire(1)], [wire(1)]]
            status, answer = await front.complete(1)
            assert (status, answer["model"]) == (200, "trl-policy-v1")
            assert (await hop.status())["versions"][0]["wire"] == wire(1)
            assert (await hop.status())["adapters_published"] == 0
            await front.unload(1)
            await until(lambda: not any(sim.engine.adapters for sim in run.sims))
            status, words = await hop.load(1, run.adapter(1))
            assert (status, words[:46]) == (400, "output_dir is not set: this proxy publishes no")

    asyncio.run(main())


def test_a_bucket_that_refuses_fails_the_load_with_a_reason(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ, sims=1) as run:
            bucket = Bucket.from_env({**moto_bucket.environ, "ASYNCGRPO_BUCKET": "s3://no-such-bucket"}, retry_s=1)
            settings = run.settings()
            proxy = await run.proxy(settings)
            settings.bucket.__dict__.update(bucket.__dict__)
            status, words = await proxy.load(1, run.adapter(1))
            assert status == 503
            assert "NoSuchBucket" in words
            assert await proxy.versions() == {1: "failed"}
            assert not run.sims[0].events("load")

    asyncio.run(main())


def test_a_bucket_that_is_away_only_delays_the_sync(tmp_path: Path, moto_bucket: MotoBucket, free_port: int) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ, sims=1) as run:
            settings = run.settings()
            proxy = await run.proxy(settings)
            there = settings.bucket.__dict__.copy()
            away = {**moto_bucket.environ, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port}"}
            settings.bucket.__dict__.update(Bucket.from_env(away, retry_s=20).__dict__)
            loading = asyncio.create_task(proxy.load(1, run.adapter(1)))
            await until(lambda: _published(proxy))
            settings.bucket.__dict__.update(there)
            assert (await loading)[0] == 200

    asyncio.run(main())


async def _published(proxy: RunningProxy) -> bool:
    return await proxy.versions() == {1: "publishing"}


def test_what_others_can_reach_needs_the_key(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ, sims=1) as run:
            settings = dataclasses.replace(run.settings(), host="0.0.0.0")
            listener = listen(settings)
            port = listener.getsockname()[1]
            proxy = RunningProxy(settings, listener, run.session)
            proxy.url = f"http://127.0.0.1:{port}"
            run.proxies.append(proxy)
            opened = {KEY_HEADER: KEY}
            await until(lambda: _ok(proxy, "/health", opened))
            for path in ("/health", "/asyncgrpo/status", "/v1/models", "/anything"):
                assert (await proxy.call("GET", path))[0] == 401
                assert (await proxy.call("GET", path, headers={KEY_HEADER: "0" * 64}))[0] == 401
            assert (await proxy.call("POST", "/v1/completions", {"model": "tiny"}))[0] == 401

    asyncio.run(main())


async def _ok(proxy: RunningProxy, path: str, headers: dict[str, str]) -> bool:
    return (await proxy.call("GET", path, headers=headers))[0] == 200


def test_any_other_path_is_one_engine_s(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy()
            assert await proxy.get("/version") == {"version": "0.31.0"}

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/completion", "/v1/completions/"])
def test_a_path_that_engines_lack_is_no_engines_fault(tmp_path: Path, moto_bucket: MotoBucket, path: str) -> None:
    """Their 404 is the answer, and so is a redirect, which leads back to the proxy."""

    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy()
            status, answer = await proxy.call("POST", path, {"model": "tiny", "prompt": "x"})
            assert (status, answer.get("detail")) == ((200, None) if path.endswith("/") else (404, "Not Found"))
            assert set((await proxy.states()).values()) == {"ready"}
            replicas = (await proxy.status())["replicas"]
            assert [replica["reason"] for replica in replicas] == [None, None]

    asyncio.run(main())


def environ(bucket: MotoBucket, **values: str) -> dict[str, str]:
    return {**bucket.environ, "ASYNCGRPO_RUN": RUN, "ASYNCGRPO_KEY": KEY, **values}


def test_settings_without_a_specification(moto_bucket: MotoBucket, tmp_path: Path) -> None:
    values = {"ASYNCGRPO_ATTEMPT": "3", "ASYNCGRPO_OUTPUT_DIR": str(tmp_path), "HF_TOKEN": "hf_secret"}
    settings = ProxySettings.from_env(environ(moto_bucket, **values), ["http://a:1", "http://b:2/"])
    assert (settings.attempt, settings.output_dir, settings.host) == (3, tmp_path, "127.0.0.1")
    assert settings.replicas == {"r0": "http://a:1", "r1": "http://b:2/"}
    assert settings.headers == {KEY_HEADER: KEY, "authorization": "Bearer hf_secret"}
    assert settings.bucket.retry_s == Proxy().publish_deadline_s / 2
    assert KEY not in repr(settings)
    assert "hf_secret" not in repr(settings)


def test_in_a_network_group_the_token_goes_nowhere(moto_bucket: MotoBucket) -> None:
    values = environ(moto_bucket, HF_TOKEN="hf_secret", HF_NETWORK_GROUP_PREFIX="g-")
    bucket = Bucket.from_env(moto_bucket.environ)
    for network, opens in (("exposed", {KEY_HEADER, "authorization"}), ("group", {KEY_HEADER})):
        recipe = recipes.load("digit", None, [f"jobs.network={network}"])
        bucket.put(spec_key(RUN), RunSpec(RUN, recipe, ModelRef("path", "/m", "m")).to_json())
        settings = ProxySettings.from_env(values)
        assert set(settings.headers) == opens and settings.group_prefix == "g-"


@pytest.mark.parametrize("name", ["ASYNCGRPO_RUN", "ASYNCGRPO_KEY"])
def test_settings_name_what_is_missing(moto_bucket: MotoBucket, name: str) -> None:
    values = environ(moto_bucket)
    del values[name]
    with pytest.raises(ConfigError, match=f"{name} is not set"):
        ProxySettings.from_env(values)


def test_a_port_that_is_taken_is_named(moto_bucket: MotoBucket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = ProxySettings.from_env(environ(moto_bucket), port=port)
        with pytest.raises(ConfigError, match=f"--port {port}: cannot listen there"):
            listen(settings)


def test_a_sync_takes_no_longer_than_its_objects(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    """What the trainer waits for: two files at once and a manifest. Stated in the reference: 6.2 to 8.5 s."""

    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ, load_s=0.5) as run:
            proxy = await run.proxy()
            seconds = []
            for version in range(1, 6):
                path = run.adapter(version)
                started = time.monotonic()
                assert (await proxy.load(version, path))[0] == 200
                seconds.append(time.monotonic() - started)
            assert sorted(seconds)[2] < 0.5, seconds

    asyncio.run(main())


def test_what_a_recipe_leaves_out_is_what_the_completions_assume() -> None:
    assert _limits(Proxy()) == Limits()
    assert _limits(Proxy(max_batch=3, max_body_bytes=5)) == Limits(max_batch=3, max_body_bytes=5)
