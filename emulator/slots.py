"""Places for Jobs on this machine. Data only."""

from __future__ import annotations

from collections.abc import Iterable

from emulator.hardware import Flavor


class Slots:
    """Places for Jobs on this machine: CPU Jobs are counted, GPU Jobs hold devices.

    `devices` are CUDA device numbers, one for each place, in the order in which places are taken: two Jobs share a
    device that is named twice. Without any, a GPU Job runs on the CPU and takes a CPU place.
    """

    def __init__(self, cpu_jobs: int, devices: Iterable[str] = ()) -> None:
        self.cpu_jobs = cpu_jobs
        self.devices = tuple(devices)
        self._held: dict[str, tuple[int, ...]] = {}

    def impossible(self, flavor: Flavor) -> str | None:
        """Why this flavor can never be placed here, or None."""
        if self.devices and flavor.gpus > (there := len(set(self.devices))):
            return f"{flavor.name} needs {flavor.gpus} GPUs and this machine has {there}"
        return None

    def take(self, job_id: str, flavor: Flavor) -> tuple[str, ...] | None:
        """Hold a place for the Job: its devices (none for a CPU Job), or None while nothing is free."""
        if self.devices and flavor.gpus:
            held = {place for places in self._held.values() for place in places}
            free: dict[str, int] = {}  # the first free place of each device: a Job's devices differ
            for place, device in enumerate(self.devices):
                if place not in held:
                    free.setdefault(device, place)
            if len(free) < flavor.gpus:
                return None
            self._held[job_id] = tuple(free.values())[: flavor.gpus]
        else:
            if sum(not places for places in self._held.values()) >= self.cpu_jobs:
                return None
            self._held[job_id] = ()
        return tuple(self.devices[place] for place in self._held[job_id])

    def release(self, job_id: str) -> None:
        """The Job's place is free again."""
        self._held.pop(job_id, None)
