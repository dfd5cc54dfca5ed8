import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.jobs_state import parse_labels
from jobs import labels
from jobs.errors import ConfigError
from jobs.names import check_run_name


@given(st.lists(st.text(min_size=1, max_size=150), min_size=2, max_size=20, unique=True))
def test_a22_labels_are_valid_and_never_collide(texts: list[str]) -> None:
    made = [labels.label(text) for text in texts]
    assert len(set(made)) == len(texts)
    for each in made:
        assert parse_labels({"x": each}) == {"x": each}


@pytest.mark.parametrize("text", ["Qwen/Qwen2.5-Math-1.5B", "lr 4e-5, run #2", "x" * 130, "ü", "a/b", "a.b"])
def test_a22_no_text_is_another_ones_label(text: str) -> None:
    shortened = labels.label(text)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,100}", shortened)
    assert labels.label(shortened) != shortened, "a text that looks shortened is hashed too"


def test_plain_texts_stay_as_they_are() -> None:
    assert labels.label("digit-1129-230000") == "digit-1129-230000"


def test_a22_a_run_may_be_called_anything_that_has_a_letter_or_a_digit() -> None:
    wanted = ["lr 4e-5, run #2", "lr 4e-5; run #2", "a b", "a+b", "a%2Bb", "A B", "n" * 130, "n" * 131]
    names = [labels.run_name(each) for each in wanted]
    assert len(set(names)) == len(wanted)
    assert [check_run_name(name) for name in names] == names
    assert names[0].startswith("lr-4e-5-run-2-")
    assert labels.run_name("digit-1") == "digit-1"
    with pytest.raises(ConfigError, match="a-z, 0-9"):
        labels.run_name("?!")


def test_what_a_job_bears_can_be_read_back() -> None:
    made = labels.of_job("digit-1", "replica", 3, 2, 1764450000.7)
    assert labels.read(made) == labels.Place("digit-1", "replica", 3, 2, 1764450000.0)
    assert labels.read(None) is None and labels.read({"asyncgrpo-run": "x"}) is None
    assert labels.read(made | {"asyncgrpo-index": "many"}) is None
