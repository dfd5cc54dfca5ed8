"""What a Job's processes use of this machine, for the metrics route. Zeros where there is no /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from emulator.hardware import Flavor

GB = 1 << 30
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Usage:
    """Measures one Job; processor use is the mean since the last measurement (or since the processes' start)."""

    def __init__(self, job_id: str, flavor: Flavor) -> None:
        self.job_id = job_id
        self.flavor = flavor
        self._last: tuple[float, float] | None = None

    def measure(self, pids: Iterable[int]) -> dict[str, Any]:
        """One event of the metrics stream. Network and GPU use are not measured: 0 and none."""
        cpu_s, memory_bytes = 0.0, 0
        for pid in pids:
            try:
                # After the command's name in brackets, fields 14, 15 and 24 of proc_pid_stat(5) are user time, system
                # time and resident pages; the split starts with field 3.
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            cpu_s += (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
            memory_bytes += int(fields[21]) * _PAGE_BYTES
        at = time.monotonic()
        cores = max(0.0, (cpu_s - self._last[1]) / (at - self._last[0])) if self._last and at > self._last[0] else 0.0
        self._last = (at, cpu_s)
        return {
            "cpu_usage_pct": round(100 * cores / self.flavor.cpus),
            "cpu_millicores": self.flavor.cpus * 1000,
            "memory_used_bytes": memory_bytes,
            "memory_total_bytes": self.flavor.memory_gb * GB,
            "rx_bps": 0,
            "tx_bps": 0,
            "gpus": {},
            "replica": self.job_id[-5:],
        }
