"""Requests are read once and changed by exact splices."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.demand import Demand, members
from jobs.prefix import Numbers

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
objects = st.dictionaries(st.text(max_size=6) | st.sampled_from(["model", "prompt"]), values, max_size=6)


def plain(value: Any) -> Any:
    return value.read() if isinstance(value, Numbers) else value


@settings(max_examples=300, deadline=None)
@given(objects, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_members_are_what_json_says(payload: dict[str, Any], ascii_only: bool, indent: Any) -> None:
    text = json.dumps(payload, ensure_ascii=ascii_only, indent=indent)
    found = members(text)
    assert {name: plain(member.value) for name, member in found.items()} == payload
    for name, member in found.items():
        assert json.loads(text[member.start : member.end]) == payload[name]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='{}[]",:1ae\\ \n', max_size=30) | st.text(max_size=10))
def test_what_is_no_object_is_refused_as_json_refuses_it(text: str) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        expected = None
    try:
        found = {name: plain(member.value) for name, member in members(text).items()}
    except ValueError:
        assert not isinstance(expected, dict)
    else:
        assert expected == found


@settings(max_examples=200, deadline=None)
@given(objects, values, values)
def test_splices_change_what_they_name_and_nothing_else(payload: dict[str, Any], model: Any, prompt: Any) -> None:
    payload = {"first": 1, "model": "old", **payload, "prompt": [1, 2], "last": {"model": "old"}}
    body = json.dumps(payload, indent=1, ensure_ascii=False).encode()
    demand = Demand.read(body)
    assert demand.spliced({}) == body
    edited = demand.spliced({"prompt": prompt, "model": model})
    assert json.loads(edited) == payload | {"model": model, "prompt": prompt}
    start, end = demand.members["model"].start, demand.members["model"].end
    assert edited.startswith(demand.text[:start].encode())
    assert edited.endswith(demand.text[demand.members["prompt"].end :].encode())
    assert start < end


@pytest.mark.parametrize(
    ("prompt", "tokens"), [([1, 2, 3], 3), ([[1, 2]], 2), ("text", None), ([], None), ([[1], [2]], None), (None, None)]
)
def test_the_length_of_a_prompt_of_ids(prompt: Any, tokens: int | None) -> None:
    assert Demand.read(json.dumps({"prompt": prompt}).encode()).prompt_tokens() == tokens


@pytest.mark.parametrize(
    ("prompt", "batch"),
    [
        (["a", "b"], True),
        ([[1], [2, 3]], True),
        (["a"], False),
        ([[1]], False),
        ([1, 2], False),
        (["a", [1]], False),
        ([[1], 2], False),
        ("ab", False),
        ({}, False),
    ],
)
def test_what_is_a_batch(prompt: Any, batch: bool) -> None:
    demand = Demand.read(json.dumps({"prompt": prompt, "seed": 3}).encode())
    assert bool(demand.prompts()) is batch
    if batch:
        assert [plain(demand.single(index).value("prompt")) for index in range(len(prompt))] == prompt
        assert demand.single(0).value("seed") == 3


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' + b"[" * 100_000])
def test_what_cannot_be_read_is_kept(body: bytes) -> None:
    demand = Demand.read(body)
    assert (demand.body, demand.model, demand.stream, demand.max_tokens, demand.choices) == (body, None, False, None, 1)
    assert demand.prefix("x") is None
