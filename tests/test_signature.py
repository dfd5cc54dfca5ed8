from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from emulator.signature import Keys, Request, payload_refusal, refusal

KEYS = Keys("AKID", "secret", "token", ("eu-central-1",))
URL = "http://127.0.0.1:9000/b/dir/a%20b%2B%C3%BC~?list-type=2&prefix=x%2Fy%20z&delimiter="


def signed(keys=KEYS, method="PUT", url=URL, region="eu-central-1", in_query=False):
    """A request as another implementation signs it."""
    more = {} if in_query else {"X-Amz-Meta-A": " two  words "}
    data = None if in_query else b"body"
    asked = AWSRequest(method, url, headers={"Host": "127.0.0.1:9000", **more}, data=data)
    credentials = Credentials(keys.access_key, keys.secret_key, keys.session_token)
    if in_query:
        S3SigV4QueryAuth(credentials, "s3", region, expires=60).add_auth(asked)
    else:
        asked.headers["X-Amz-Content-SHA256"] = "230d8358dc8e8890b4c58deeb62912ee2f20357ae92a5cc861b98e68fe31acb5"
        S3SigV4Auth(credentials, "s3", region).add_auth(asked)
    target = asked.url.removeprefix("http://127.0.0.1:9000")
    return Request(method, target, {name.lower(): value for name, value in asked.headers.items()})


def code(request, keys=KEYS, late_s=0.0):
    refused = refusal(request, keys, datetime.now(UTC) + timedelta(seconds=late_s))
    return refused and refused[1]


@pytest.mark.parametrize("in_query", [False, True])
def test_what_another_implementation_signed_is_let_in(in_query):
    assert code(signed(in_query=in_query)) is None


@pytest.mark.parametrize("in_query", [False, True])
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (Keys("OTHER", "secret", "token"), "InvalidAccessKeyId"),
        (Keys("AKID", "guess", "token"), "SignatureDoesNotMatch"),
        (Keys("AKID", "secret", "old"), "InvalidToken"),
        (Keys("AKID", "secret"), "InvalidToken"),
    ],
)
def test_keys_that_are_not_these(keys, expected, in_query):
    assert code(signed(keys, in_query=in_query)) == expected


@pytest.mark.parametrize("in_query", [False, True])
def test_each_part_of_the_request_is_signed(in_query):
    good = signed(in_query=in_query)
    for changed in (
        replace(good, method="GET"),
        replace(good, target=good.target.replace("/dir/", "/dir2/")),
        replace(good, target=good.target.replace("prefix=x", "prefix=")),
        replace(good, headers={**good.headers, "host": "elsewhere"}),
    ):
        assert code(changed) == "SignatureDoesNotMatch"
    assert code(replace(good, headers={**good.headers, "x-amz-acl": "public-read"})) == "AccessDenied"


def test_another_region_is_told():
    refused = refusal(signed(region="us-east-1"), KEYS, datetime.now(UTC))
    assert refused[:2] == (400, "AuthorizationHeaderMalformed") and "expecting 'eu-central-1'" in refused[2]
    assert code(signed(region="us-east-1"), replace(KEYS, regions=())) is None


@pytest.mark.parametrize(
    ("late_s", "expected"), [(890, None), (910, "RequestTimeTooSkewed"), (-910, "RequestTimeTooSkewed")]
)
def test_clocks_may_differ_by_a_quarter_of_an_hour(late_s, expected):
    assert code(signed(), late_s=late_s) == expected


def test_presigned_urls_expire():
    assert code(signed(in_query=True), late_s=50) is None
    assert code(signed(in_query=True), late_s=70) == "AccessDenied"


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer x"}, {"authorization": "AWS4-HMAC-SHA256 nonsense"}])
def test_nonsense_is_refused(headers):
    assert code(Request("GET", "/b", headers)) in ("AccessDenied", "InvalidAccessKeyId")


def test_the_body_is_the_one_that_was_signed():
    request = signed()
    assert payload_refusal(request, b"body") is None
    assert payload_refusal(request, b"other")[1] == "XAmzContentSHA256Mismatch"
    for other in ("UNSIGNED-PAYLOAD", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"):
        assert payload_refusal(replace(request, headers={"x-amz-content-sha256": other}), b"any") is None
