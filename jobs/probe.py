"""What this machine has, asked of the driver and the kernel."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from jobs.machine import Machine

QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
QUERY_S = 30.0
"""The driver's first answer after a machine's start takes seconds."""
MIB = 1 << 20


def gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs this process may use: CUDA_VISIBLE_DEVICES where it is set, else all that the driver shows."""
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [device for device in visible.split(",") if device.strip()]
    return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def cores() -> list[int]:
    """Numbers of the processor cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def machine(gpus: int) -> Machine:
    """This machine, of whose GPUs the Job has `gpus`."""
    return Machine(gpus, gpu_bytes() if gpus else 0, len(cores()))


def gpu_bytes() -> int:
    """Memory of the smallest GPU; 0 where the driver does not say."""
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_S, check=True).stdout
        return min(int(line) * MIB for line in answer.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0
