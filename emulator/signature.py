"""Signature Version 4 as S3 checks it: who signed a request, for where and when, and over what. Pure.

Rules: "Authenticating Requests (AWS Signature Version 4)" in the Amazon S3 API reference, for requests signed in
headers and in the query (presigned URLs).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, unquote

ALGORITHM = "AWS4-HMAC-SHA256"
SKEW_S = 15 * 60
"""How far the clocks of client and server may be apart (the same reference)."""
UNSIGNED = "UNSIGNED-PAYLOAD"

Refusal = tuple[int, str, str]
"""HTTP status, S3 error code, message."""


@dataclass(frozen=True)
class Keys:
    """What a client has to sign with. `regions` are those it may sign for, the first being the right one; none: any."""

    access_key: str
    secret_key: str
    session_token: str | None = None
    regions: Sequence[str] = ()


@dataclass(frozen=True)
class Request:
    """A request as it came: `target` is path and query as sent, header names are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]

    @property
    def path(self) -> str:
        """The path as it was sent."""
        return self.target.partition("?")[0]

    @property
    def query(self) -> list[tuple[str, str]]:
        """The query's pairs, decoded."""
        return parse_qsl(self.target.partition("?")[2], keep_blank_values=True)


@dataclass(frozen=True)
class _Claim:
    """What a request says of its own signature."""

    credential: str
    signed_headers: str
    signature: str
    date: str
    payload: str
    token: str | None
    expires_s: int | None = None


def refusal(request: Request, keys: Keys, now: datetime) -> Refusal | None:
    """Why S3 would not let this request in, in its own words; None if it would."""
    claim = _claim(request)
    if claim is None:
        return 403, "AccessDenied", "Access Denied"
    access_key, _, scope = claim.credential.partition("/")
    if access_key != keys.access_key:
        return 403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records."
    if claim.token != keys.session_token:
        return 400, "InvalidToken", "The provided token is malformed or otherwise invalid."
    day, region, *rest = [*scope.split("/"), "", ""]
    if rest[:2] != ["s3", "aws4_request"]:
        return 400, "AuthorizationHeaderMalformed", "The authorization header is malformed."
    if keys.regions and region not in keys.regions:
        return (
            400,
            "AuthorizationHeaderMalformed",
            f"The authorization header is malformed; the region {region!r} is wrong; expecting {keys.regions[0]!r}",
        )
    try:
        made = datetime.strptime(claim.date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return 403, "AccessDenied", "AWS authentication requires a valid Date or x-amz-date header"
    if claim.expires_s is not None and (now - made).total_seconds() > claim.expires_s:
        return 403, "AccessDenied", "Request has expired"
    if claim.expires_s is None and abs((now - made).total_seconds()) > SKEW_S:
        return (
            403,
            "RequestTimeTooSkewed",
            "The difference between the request time and the current time is too large.",
        )
    signed = claim.signed_headers.split(";")
    if "host" not in signed or any(name.startswith("x-amz-") and name not in signed for name in request.headers):
        return 403, "AccessDenied", "There were headers present in the request which were not signed"
    if not hmac.compare_digest(claim.signature, _signature(request, claim, keys.secret_key, day, region)):
        return (
            403,
            "SignatureDoesNotMatch",
            "The request signature we calculated does not match the signature you provided.",
        )
    return None


def payload_refusal(request: Request, body: bytes) -> Refusal | None:
    """The same for the body: it must be the one whose digest was signed, if one was."""
    signed = request.headers.get("x-amz-content-sha256", UNSIGNED)
    if signed != UNSIGNED and not signed.startswith("STREAMING-") and hashlib.sha256(body).hexdigest() != signed:
        return (
            400,
            "XAmzContentSHA256Mismatch",
            "The provided 'x-amz-content-sha256' header does not match what was computed.",
        )
    return None


def _claim(request: Request) -> _Claim | None:
    headers, query = request.headers, dict(request.query)
    if query.get("X-Amz-Algorithm") == ALGORITHM:
        return _Claim(
            query.get("X-Amz-Credential", ""),
            query.get("X-Amz-SignedHeaders", ""),
            query.get("X-Amz-Signature", ""),
            query.get("X-Amz-Date", ""),
            headers.get("x-amz-content-sha256", UNSIGNED),
            query.get("X-Amz-Security-Token"),
            int(query.get("X-Amz-Expires") or 0),
        )
    algorithm, _, fields = headers.get("authorization", "").partition(" ")
    if algorithm != ALGORITHM:
        return None
    given = dict(field.strip().partition("=")[::2] for field in fields.split(","))
    return _Claim(
        given.get("Credential", ""),
        given.get("SignedHeaders", ""),
        given.get("Signature", ""),
        headers.get("x-amz-date", ""),
        headers.get("x-amz-content-sha256", ""),
        headers.get("x-amz-security-token"),
    )


def _signature(request: Request, claim: _Claim, secret_key: str, day: str, region: str) -> str:
    query = sorted((_encoded(k), _encoded(v)) for k, v in request.query if k != "X-Amz-Signature")
    headers = [(name, " ".join(request.headers.get(name, "").split())) for name in claim.signed_headers.split(";")]
    canonical = "\n".join(
        [
            request.method,
            quote(unquote(request.path), safe="/~"),
            "&".join(f"{name}={value}" for name, value in query),
            *(f"{name}:{value}" for name, value in headers),
            "",
            claim.signed_headers,
            claim.payload,
        ]
    )
    scope = f"{day}/{region}/s3/aws4_request"
    to_sign = "\n".join([ALGORITHM, claim.date, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{secret_key}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, to_sign.encode(), "sha256").hex()


def _encoded(text: str) -> str:
    return quote(text, safe="~")
