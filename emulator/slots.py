"""Places for Jobs on this machine. Data only."""

from __future__ import annotations

from collections.abc import Iterable

from emulator.hardware import Flavor


class Slots:
    """Places for Jobs on this machine: CPU Jobs are counted, GPU Jobs hold devices.

    `devices` are CUDA device numbers; without any, a GPU Job runs on the CPU and takes a CPU place.
    """

    def __init__(self, cpu_jobs: int, devices: Iterable[str] = ()) -> None:
        self.cpu_jobs = cpu_jobs
        self.devices = tuple(devices)
        self._held: dict[str, tuple[str, ...]] = {}

    def impossible(self, flavor: Flavor) -> str | None:
        """Why this flavor can never be placed here, or None."""
        if self.devices and flavor.gpus > len(self.devices):
            return f"{flavor.name} needs {flavor.gpus} GPUs and this machine has {len(self.devices)}"
        return None

    def take(self, job_id: str, flavor: Flavor) -> tuple[str, ...] | None:
        """Hold a place for the Job: its devices (none for a CPU Job), or None while nothing is free."""
        if self.devices and flavor.gpus:
            held = {device for devices in self._held.values() for device in devices}
            free = [device for device in self.devices if device not in held]
            if len(free) < flavor.gpus:
                return None
            self._held[job_id] = tuple(free[: flavor.gpus])
        else:
            if sum(not devices for devices in self._held.values()) >= self.cpu_jobs:
                return None
            self._held[job_id] = ()
        return self._held[job_id]

    def release(self, job_id: str) -> None:
        """The Job's place is free again."""
        self._held.pop(job_id, None)
