import pytest

from jobs import ranks, recipe
from jobs.errors import ConfigError


def test_each_process_knows_its_place_and_how_the_model_is_divided() -> None:
    sharded, whole = ranks.environment(1, 4, 29500), ranks.environment(1, 4, 29500, "ddp")
    assert (sharded["RANK"], sharded["LOCAL_RANK"], sharded["WORLD_SIZE"], sharded["MASTER_PORT"]) == (
        "1",
        "1",
        "4",
        "29500",
    )
    assert sharded["FSDP_STATE_DICT_TYPE"] == "SHARDED_STATE_DICT"
    assert sharded.items() - whole.items() == ranks.FSDP.items() and whole.keys() < sharded.keys()


def test_a_process_that_was_started_as_one_of_several_joins_them() -> None:
    joined = ranks.Ranks.join(ranks.environment(3, 4, 29500), "fsdp2")
    assert (joined.rank, joined.processes, joined.first) == (3, 4, False)


def test_how_the_model_is_divided_is_a_setting() -> None:
    assert recipe.load("digit", None, ["jobs.parallel='ddp'"]).jobs.parallel == "ddp"
    with pytest.raises(ConfigError, match=r"jobs\.parallel"):
        recipe.load("digit", None, ["jobs.parallel='tp'"])
