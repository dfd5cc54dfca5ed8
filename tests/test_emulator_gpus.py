"""GPUs of an emulation: places, and what a replica finds in its own."""

import pytest

from emulator.gpus import image_environment, machine_of_a_replica, places
from jobs.errors import ConfigError
from jobs.machine import GB, Machine
from jobs.recipe import Recipe, load, override


def recipe(*overrides: str) -> Recipe:
    return override(load("digit"), *overrides)


@pytest.mark.parametrize(
    ("asked", "there", "overrides", "expected"),
    [
        (None, "", [], ""),
        (None, "0", [], "000"),
        (None, "01", [], "001"),
        (None, "0123", [], "013"),
        (None, "0123", ["replica.count=4"], "01203"),
        (None, "01", ['jobs.trainer_flavor="h200x2"'], "0101"),
        (None, "012", ['jobs.trainer_flavor="h200x2"'], "0012"),
        (None, "01", ['jobs.replica_flavor="h200x2"', "replica.count=1"], "011"),
        (None, "0", ['jobs.replica_flavor="cpu-basic"'], "0"),
        (None, "0", ['jobs.replica_flavor="cpu-basic"', 'jobs.trainer_flavor="cpu-basic"'], ""),
        ("none", "01", [], ""),
        ("0, 0,1", "01", [], "001"),
    ],
)
def test_places(asked: str | None, there: str, overrides: list[str], expected: str) -> None:
    assert "".join(places(asked, list(there), recipe(*overrides))) == expected


@pytest.mark.parametrize(("asked", "there"), [("0,2", "01"), ("0", ""), ("", "0"), ("a", "0")])
def test_gpus_that_are_not_there(asked: str, there: str) -> None:
    with pytest.raises(ConfigError, match="--gpus"):
        places(asked, list(there), recipe())


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("000", Machine(1, 141 * GB, 5, 1 / 3)),
        ("001", Machine(1, 141 * GB, 5, 1 / 2)),
        ("012", Machine(1, 141 * GB, 5, 1.0)),
        ("", Machine(0, 141 * GB, 16)),
    ],
)
def test_a_replicas_part_of_the_machine(where: str, expected: Machine) -> None:
    assert machine_of_a_replica(Machine(len(set(where)), 141 * GB, 16), where, recipe()) == expected


def test_only_what_is_about_gpus_is_passed_on() -> None:
    environ = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "LD_LIBRARY_PATH": "/x", "HF_TOKEN": "t", "NCCL_NVLS_ENABLE": "0"}
    assert image_environment(environ) == {name: environ[name] for name in environ if name != "HF_TOKEN"}
