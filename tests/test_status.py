"""The status JSON and its Prometheus metrics, of a real run."""

import asyncio
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import MotoBucket
from tests.fleets import run_of, wire


def test_the_status_tells_all_that_is_read_of_it(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    async def main() -> None:
        async with run_of(tmp_path, moto_bucket.environ) as run:
            proxy = await run.proxy()
            for version in range(1, 13):
                await run.sync(proxy, version)
                if version > 2:
                    await proxy.unload(version - 2)
            for prompt in range(6):
                await proxy.complete(12, prompt)
            now = await proxy.status()
            assert (now["run"], now["attempt"], now["fatal"], now["bucket_throttled"]) == ("run", 2, None, 0)
            assert [version["version"] for version in now["versions"]][-4:] == [9, 10, 11, 12]
            assert len(now["versions"]) <= 12, "past versions pile up"
            last = now["versions"][-1]
            assert (last["wire"], last["state"], last["zero"], last["in_flight"]) == (wire(12), "live", False, 0)
            assert last["bytes"] > 10_000
            assert last["publish_s"] > 0
            replica = now["replicas"][0]
            assert (replica["name"], replica["state"], replica["reason"]) == ("0", "ready", None)
            assert replica["url"] == run.sims[0].url
            assert {11, 12} <= set(replica["adapters"])
            assert replica["load_attempts"]["12"] == 1
            assert replica["load_s"]["12"] > 0
            assert sum(replica["completions"] for replica in now["replicas"]) == 6
            assert sum(replica["tokens"] for replica in now["replicas"]) == 48
            assert now["routing"]["tokens"].keys() <= {"0", "1"}
            assert now["completions"]["answered"] == 6
            assert (now["adapters_published"], now["generation_stall_s"]) == (12, 0)

            status, text = await proxy.call("GET", "/metrics")
            samples = {
                (sample.name, *sample.labels.values()): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
            assert status == 200
            assert samples["asyncgrpo_completions_answered_total",] == 6
            assert samples["asyncgrpo_adapters_published_total",] == 12
            assert samples["asyncgrpo_replica_ready", "0"] == 1
            assert samples["asyncgrpo_versions", "live"] == 2
            assert samples["asyncgrpo_replica_tokens_total", "0"] + samples["asyncgrpo_replica_tokens_total", "1"] == 48

    asyncio.run(main())
