"""What is a result and what is not."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.verdict import (
    Blame,
    Elsewhere,
    here,
    judge_completion,
    judge_status,
    of_the_path,
    plain,
    renamed,
)


def completion(
    ids: Any, logprobs: Any, reason: str = "stop", text: str = "x", compact: bool = True, n: int = 1
) -> bytes:
    choice = {
        "index": 0,
        "text": text,
        "logprobs": None if logprobs is None else {"text_offset": [], "token_logprobs": logprobs, "tokens": [text]},
        "finish_reason": reason,
        "stop_reason": None,
        "token_ids": ids,
        "prompt_token_ids": [1, 2, 3],
    }
    payload = {"id": "a", "model": "m", "choices": [choice] * n, "usage": {"completion_tokens": 5}}
    return json.dumps(payload, separators=(",", ":") if compact else None).encode()


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize(
    ("ids", "logprobs", "tokens"),
    [([1, 2], [-0.1, None], 2), ([], [], 0), ([7], [-1e-7], 1), (None, None, 5), (None, [1.0], 5), ([1, 2], None, 2)],
)
def test_complete_answers(ids: Any, logprobs: Any, tokens: int, compact: bool) -> None:
    expected = 5 if ids == [] else tokens  # then only the usage says something
    got = judge_completion(completion(ids, logprobs, compact=compact))
    assert got in (tokens, expected)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize(("ids", "logprobs"), [([1], []), ([], [0.5]), ([1, 2], [0.5]), ([1], [0.5, None])])
def test_unequal_numbers_are_no_result(ids: Any, logprobs: Any, compact: bool) -> None:
    for n in (1, 2):
        with pytest.raises(Elsewhere) as caught:
            judge_completion(completion(ids, logprobs, compact=compact, n=n), n)
        assert caught.value.blame is Blame.NOTHING


@pytest.mark.parametrize("compact", [True, False])
def test_an_aborted_completion_is_no_result(compact: bool) -> None:
    with pytest.raises(Elsewhere) as caught:
        judge_completion(completion([1], [0.5], "abort", compact=compact))
    assert caught.value.blame is Blame.ENGINE


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 200_000), max_size=20),
    st.lists(st.none() | st.floats(-50, 0), max_size=20),
    st.text(max_size=30) | st.sampled_from(['"token_ids":[1,2]', '"finish_reason":"abort"', '],"token_logprobs":[']),
    st.sampled_from(["stop", "length"]),
)
def test_scanning_agrees_with_parsing(ids: list[int], logprobs: list[float | None], text: str, reason: str) -> None:
    def verdict(body: bytes) -> object:
        try:
            return judge_completion(body) or 5
        except Elsewhere as elsewhere:
            return elsewhere.blame

    compact, spaced = (completion(ids, logprobs, reason, text, compact) for compact in (True, False))
    assert verdict(compact) == verdict(spaced)
    assert isinstance(verdict(compact), int) is (len(ids) == len(logprobs))


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"{}", b"<html>", b'{"error":{}}', b'{"choices":null}', b'{"choices":[1]}']
)
def test_what_is_no_completion_is_no_result(body: bytes) -> None:
    with pytest.raises(Elsewhere):
        judge_completion(body)


@pytest.mark.parametrize(
    ("status", "body", "blame"),
    [
        (200, b"", None),
        (400, b"", None),
        (413, b"", None),
        (422, b"", None),
        (404, b"The model `x` does not exist.", Blame.VERSION),
        (404, b'{"detail":"Not Found"}', Blame.ENGINE),
        (401, b"", Blame.ENGINE),
        (302, b"", Blame.ENGINE),
        (429, b"", Blame.NOTHING),
        (500, b"", Blame.ENGINE),
        (503, b"", Blame.ENGINE),
    ],
)
def test_statuses(status: int, body: bytes, blame: Blame | None) -> None:
    if blame is None:
        judge_status(status, body)
        return
    with pytest.raises(Elsewhere) as caught:
        judge_status(status, body)
    assert caught.value.blame is blame


@pytest.mark.parametrize(
    ("status", "body", "verdict"),
    [
        (404, b'{"detail":"Not Found"}', True),
        (404, b"<html>no such Job</html>", False),
        (404, b'{"error":{"message":"The model `x` does not exist."}}', False),
        (307, b"", True),
        (405, b'{"detail":"Method Not Allowed"}', True),
        (501, b"", True),
        (503, b"", False),
        (429, b"", False),
        (401, b"{}", False),
    ],
)
def test_what_an_engine_says_of_a_path(status: int, body: bytes, verdict: bool) -> None:
    assert of_the_path(status, body) is verdict


def test_a_redirect_leads_to_whom_was_asked() -> None:
    headers = [(b"location", b"http://10.0.0.7:8001/v1/completions?x=1"), (b"x", b"http://a/b")]
    assert here(headers) == [(b"location", b"/v1/completions?x=1"), (b"x", b"http://a/b")]
    assert here([(b"location", b"/docs")]) == [(b"location", b"/docs")]


def test_names_are_put_back_where_they_name_the_model() -> None:
    text = json.dumps({"id": 1, "model": "run.1.v1", "text": '"model":"run.1.v1"'}, separators=(",", ":")).encode()
    assert json.loads(renamed(text, "run.1.v1", "trl")) == {"id": 1, "model": "trl", "text": '"model":"run.1.v1"'}
    assert json.loads(renamed(b'{"model" : "run.1.v1"}', "run.1.v1", 'a"b\\1')) == {"model": 'a"b\\1'}
    assert renamed(b'{"model":"other"}', "run.1.v1", "trl") == b'{"model":"other"}'


def test_an_encoding_nobody_asked_for_is_no_result() -> None:
    for headers, body in (([(b"content-encoding", b"br")], b"x"), ([(b"content-encoding", b"gzip")], b"no gzip")):
        with pytest.raises(Elsewhere):
            plain(headers, body)
