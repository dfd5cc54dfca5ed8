"""The whole proxy, as a process, under clients that come and go: nothing of them is left."""

import asyncio
import random
from pathlib import Path
from typing import Any

import aiohttp

from tests.driver import prompt
from tests.scenes import Scene, scene

COMPLETIONS, AT_A_TIME, LEAVING = 10_000, 64, 0.2
PACE = ("--sim-decode-tokens-per-s", "80")
"""An answer of 4 tokens takes 50 ms on any machine, and a fifth of the clients leave within 30 ms."""
GROWTH_BYTES = 8 << 20
"""Far less than 7,500 completions or 1,500 broken connections would leave behind at 2 KB each."""


async def ask(run: Scene, web: aiohttp.ClientSession, seed: int, stream: bool, patience_s: float | None) -> bool:
    """One completion; whether it was waited for."""
    body: dict[str, Any] = {"model": "trl-policy-v1", "prompt": prompt(seed % 64), "max_tokens": 4, "n": 1}
    body |= {"seed": seed, "logprobs": 0, "return_token_ids": True, "stream": stream}
    try:
        async with asyncio.timeout(patience_s):
            async with web.post(f"{run.url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                assert await response.read()
                return True
    except TimeoutError:
        return False


def test_ten_thousand_completions_leave_nothing_behind(tmp_path: Path) -> None:
    async def main() -> None:
        draw, left = random.Random(5), COMPLETIONS
        web = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        async with scene(tmp_path, 2, 0, *PACE) as run, web:
            sizes: list[int] = []
            waited = 0

            async def one_after_another() -> None:
                nonlocal left, waited
                while left:
                    left -= 1
                    patience_s = draw.random() * 0.03 if draw.random() < LEAVING else None
                    waited += await ask(run, web, draw.getrandbits(63), draw.random() < 0.1, patience_s)
                    if left in (COMPLETIONS * 3 // 4, 0):
                        sizes.append(resident_bytes(run.proxy.pid))

            await asyncio.gather(*(one_after_another() for _ in range(AT_A_TIME)))
            await run.until(lambda now: not now["completions"]["in_flight"])
            now = await run.status()
            counts = now["completions"]
            assert counts["asked"] == counts["answered"] + counts["cancelled"]
            assert counts["answered"] >= waited and counts["cancelled"] > COMPLETIONS * LEAVING / 4
            assert counts["lost"] == counts["parked"] == 0
            for replica in now["replicas"]:
                assert (replica["state"], replica["in_flight"], replica["outstanding_tokens"]) == ("ready", 0, 0)
                assert replica["deaths"] == 0
            assert [version["in_flight"] for version in now["versions"]] == [0]
            assert sizes[-1] - sizes[0] < GROWTH_BYTES, sizes

    asyncio.run(main())


def test_a12_connections_that_idle_meet_no_reset(tmp_path: Path) -> None:
    """300 clients pause as long as their pools keep a socket (aiohttp: 15 s) and as long as most servers do (5 s)."""

    async def main() -> None:
        draw = random.Random(12)
        pauses_s = [draw.uniform(4.9, 5.1) for _ in range(150)] + [draw.uniform(14, 16) for _ in range(150)]
        async with scene(tmp_path, 2, 0) as run, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as web:

            async def twice(pause_s: float) -> None:
                assert await ask(run, web, 1, False, None)
                await asyncio.sleep(pause_s)
                assert await ask(run, web, 2, False, None)

            await asyncio.gather(*map(twice, pauses_s))
            counts = (await run.status())["completions"]
            assert (counts["answered"], counts["lost"], counts["redispatched"]) == (600, 0, 0)

    asyncio.run(main())


def resident_bytes(pid: int) -> int:
    """Memory of a process, as the kernel counts it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"process {pid} has ended")
