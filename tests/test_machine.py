"""How a replica fills its machine."""

from typing import Any

import pytest
from huggingface_hub import JobHardwareInfo

from emulator.hardware import FLAVORS
from jobs.errors import ConfigError
from jobs.machine import GB, LEAST_CACHE_BYTES, OVERHEAD_BYTES, Machine, how_many, memory, of_flavor, resolve
from jobs.recipe import Recipe, load, override

H200 = Machine(1, 141 * GB, 23)
SMALL = int(3.1 * GB)
"""Weights of Qwen2.5-Math-1.5B in bfloat16."""


@pytest.mark.parametrize(
    ("flavor", "expected"),
    [
        ("h200", H200),
        ("h200x2", Machine(2, 141 * GB, 46)),
        ("l4x4", Machine(4, 24 * GB, 48)),
        ("cpu-basic", Machine(0, 0, 2)),
    ],
)
def test_the_machine_of_a_flavor(flavor: str, expected: Machine) -> None:
    assert of_flavor(JobHardwareInfo(**FLAVORS[flavor].to_json())) == expected


@pytest.mark.parametrize(
    ("machine", "weights", "in_flight", "parallel", "expected"),
    [
        (H200, SMALL, 128, 1, 1),
        (H200, SMALL, 384, 1, 2),
        (H200, SMALL, 768, 1, 3),
        (H200, SMALL, 1536, 1, 4),
        (H200, SMALL, 0, 1, 1),
        (Machine(1, 141 * GB, 7), SMALL, 1536, 1, 3),  # cores for no more
        (Machine(1, 141 * GB, 1), SMALL, 1536, 1, 1),
        (Machine(1, 24 * GB, 23), SMALL, 1536, 1, 1),  # memory for no more
        (Machine(1, 141 * GB, 23, gpu_share=1 / 3), SMALL, 1536, 1, 3),
        (H200, 15 * GB, 1536, 1, 2),
        (H200, 140 * GB, 1536, 1, 1),
        (Machine(2, 141 * GB, 46), SMALL, 1536, 1, 6),
        (Machine(2, 141 * GB, 46), 15 * GB, 1536, 2, 4),
        (Machine(4, 141 * GB, 92), 140 * GB, 1536, 2, 2),
        (H200, None, 1536, 1, 1),
        (Machine(2, 141 * GB, 46), None, 1536, 1, 2),
        (Machine(0, 0, 2), SMALL, 1536, 1, 1),
    ],
)
def test_how_many_engines(machine: Machine, weights: int | None, in_flight: int, parallel: int, expected: int) -> None:
    assert how_many(machine, weights, in_flight, parallel) == expected


@pytest.mark.parametrize("engines", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_engines_on_a_gpu_fit_into_the_jobs_share_of_it(engines: int, share: float) -> None:
    machine = Machine(1, 141 * GB, 23, share)
    flags = memory(machine, engines, SMALL)
    if engines == 1 and share == 1:
        assert flags == {}
        return
    assert 0 < engines * flags["gpu_memory_utilization"] <= share
    own_bytes = flags["kv_cache_memory_bytes"] + SMALL + OVERHEAD_BYTES
    assert LEAST_CACHE_BYTES < own_bytes <= flags["gpu_memory_utilization"] * machine.gpu_bytes


def test_engines_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"replica.engines = 3: 3 engines on a GPU have 7.2 GB each; .* 9.1 GB"):
        memory(Machine(1, 24 * GB, 23), 3, SMALL)


def test_two_gpus_are_shared_by_as_many_engines_as_each_has() -> None:
    assert memory(Machine(2, 141 * GB, 46), 4, SMALL)["gpu_memory_utilization"] == 0.45
    assert memory(Machine(2, 141 * GB, 46), 2, SMALL, parallel=2)["gpu_memory_utilization"] == 0.45
    assert memory(Machine(2, 141 * GB, 46), 2, SMALL) == {}


@pytest.mark.parametrize(("machine", "weights"), [(H200, None), (Machine(1, 0, 23), SMALL)])
def test_sizes_that_are_not_known_leave_the_rest_to_vllm(machine: Machine, weights: int | None) -> None:
    assert memory(machine, 2, weights) == {"gpu_memory_utilization": 0.45}


def recipe(*overrides: str) -> Recipe:
    return override(load("digit"), *overrides)


@pytest.mark.parametrize(
    ("overrides", "machine", "dtype", "engines", "flags"),
    [
        (['model.dtype="auto"'], Machine(0, 0, 2), "float32", 1, {}),
        (['model.dtype="auto"'], H200, "bfloat16", 1, {}),
        (['model.dtype="float16"'], H200, "float16", 1, {}),
        (['replica.engines="auto"'], H200, None, 1, {}),  # 48 in flight for each of its 2 replicas
        (
            ['replica.engines="auto"', "trainer.max_inflight_tasks=1024"],
            H200,
            None,
            2,
            {"gpu_memory_utilization": 0.45},
        ),
        (
            ['replica.engines="auto"', "trainer.max_inflight_tasks=-1", "trainer.per_device_train_batch_size=384"],
            H200,
            None,
            3,
            {"gpu_memory_utilization": 0.3},
        ),
        (["replica.engines=2"], H200, None, 2, {"gpu_memory_utilization": 0.45}),
        (["replica.engines=2", "replica.vllm.gpu_memory_utilization=0.2"], H200, None, 2, {}),
    ],
)
def test_a_recipe_is_completed(
    overrides: list[str], machine: Machine, dtype: str | None, engines: int, flags: dict[str, Any]
) -> None:
    asked = recipe(*overrides)
    found = resolve(asked, machine, SMALL)
    assert found.model.dtype == (dtype or found.model.dtype)
    assert found.replica.engines == engines
    assert found.replica.vllm == {**flags, **asked.replica.vllm}, "what it says itself stays"
    assert resolve(found, machine, SMALL) == found


def test_an_engine_on_several_gpus() -> None:
    four = Machine(4, 141 * GB, 92)
    large = resolve(recipe('replica.engines="auto"', "replica.vllm.tensor_parallel_size=2"), four, 140 * GB)
    assert large.replica.engines == 2
    with pytest.raises(ConfigError, match=r"tensor_parallel_size .* = 2: .* a replica has 1\. Choose a larger"):
        resolve(recipe("replica.vllm.tensor_parallel_size=2"), H200, SMALL)
    with pytest.raises(ConfigError, match=r"= 8: each engine needs so many GPUs, and a replica has 4"):
        resolve(recipe("replica.vllm.tensor_parallel_size=4", "replica.vllm.pipeline_parallel_size=2"), four, SMALL)
