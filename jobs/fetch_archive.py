"""Brings asyncgrpo.pyz into a Job from a bucket that the Hub cannot mount, and becomes it.

`python3 -c <this file> KEY SHA256 role ...`: standard library only, for nothing else is there yet. The bucket is that
of the environment (ASYNCGRPO_BUCKET, AWS_*); the request is signed as in
https://docs.aws.amazon.com/IAM/latest/UserGuide/create-signed-request.html, path style, so no secret is in a URL.
"""

import hashlib
import hmac
import os
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

RETRY_S = 120.0
"""As jobs.bucket.RETRY_S."""
SHOWN_S = 30.0
"""As jobs.bucket.SHOWN_S."""


def request(key: str, environ: Mapping[str, str], now: time.struct_time) -> urllib.request.Request:
    """A signed GET of the object."""
    where = urllib.parse.urlsplit(environ["AWS_ENDPOINT_URL"])
    name = environ["ASYNCGRPO_BUCKET"][len("s3://") :]
    path = urllib.parse.quote("/".join([where.path.rstrip("/"), name.strip("/"), key]))
    region, stamp = environ["AWS_REGION"], time.strftime("%Y%m%dT%H%M%SZ", now)
    headers = {"host": where.netloc, "x-amz-content-sha256": "UNSIGNED-PAYLOAD", "x-amz-date": stamp}
    if environ.get("AWS_SESSION_TOKEN"):
        headers["x-amz-security-token"] = environ["AWS_SESSION_TOKEN"]
    signed = ";".join(sorted(headers))
    lines = [f"{each}:{headers[each]}" for each in sorted(headers)]
    canonical = "\n".join(["GET", path, "", *lines, "", signed, "UNSIGNED-PAYLOAD"])
    scope = [stamp[:8], region, "s3", "aws4_request"]
    digest = ("AWS4" + environ["AWS_SECRET_ACCESS_KEY"]).encode()
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    for part in [*scope, "\n".join(["AWS4-HMAC-SHA256", stamp, "/".join(scope), hashed])]:
        digest = hmac.new(digest, part.encode(), hashlib.sha256).digest()
    credential = "/".join([environ["AWS_ACCESS_KEY_ID"], *scope])
    signature = f"SignedHeaders={signed}, Signature={digest.hex()}"
    headers["authorization"] = f"AWS4-HMAC-SHA256 Credential={credential}, {signature}"
    return urllib.request.Request(f"{where.scheme}://{where.netloc}{path}", headers=headers)


def fetch(key: str, environ: Mapping[str, str]) -> bytes:
    """The object's bytes; what passes is tried again, and a bucket may show the object late."""
    started = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(request(key, environ, time.gmtime()), timeout=60) as answer:
                return bytes(answer.read())
        except OSError as error:
            patience_s = {404: SHOWN_S, **dict.fromkeys((429, 500, 502, 503, 504), RETRY_S)}
            if time.monotonic() - started > patience_s.get(getattr(error, "code", 503), 0.0):
                sys.exit(f"asyncgrpo.pyz could not be fetched from {environ['ASYNCGRPO_BUCKET']}: {error}")
            time.sleep(1)


def main() -> None:
    """Fetches, verifies, and becomes the archive."""
    key, sha256, rest = sys.argv[1], sys.argv[2], sys.argv[3:]
    data = fetch(key, os.environ)
    if hashlib.sha256(data).hexdigest() != sha256:
        sys.exit("asyncgrpo.pyz in the bucket is not the one that was launched")
    file = Path(tempfile.mkdtemp(), "asyncgrpo.pyz")
    file.write_bytes(data)
    os.execv(sys.executable, [sys.executable, str(file), *rest])


if __name__ == "__main__":
    main()
