import pytest

from emulator.profiles import PROFILES, is_list, refusal
from emulator.signature import Request

GET, PUT = "GET", "PUT"
EVERYTHING = {
    "user metadata": Request(PUT, "/b/k", {"x-amz-meta-a": "1"}),
    "checksum": Request(PUT, "/b/k", {"x-amz-checksum-crc32": "AAAA"}),
    "trailer": Request(PUT, "/b/k", {"x-amz-trailer": "x-amz-checksum-crc32"}),
    "chunked": Request(PUT, "/b/k", {"x-amz-content-sha256": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"}),
    "conditional read": Request(GET, "/b/k", {"if-none-match": '"x"'}),
    "list v1": Request(GET, "/b?prefix=x", {}),
    "delimiter": Request(GET, "/b?list-type=2&delimiter=-", {}),
    "empty part": Request(PUT, "/b/a//b", {}),
    "dots": Request(PUT, "/b/a/../b", {}),
}
REFUSES = {
    "hub": {"user metadata", "checksum", "trailer", "chunked", "conditional read", "list v1", "delimiter"},
    "aws": set(),
    "r2": {"chunked"},
    "minio": {"empty part", "dots"},
}


@pytest.mark.parametrize("name", PROFILES)
def test_each_profile_refuses_what_its_namesake_does(name):
    assert {what for what, request in EVERYTHING.items() if refusal(PROFILES[name], request)} == REFUSES[name]


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize(
    "request_",
    [
        Request(PUT, "/b/k", {"if-none-match": "*"}),
        Request(PUT, "/b/k", {"if-match": '"x"'}),
        Request(GET, "/b/k", {}),
        Request(GET, "/b?list-type=2&prefix=a&delimiter=%2F", {}),
        Request(GET, "/b?list-type=2&delimiter=", {}),
        Request("DELETE", "/b/k", {}),
        Request("POST", "/b/k?uploads", {}),
    ],
)
def test_none_refuses_what_the_client_relies_on(name, request_):
    assert refusal(PROFILES[name], request_) is None


@pytest.mark.parametrize(
    ("method", "target", "expected"),
    [
        ("GET", "/b?list-type=2", True),
        ("GET", "/b/", True),
        ("GET", "/b/k", False),
        ("GET", "/", False),
        ("GET", "/b?location", False),
        ("GET", "/b?uploads=", False),
        ("PUT", "/b", False),
    ],
)
def test_is_list(method, target, expected):
    assert is_list(Request(method, target, {})) == expected
