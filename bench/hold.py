"""8,192 completions in flight through the proxy's data plane for minutes: does its memory grow, what does it cost?

    python bench/hold.py [--in-flight 8192] [--minutes 5]

Sixty-four replicas, played by one process that answers each completion after 8 to 12 s. Prints the proxy's resident
memory every 15 s, then completions/s and processor time.
"""

import argparse
import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvloop

from jobs.bench_proxy import COMPLETION_TOKENS, PROMPT_TOKENS, child, cpu_s, free_port, wait_until_up
from jobs.bench_wire import GROUP, Upstream, Wire, request, response

SLOWEST_S, QUICKEST_S = 12.0, 8.0
LOOK_S = 15.0
REPLICAS = 64
RAMP_S = 20.0
"""Over which the rollouts begin, as a trainer's do."""


class SlowUpstream(Upstream):
    """Answers completions later, as an engine does whose batch is full."""

    def message(self, head: bytes) -> None:
        """Waits before a completion's answer."""
        delay_s = random.uniform(QUICKEST_S, SLOWEST_S) if head.startswith(b"post") else 0.0
        asyncio.get_running_loop().call_later(delay_s, self._late, head)

    def _late(self, head: bytes) -> None:
        if not self.transport.is_closing():
            super().message(head)


def serve(ports: list[int]) -> None:
    """The replicas."""

    async def main() -> None:
        answer = response(COMPLETION_TOKENS)
        loop = asyncio.get_running_loop()
        for port in ports:
            await loop.create_server(lambda: SlowUpstream(answer), "127.0.0.1", port, backlog=1024)
        await asyncio.Event().wait()

    uvloop.run(main())


def resident_mb(pid: int) -> float:
    """Resident memory of a process."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


class Rollouts:
    """So many completions in flight: each answer is followed by the next request, eight for each new prompt."""

    def __init__(self, port: int, in_flight: int) -> None:
        self._port, self._in_flight = port, in_flight
        self._sent = 0
        self._message = b""
        self.done = self.errors = 0

    async def start(self) -> None:
        """Opens the connections one after the other, over RAMP_S."""
        loop = asyncio.get_running_loop()
        for _ in range(self._in_flight):
            _, rollout = await loop.create_connection(lambda: Rollout(self), "127.0.0.1", self._port)
            rollout.transport.write(self.next())
            await asyncio.sleep(RAMP_S / self._in_flight)

    def next(self) -> bytes:
        """The next request."""
        if self._sent % GROUP == 0:
            self._message = request(self._sent, PROMPT_TOKENS, f"127.0.0.1:{self._port}")
        self._sent += 1
        return self._message


class Rollout(Wire):
    """One of them."""

    def __init__(self, all_: Rollouts) -> None:
        super().__init__()
        self._all = all_

    def message(self, head: bytes) -> None:
        """An answer came."""
        self._all.done += 1
        self._all.errors += not head.startswith(b"http/1.1 200")
        self.transport.write(self._all.next())


async def hold(port: int, pid: int, in_flight: int, seconds: float) -> None:
    """Keeps so many completions in flight and prints what the proxy needs."""
    rollouts = Rollouts(port, in_flight)
    started, before = time.monotonic(), cpu_s(pid)
    ramp = asyncio.create_task(rollouts.start())
    while (now := time.monotonic() - started) < seconds:
        await asyncio.sleep(min(LOOK_S, seconds - now))
        print(
            f"{time.monotonic() - started:6.0f} s {resident_mb(pid):8.1f} MB {rollouts.done:8} done "
            f"{rollouts.errors:6} errors",
            flush=True,
        )
    await ramp
    wall, spent = time.monotonic() - started, cpu_s(pid) - before
    print(f"{rollouts.done / wall:.0f} completions/s, {spent / rollouts.done * 1e6:.0f} us of processor time each")


def main() -> None:
    """Starts the upstream and the proxy, and holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=8192)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--serve", type=int, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    upstreams = sorted({free_port() for _ in range(REPLICAS)})
    slow = subprocess.Popen([sys.executable, __file__, "--serve", *map(str, upstreams)])
    try:
        port = free_port()
        with child(["ours", str(port), *(f"http://127.0.0.1:{upstream}" for upstream in upstreams)], [0, 1]) as proxy:
            wait_until_up(port)
            print(f"     0 s  {resident_mb(proxy.pid):8.1f} MB", flush=True)
            uvloop.run(hold(port, proxy.pid, options.in_flight, options.minutes * 60))
    finally:
        slow.terminate()
        slow.wait()


if __name__ == "__main__":
    main()
