"""How a replica fills its machine: engines on each GPU, and the memory of each. Pure decisions.

One vLLM engine cannot fill a large GPU with a small model: its server and its scheduler, one Python process each, are
what it waits for (measured, docs/benchmarks.md). Several engines on one GPU can, each with its share of the memory.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from huggingface_hub import JobHardwareInfo

from jobs import plan
from jobs.errors import ConfigError
from jobs.recipe import Recipe

GB = 10**9
CORES_PER_ENGINE = 2
"""An engine keeps two processes busy: its server and its scheduler, which also drives the GPU."""
IN_FLIGHT_PER_ENGINE = 256
"""Completions that are worth an engine. On an H200 with a model of 1.5 billion parameters, 128 in flight got the most
tokens of 1 engine, 384 of 2 and 768 of 3; engines that are too many take turns on the GPU (measured)."""
MOST_ENGINES_PER_GPU = 4
"""More gave fewer tokens there, with 1536 in flight, too (measured)."""
WEIGHTS_SHARE = 0.25
"""Part of a GPU's memory that the weights of all its engines may take. Where they need more, the model is large, the
GPU is what engines wait for, and more engines would only leave less room for completions."""
USED_SHARE = 0.9
"""Part of a GPU's memory that its engines use together: vLLM's own default for one."""
OVERHEAD_BYTES = 6 * GB
"""What an engine needs beside weights and KV cache: CUDA context and graphs, activations, logits of all sequences. With
Qwen2.5-1.5B 4.9 to 5.3 GB (measured)."""
LEAST_CACHE_BYTES = GB
"""A KV cache below this serves nobody: 35,000 tokens of Qwen2.5-1.5B."""


@dataclass(frozen=True)
class Machine:
    """What one replica Job has: GPUs with so many bytes of memory each, and processor cores.

    `gpu_share` is the part of each GPU that is the Job's own; the emulator lets several Jobs share one.
    """

    gpus: int
    gpu_bytes: int
    cores: int
    gpu_share: float = 1.0


def of_flavor(flavor: JobHardwareInfo) -> Machine:
    """The machine that the Hub lists for a flavor: "23 vCPU", and "141 GB" of all its GPUs together."""
    accelerator = flavor.accelerator
    gpus = int(accelerator.quantity) if accelerator else 0
    gpu_bytes = _number(accelerator.vram) * GB // gpus if accelerator and gpus else 0
    return Machine(gpus, gpu_bytes, _number(flavor.cpu))


def resolve(recipe: Recipe, machine: Machine, weights_bytes: int | None, trainer_processes: int = 1) -> Recipe:
    """The recipe with everything decided that depends on the replicas' machine. What it says itself stays.

    `weights_bytes` is the size of the base model's weights on disk; None if it is not known.

    Raises:
        ConfigError: the engines do not fit, need more GPUs, or the GPUs cannot compute in `model.dtype`.
    """
    if machine.gpus and recipe.model.dtype == "float32":
        raise ConfigError(
            "model.dtype = 'float32': vLLM serves adapters on a GPU in bfloat16 or float16 only. Set "
            "model.dtype = 'bfloat16' (or 'auto')."
        )
    if recipe.model.dtype == "auto":
        # vLLM's adapters have no float32 on a GPU, and a CPU is slower with bfloat16.
        dtype = "bfloat16" if machine.gpus else "float32"
        recipe = replace(recipe, model=replace(recipe.model, dtype=dtype))
    engines, flags = recipe.replica.engines, recipe.replica.vllm
    parallel = gpus_of_engine(flags)
    if 0 < machine.gpus < parallel:
        raise ConfigError(
            f"replica.vllm.tensor_parallel_size (x pipeline_parallel_size) = {parallel}: each engine needs so many "
            f"GPUs, and a replica has {machine.gpus}. Choose a larger jobs.replica_flavor, or lower it."
        )
    if engines == "auto":
        of_a_replica = plan.in_flight(recipe, trainer_processes) / recipe.replica.count
        engines = how_many(machine, weights_bytes, of_a_replica, parallel)
    if machine.gpus:
        flags = {**memory(machine, engines, weights_bytes, parallel), **flags}
    return replace(recipe, replica=replace(recipe.replica, engines=engines, vllm=flags))


def gpus_of_engine(flags: Mapping[str, Any]) -> int:
    """How many GPUs one engine takes by vLLM's flags."""
    return int(flags.get("tensor_parallel_size", 1)) * int(flags.get("pipeline_parallel_size", 1))


def how_many(machine: Machine, weights_bytes: int | None, in_flight: float, parallel: int = 1) -> int:
    """Engines for one Job that has `in_flight` completions, each on `parallel` GPUs: one for each group at least.

    It is one without GPUs, for a CPU has nothing to spare, and one to a group where the model's size is not known.
    """
    groups = machine.gpus // parallel
    if not groups or weights_bytes is None:
        return max(1, groups)
    own_bytes = machine.gpu_bytes * machine.gpu_share * parallel
    by_memory = int(WEIGHTS_SHARE * own_bytes / max(1, weights_bytes))
    by_cores = machine.cores // groups // CORES_PER_ENGINE
    by_load = round(in_flight / groups / IN_FLIGHT_PER_ENGINE)
    return groups * max(1, min(by_memory, by_cores, by_load, MOST_ENGINES_PER_GPU))


def memory(machine: Machine, engines: int, weights_bytes: int | None, parallel: int = 1) -> dict[str, Any]:
    """vLLM's flags by which each engine takes its share of a GPU, however many start there at the same time.

    With several, vLLM's own way (look at what is free, and take a part) depends on who looks first.

    Where the size of the model is not known, that has to do.

    Raises:
        ConfigError: the share has no room for a KV cache.
    """
    sharing = -(-engines // max(1, machine.gpus // parallel))
    if sharing == 1 and machine.gpu_share == 1:
        return {}
    share = int(USED_SHARE * machine.gpu_share / sharing * 1000) / 1000
    if weights_bytes is None or not machine.gpu_bytes:
        return {"gpu_memory_utilization": share}
    taken = weights_bytes / parallel + OVERHEAD_BYTES
    cache = int(share * machine.gpu_bytes - taken)
    if cache < LEAST_CACHE_BYTES:
        raise ConfigError(
            f"replica.engines = {engines}: {sharing} engines on a GPU have {share * machine.gpu_bytes / GB:.1f} GB "
            f"each; weights and overhead take {taken / GB:.1f} GB, and a KV cache {LEAST_CACHE_BYTES / GB:.1f} GB at "
            "least. Lower replica.engines."
        )
    return {"gpu_memory_utilization": share, "kv_cache_memory_bytes": cache}


def _number(text: str) -> int:
    found = re.search(r"\d+", text)
    return int(found[0]) if found else 0
