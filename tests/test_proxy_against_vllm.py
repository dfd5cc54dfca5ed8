"""The proxy in front of a real vLLM on the CPU: proof, sync, revival and the words of errors, end to end."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jobs import links, proof
from jobs.manifest import build as describe
from jobs.names import WireName
from jobs.tiny import build
from tests.conftest import MotoBucket
from tests.engines import engine_environ, running, vllm_command
from tests.fleets import ATTEMPT, RUN, run_of, until, wire

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_engine_proves_what_it_serves(
    tmp_path: Path, moto_bucket: MotoBucket, free_port: int, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(links, "POLL_S", 0.1)
    flags = ("--middleware", "jobs.middleware.ReplicaMiddleware", "--dtype", dtype)
    command = vllm_command(free_port, str(build("digit")), *flags)
    environ = engine_environ(tmp_path / "adapters", moto_bucket.environ)
    with running(command, environ, free_port, tmp_path / "vllm.log") as engine:

        async def main() -> None:
            async with run_of(tmp_path, moto_bucket.environ, sims=0) as run:
                settings = dataclasses.replace(run.settings(ack="all"), replicas={"0": engine.url})
                proxy = await run.proxy(settings)
                info = (await proxy.get("/server_info?config_format=json"))["vllm_config"]
                assert info["model_config"] == {"model": "tiny", "max_model_len": 256, "dtype": f"torch.{dtype}"}
                assert info["lora_config"] == {"max_loras": 6, "max_lora_rank": 8}

                # v1 is zero, as TRL's first is; v2 a first step that may not show; v3 one that must.
                for version, scale in ((1, 0.0), (2, 1e-6), (3, 1e-2)):
                    assert (await proxy.load(version, run.adapter(version, scale=scale)))[0] == 200
                    status, answer = await proxy.complete(version)
                    assert (status, answer["model"]) == (200, f"trl-policy-v{version}")
                assert await proxy.versions() == {1: "live", 2: "live", 3: "live"}

                async def canary(model: str) -> proof.Answer:
                    status, body = await proxy.call("POST", "/v1/completions", proof.request(model))
                    assert status == 200
                    return proof.parse(body)

                base = await canary("tiny")
                strength = describe(run.adapter(3, scale=1e-2), WireName(RUN, ATTEMPT, 3), "tiny").strength
                assert proof.judge(proof.Proof(await canary("trl-policy-v3"), base), [], strength, dtype) is None
                assert "bit for bit" in (proof.judge(proof.Proof(base, base), [], strength, dtype) or "")

                # Under load the canary of a version is what it was at rest.
                rest = await canary("trl-policy-v3")
                load: list[Any] = [asyncio.create_task(proxy.complete(3, n, max_tokens=64)) for n in range(16)]
                assert proof.distance(rest, await canary("trl-policy-v3")) <= proof.NOISE[dtype]
                await asyncio.gather(*load)

                assert (await proxy.unload(3))[0] == 200
                await until(lambda: _retired(proxy))
                assert (await proxy.complete(3))[0] == 200, "a retired version is revived"
                now = await proxy.status()
                assert (now["fatal"], now["generation_stall_s"], now["completions"]["lost"]) == (None, 0, 0)
                assert now["replicas"][0]["load_attempts"]["1"] == 1
                assert engine.get("/v1/models").json()["data"][1]["id"] == wire(1)

        asyncio.run(main())


async def _retired(proxy: Any) -> bool:
    return bool((await proxy.versions())[3] == "retired")
