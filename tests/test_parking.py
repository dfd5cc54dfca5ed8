"""Waiting in order, within limits."""

import asyncio

import pytest

from jobs.parking import Parking, Unserved
from jobs.upstream import VersionFailed
from tests.upstreams import until


class Gate:
    """`wait_for` of a fleet, opened by hand."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.waiting = 0
        self.error: Exception | None = None

    async def wait_for(self, name: str) -> None:
        self.waiting += 1
        try:
            await self.open.wait()
        finally:
            self.waiting -= 1
        if self.error:
            raise self.error


def test_first_come_first_served_with_one_watcher_for_each_name() -> None:
    async def main() -> None:
        gate, order = Gate(), []
        parking = Parking(gate.wait_for, max_parked=100, park_timeout_s=9)

        async def wait(number: int) -> None:
            await parking.park("ab"[number % 2], None)
            order.append(number)

        tasks = [asyncio.create_task(wait(number)) for number in range(20)]
        await until(lambda: parking.parked == 20)
        assert gate.waiting == 2
        gate.open.set()
        await asyncio.gather(*tasks)
        assert [number for number in order if number % 2] == list(range(1, 20, 2))
        assert (parking.parked, parking.parked_total) == (0, 20)

    asyncio.run(main())


def test_limits_and_the_time_since_the_first_wait() -> None:
    async def main() -> None:
        gate = Gate()
        parking = Parking(gate.wait_for, max_parked=1, park_timeout_s=0.05)
        waiting = asyncio.create_task(parking.park("a", None))
        await until(lambda: parking.parked == 1)
        with pytest.raises(Unserved, match=r"proxy\.max_parked"):
            await parking.park("a", None)
        with pytest.raises(Unserved, match=r"proxy\.park_timeout_s"):
            await waiting
        with pytest.raises(Unserved, match=r"0\.05 s"):
            await parking.park("a", asyncio.get_running_loop().time() - 10)
        await until(lambda: gate.waiting == 0)
        assert (parking.parked, parking.parked_total) == (0, 1)

    asyncio.run(main())


def test_a_failure_reaches_all_and_the_next_starts_anew() -> None:
    async def main() -> None:
        gate = Gate()
        gate.error = VersionFailed("out of slots")
        parking = Parking(gate.wait_for, max_parked=9, park_timeout_s=9)
        tasks = [asyncio.create_task(parking.park("a", None)) for _ in range(3)]
        await until(lambda: parking.parked == 3)
        gate.open.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(each) for each in results] == ["out of slots"] * 3
        gate.error = None
        await parking.park("a", None)
        assert parking.parked == 0

    asyncio.run(main())
