"""Header rules; the rest of jobs.upstream is an interface, and what a session promises."""

import pytest

from jobs.http import KEY_HEADER
from jobs.upstream import LISTENER_OPTIONS, UnknownModel, request_headers, response_headers

OURS = [(KEY_HEADER.encode(), b"ours"), (b"authorization", b"Bearer ours")]


@pytest.mark.parametrize(
    ("client", "kept"),
    [
        (
            [
                (b"host", b"x"),
                (b"content-length", b"3"),
                (b"authorization", b"theirs"),
                (b"x-asyncgrpo-key", b"theirs"),
            ],
            [],
        ),
        ([(b"connection", b"X-Foo ,keep-alive"), (b"x-foo", b"1"), (b"x-bar", b"2")], [(b"x-bar", b"2")]),
        ([(b"connection", b"a"), (b"connection", b"b"), (b"a", b"1"), (b"b", b"1")], []),
        ([(b"x", b"1"), (b"y", b"2"), (b"x", b"3")], [(b"x", b"1"), (b"y", b"2"), (b"x", b"3")]),
        ([(b"transfer-encoding", b"chunked"), (b"upgrade", b"h2c"), (b"te", b"x"), (b"trailer", b"x")], []),
        ([(b"proxy-authorization", b"x"), (b"expect", b"100-continue"), (b"cookie", b"c")], [(b"cookie", b"c")]),
    ],
)
def test_request_headers(client: list[tuple[bytes, bytes]], kept: list[tuple[bytes, bytes]]) -> None:
    assert request_headers(client, OURS) == kept + OURS


def test_accept_encoding_is_ours_where_answers_are_read() -> None:
    client = [(b"accept-encoding", b"gzip")]
    assert request_headers(client, []) == client
    assert request_headers(client, [], identity=True) == [(b"accept-encoding", b"identity")]


def test_response_headers() -> None:
    headers = [
        (b"set-cookie", b"a"),
        (b"connection", b"x-foo"),
        (b"x-foo", b"1"),
        (b"set-cookie", b"b"),
        (b"etag", b"e"),
    ]
    assert response_headers(headers) == [(b"set-cookie", b"a"), (b"set-cookie", b"b"), (b"etag", b"e")]
    assert (b"etag", b"e") not in response_headers(headers, frozenset({b"etag"}))


def test_unknown_models_are_told_in_vllms_words() -> None:
    assert str(UnknownModel("x")) == "The model `x` does not exist."


def test_the_listener_believes_nobody_about_the_client() -> None:
    assert LISTENER_OPTIONS["proxy_headers"] is False
