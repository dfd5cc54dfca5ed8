"""Where completions wait while no engine has their version: first come, first served, bounded in number and in time."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from jobs.errors import AsyncgrpoError


class Unserved(AsyncgrpoError):
    """No engine could take a completion within the limits; the message names the limit. Answered with 503."""


class Parking:
    """One queue for each wire name. `wait_for(name)` returns once some engine can serve that name."""

    def __init__(self, wait_for: Callable[[str], Awaitable[None]], *, max_parked: int, park_timeout_s: float) -> None:
        self._wait_for = wait_for
        self._max_parked = max_parked
        self._park_timeout_s = park_timeout_s
        self._queues: dict[str, dict[asyncio.Future[None], None]] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self.parked = 0
        self.parked_total = 0
        self.parked_s = 0.0

    async def park(self, name: str, since: float | None) -> None:
        """Waits for an engine that can serve `name`; `since` (time.monotonic) is when the completion first had to wait,
        None if it never had to.

        Raises:
            Unserved: as many as allowed are parked already, or it waited as long as allowed.
            VersionFailed: no engine can load this version.
        """
        if self.parked >= self._max_parked:
            raise Unserved(
                f"No engine can serve `{name}` now and {self.parked} completions are parked already, the most that "
                "proxy.max_parked allows. Raise it, or find out why no engine is ready."
            )
        freed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._queues.setdefault(name, {})
        queue[freed] = None
        if name not in self._keepers:
            self._keepers[name] = asyncio.create_task(self._keep(name), name=f"parking {name}")
        started = time.monotonic()
        self.parked += 1
        self.parked_total += since is None
        until = self._park_timeout_s + (started if since is None else since)
        try:
            async with asyncio.timeout(max(0.0, until - started)):
                await freed
        except TimeoutError as error:
            raise Unserved(
                f"No engine could serve `{name}` within {self._park_timeout_s:g} s, the limit set by "
                "proxy.park_timeout_s."
            ) from error
        finally:
            self.parked -= 1
            self.parked_s += time.monotonic() - started
            queue.pop(freed, None)
            if not queue and self._queues.get(name) is queue:
                del self._queues[name]
                self._keepers.pop(name).cancel()

    async def _keep(self, name: str) -> None:
        """Frees all who wait for `name`, in order, when it can be served or never will be."""
        failure: Exception | None = None
        try:
            await self._wait_for(name)
        except Exception as error:  # passed on to whoever waits
            failure = error
        del self._keepers[name]
        for freed in self._queues.pop(name):
            if not freed.done():
                freed.set_exception(failure) if failure else freed.set_result(None)
