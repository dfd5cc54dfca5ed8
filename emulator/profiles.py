"""What S3-compatible stores differ in, as profiles that can be put before any store. Pure.

Each profile refuses what its namesake is documented or known to refuse, so that a client that relies on more fails here
first. Sources: the Hub's page "S3 Compatibility" of storage buckets; the Amazon S3 user guide and API reference;
Cloudflare's "S3 API compatibility" and "Limits" of R2; MinIO's "S3 API compatibility" and "Thresholds and limits".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from emulator.signature import Refusal, Request

NOT_IMPLEMENTED = "NotImplemented"


@dataclass(frozen=True)
class Profile:
    """One store's manners. The defaults are those of Amazon S3."""

    name: str
    regions: tuple[str, ...] = ()
    """Regions a request may be signed for, the bucket's own first; none: whatever the client says."""
    namespace: str = ""
    """First part of every path, before the bucket: the endpoint is a URL with a path."""
    session_token: bool = False
    """Keys are temporary ones, which are good with their token only."""
    checksums: bool = True
    """x-amz-checksum-* and trailers are understood."""
    chunked: bool = True
    """Bodies may be signed in chunks (aws-chunked)."""
    metadata: bool = True
    """User metadata is kept."""
    conditional_reads: bool = True
    list_v1: bool = True
    delimiters: tuple[str, ...] = field(default=())
    """Delimiters that lists take; none: any."""
    empty_pages: bool = False
    """A list's page may be empty though more follow."""
    conflicts: bool = False
    """A conditional PUT that meets another one under way is answered with 409 instead of waiting for it."""
    writes_per_key_s: float = 0.0
    """Seconds after a PUT in which another one to the same key is throttled."""
    keys_are_paths: bool = False
    """Keys are paths on a disk: none may lie below another, nor have a part that is empty or '..'."""


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            "hub",
            regions=("us-east-1",),
            namespace="local",
            checksums=False,
            chunked=False,
            metadata=False,
            conditional_reads=False,
            list_v1=False,
            delimiters=("/",),
        ),
        Profile("aws", regions=("eu-central-1",), session_token=True, empty_pages=True, conflicts=True),
        # An empty region and us-east-1 are aliases of auto; one write per second to a key.
        Profile("r2", regions=("auto", "us-east-1", ""), chunked=False, writes_per_key_s=1.0),
        Profile("minio", keys_are_paths=True),
    )
}


def refusal(profile: Profile, request: Request) -> Refusal | None:
    """Why this store would refuse a request that is signed as it should be; None if it would not.

    `request.target` is as the client sent it, less the profile's namespace.
    """
    headers, query = request.headers, dict(request.query)
    if not profile.metadata and any(name.startswith("x-amz-meta-") for name in headers):
        return 501, NOT_IMPLEMENTED, "User metadata is not supported."
    if not profile.checksums and any(name.startswith(("x-amz-checksum-", "x-amz-trailer")) for name in headers):
        return 501, NOT_IMPLEMENTED, "Checksum headers are not supported: send them only when required."
    if not profile.chunked and headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
        return 501, NOT_IMPLEMENTED, "aws-chunked bodies are not supported."
    if request.method == "GET":
        if not profile.conditional_reads and {"if-match", "if-none-match"} & set(headers):
            return 501, NOT_IMPLEMENTED, "Conditional reads are not supported."
        if not profile.list_v1 and is_list(request) and query.get("list-type") != "2":
            return 501, NOT_IMPLEMENTED, "Only ListObjectsV2 is supported."
        if profile.delimiters and query.get("delimiter", "") not in ("", *profile.delimiters):
            return 501, NOT_IMPLEMENTED, f"The only supported delimiter is {profile.delimiters[0]!r}."
    if profile.keys_are_paths and request.method == "PUT":
        parts = request.path.strip("/").split("/")[1:]
        if any(part in ("", ".", "..") for part in parts):
            return 400, "XMinioInvalidObjectName", "Object name contains unsupported characters."
    return None


def is_list(request: Request) -> bool:
    """Whether it asks for a bucket's objects."""
    inside = request.path.strip("/")
    return (
        request.method == "GET"
        and inside != ""
        and "/" not in inside
        and not {"location", "versioning", "uploads"} & {name for name, _ in request.query}
    )
