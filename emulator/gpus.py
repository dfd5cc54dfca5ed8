"""GPUs for emulated Jobs: the places there are, what a replica has in its own, and what its image would have set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from emulator.hardware import FLAVORS
from jobs.errors import ConfigError
from jobs.machine import Machine
from jobs.recipe import Recipe

NONE = "none"
"""Says that no Job gets a GPU."""
PASSED_ON = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH")
PASSED_ON_PREFIXES = ("NVIDIA_", "NCCL_", "NVSHMEM_", "TORCH_", "VLLM_")
"""Variables of this process that are about the machine's GPUs: an image for them sets them for its containers."""


def places(asked: str | None, there: Sequence[str], recipe: Recipe) -> tuple[str, ...]:
    """The device of each place, in the order in which Jobs take them: replicas first, the trainer last.

    `asked` is the user's own list ("0,0,1" or "none"). Without one the trainer gets GPUs of its own if there are more
    than it needs, and the replicas share the others.

    Raises:
        ConfigError: the list is none, or names a GPU that is not there.
    """
    if asked == NONE:
        return ()
    if asked is not None:
        devices = tuple(device.strip() for device in asked.split(","))
        if unknown := [device for device in devices if device not in there]:
            known = ", ".join(there) if there else "none"
            raise ConfigError(f"--gpus {asked}: there is no GPU {unknown[0]!r} here. There are: {known}.")
        return devices
    if not there:
        return ()
    for_trainer, for_replica = _gpus(recipe.jobs.trainer_flavor), _gpus(recipe.jobs.replica_flavor)
    others = there[: len(there) - for_trainer]
    shared = others if len(others) >= max(1, for_replica) else there
    replicas = recipe.replica.count * for_replica
    return (*(shared[i % len(shared)] for i in range(replicas)), *there[-for_trainer:][:for_trainer])


def machine_of_a_replica(here: Machine, places: Sequence[str], recipe: Recipe) -> Machine:
    """What one replica Job has of this machine, all of whose GPUs and cores `here` counts."""
    gpus = _gpus(recipe.jobs.replica_flavor) if places else 0
    if not gpus:
        return replace(here, gpus=0)
    share, cores = 1 / max(Counter(places).values()), here.cores * gpus // len(places)
    return replace(here, gpus=gpus, gpu_share=share, cores=max(1, cores))


def image_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What of this process's environment an image for this machine's GPUs would set."""
    return {name: value for name, value in environ.items() if name in PASSED_ON or name.startswith(PASSED_ON_PREFIXES)}


def _gpus(flavor: str) -> int:
    return FLAVORS[flavor].gpus if flavor in FLAVORS else 0
