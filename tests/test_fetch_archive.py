"""What brings the archive into a Job, run as a Job runs it: `python3 -c <source>` on a bare interpreter."""

import hashlib
import io
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import fetch_archive
from jobs.bucket import Bucket, BucketSettings
from jobs.launch import ARCHIVE, Launch
from jobs.site import Site
from tests.conftest import MotoBucket
from tests.test_launch import recipe

SOURCE = Path(fetch_archive.__file__).read_text()


def archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("__main__.py", "import sys; print('here', *sys.argv[1:])")
    return file.getvalue()


def run(environ: dict[str, str], *args: str, source: str = SOURCE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", "-c", source, *args]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("prefix", ["", "/with space/ünd+more"])
def test_the_archive_is_fetched_verified_and_started(moto_bucket: MotoBucket, prefix: str) -> None:
    environ = {**moto_bucket.environ, "ASYNCGRPO_BUCKET": moto_bucket.environ["ASYNCGRPO_BUCKET"] + prefix}
    data = archive()
    sha256 = hashlib.sha256(data).hexdigest()
    Bucket(BucketSettings.from_env(environ)).put(f"archives/{sha256}/{ARCHIVE}", data)
    done = run(environ, f"archives/{sha256}/{ARCHIVE}", sha256, "role", "trainer")
    assert (done.returncode, done.stdout) == (0, "here role trainer\n"), done.stderr


def test_another_archive_is_not_started(moto_bucket: MotoBucket) -> None:
    Bucket(BucketSettings.from_env(moto_bucket.environ)).put("archives/x", archive())
    done = run(moto_bucket.environ, "archives/x", "0" * 64)
    assert done.returncode == 1 and "not the one that was launched" in done.stderr and not done.stdout


def test_one_that_is_not_there_is_told_without_secrets(moto_bucket: MotoBucket) -> None:
    hasty = SOURCE.replace("SHOWN_S = 30.0", "SHOWN_S = 0.0")
    done = run(moto_bucket.environ, "archives/none", "0" * 64, source=hasty)
    assert done.returncode == 1 and "404" in done.stderr
    assert moto_bucket.environ["AWS_SECRET_ACCESS_KEY"] not in done.stderr


def test_the_signature_is_the_one_that_an_s3_client_makes(moto_bucket: MotoBucket) -> None:
    """moto checks none, so it is compared with minio's for the same request at the same second."""
    from datetime import UTC, datetime
    from urllib.parse import urlsplit

    from minio.credentials import Credentials
    from minio.signer import sign_v4_s3
    from urllib3 import HTTPHeaderDict

    environ = {**moto_bucket.environ, "AWS_SESSION_TOKEN": "session", "ASYNCGRPO_BUCKET": "s3://b/a+b c"}
    now = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
    made = fetch_archive.request("archives/é/x.pyz", environ, now.timetuple())
    headers = {name.lower(): value for name, value in made.header_items() if name.lower() != "authorization"}
    keys = Credentials(environ["AWS_ACCESS_KEY_ID"], environ["AWS_SECRET_ACCESS_KEY"], "session")
    signed = sign_v4_s3(
        method="GET",
        url=urlsplit(made.full_url),
        region=environ["AWS_REGION"],
        headers=HTTPHeaderDict(headers),
        credentials=keys,
        content_sha256="UNSIGNED-PAYLOAD",
        date=now,
    )
    assert made.get_header("Authorization").replace(", ", ",") == signed["Authorization"].replace(", ", ",")


def test_only_the_hubs_own_buckets_are_mounted() -> None:
    own = BucketSettings("s3://b/p", "https://s3.hf.co/me", "k", "s")
    site = Site("https://huggingface.co", "t", "me", own)
    plans = {}
    for name, settings in (("own", own), ("other", replace(own, endpoint="https://x.r2.cloudflarestorage.com"))):
        plans[name] = Launch(replace(site, bucket=settings), recipe(), "run", "vllm", None, 0).plans(Path("x"), "abc")
    (volume,) = plans["own"]["replica"].volumes
    assert (volume.source, volume.path, volume.read_only) == ("me/b", "p/archives/abc", True)
    assert plans["own"]["replica"].command == ["python3", "/asyncgrpo/asyncgrpo.pyz", "role", "replica"]
    assert plans["other"]["replica"].volumes == []
    assert plans["other"]["replica"].command == [
        "python3",
        "-c",
        SOURCE,
        "archives/abc/asyncgrpo.pyz",
        "abc",
        "role",
        "replica",
    ]
    trainer = plans["own"]["trainer"].command
    assert trainer[:2] == ["bash", "-c"] and " pip install " in trainer[2]
    assert "&& exec python3 /asyncgrpo/asyncgrpo.pyz role trainer;" in trainer[2]
