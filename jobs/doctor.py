"""`asyncgrpo doctor`: checks what a run needs before it costs anything. Each check is ok or says the fix."""

import json
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
from huggingface_hub import get_token
from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

from jobs import hub, packages, preflight, versions
from jobs.bucket import Bucket, BucketSettings
from jobs.crew import PORT
from jobs.errors import AsyncgrpoError, ConfigError
from jobs.packages import Packages
from jobs.site import HUB

PATIENCE_S = 10.0
"""How long each check may try: somebody waits at a terminal."""
CALLS = 50
"""Calls that starting a run may take: each Job's creation, with looks whether it is there, and some listings."""
CLOCK_S = 60.0
"""Clock skew that is told: S3 signatures fail at 15 minutes (AWS documentation), and logs mislead before that."""


@dataclass(frozen=True)
class Finding:
    """One line. `ok` None: it does not matter for every use, `detail` says for which."""

    check: str
    ok: bool | None
    detail: str
    fix: str = ""


def run(environ: Mapping[str, str], namespace: str | None, bucket: str | None, as_json: bool) -> int:
    """Prints all findings; returns 0 if none is bad, else 2."""
    findings = examine(environ, namespace, bucket)
    if as_json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings]) + "\n")
    else:
        for each in findings:
            mark = {True: "ok  ", False: "BAD ", None: "--  "}[each.ok]
            sys.stdout.write(f"{mark} {each.check:12} {each.detail}" + (f" FIX: {each.fix}" if each.fix else "") + "\n")
    return ConfigError.exit_status if any(each.ok is False for each in findings) else 0


def examine(environ: Mapping[str, str], namespace: str | None, bucket: str | None) -> list[Finding]:
    """All checks, in the order in which they are worth mending."""
    return [*check_hub(environ, namespace), *check_bucket(environ, bucket), *check_machine()]


def check_hub(environ: Mapping[str, str], namespace: str | None) -> list[Finding]:
    """Token, namespace, flavors and the clock, against the Hub that HF_ENDPOINT names."""
    endpoint = environ.get("HF_ENDPOINT") or HUB
    token = environ.get("HF_TOKEN") or get_token()
    found = [check_clock(endpoint)]
    if not token:
        return [Finding("token", False, "none", "hf auth login, or set HF_TOKEN to one that may write"), *found]
    api = hub.connect(endpoint, token)
    try:
        me = hub.patiently(api.whoami, PATIENCE_S)
        kind = ((me.get("auth") or {}).get("accessToken") or {}).get("role")
        found.insert(0, Finding("token", True, f"{me['name']} at {endpoint}" + (f", {kind}" if kind else "")))
    except hub.UNSURE as error:
        fix = (
            f"make a token that may write at {endpoint}/settings/tokens"
            if hub.status_of(error)
            else "check HF_ENDPOINT"
        )
        return [Finding("token", False, _words(error), fix), *found]
    try:
        jobs = hub.list_jobs(api, namespace or me["name"], patience_s=PATIENCE_S)
        alive = sum(job.status.stage in ("RUNNING", "SCHEDULING") for job in jobs)
        found.append(Finding("jobs", True, f"namespace {namespace or me['name']}: {alive} alive"))
        found.append(check_quota(endpoint, token))
        flavors = hub.patiently(api.list_jobs_hardware, PATIENCE_S)
        gpus = [flavor.name for flavor in flavors if flavor.accelerator]
        found.append(Finding("flavors", True, f"{len(flavors)}, with GPUs: {', '.join(gpus)}"))
    except hub.UNSURE as error:
        fix = "name a --namespace in which the token may run Jobs; Jobs need a plan that can pay"
        found.append(Finding("jobs", False, _words(error), fix))
    return found


def check_quota(endpoint: str, token: str) -> Finding:
    """How many calls of the Hub's API are left in this window, by its `RateLimit` headers
    (https://huggingface.co/docs/hub/rate-limits)."""
    answer = httpx.get(f"{endpoint}/api/whoami-v2", headers={"authorization": f"Bearer {token}"}, timeout=PATIENCE_S)
    told = parse_ratelimit_headers(answer.headers)
    if told is None:
        return Finding("quota", None, "the Hub does not tell how many calls are left")
    left = f"{told.remaining} of {told.limit} calls left for {told.reset_in_seconds} s"
    few = told.remaining < CALLS
    fix = f"wait {told.reset_in_seconds} s, and find what asks so often" if few else ""
    return Finding("quota", not few, left, fix)


def check_clock(endpoint: str) -> Finding:
    """This machine's clock against the Hub's `Date` header."""
    try:
        answer = httpx.head(endpoint, timeout=PATIENCE_S)
        skew_s = (datetime.now(UTC) - parsedate_to_datetime(answer.headers["date"])).total_seconds()
    except (httpx.TransportError, KeyError, ValueError) as error:
        return Finding("clock", None, f"not compared: {_words(error)}")
    late = abs(skew_s) > CLOCK_S
    fix = "set this machine's clock (timedatectl set-ntp true)" if late else ""
    return Finding("clock", not late, f"{skew_s:+.0f} s against {endpoint}", fix)


def check_bucket(environ: Mapping[str, str], url: str | None) -> list[Finding]:
    """Reads, writes, conditional writes and deletes under a name of its own, which is gone afterwards."""
    try:
        settings = BucketSettings.from_env(environ if url is None else {**environ, "ASYNCGRPO_BUCKET": url})
        bucket = Bucket(settings, retry_s=PATIENCE_S)
    except ConfigError as error:
        return [Finding("bucket", False, str(error), "set AWS_* and --bucket s3://bucket[/prefix]")]
    where = f"{settings.url} at {settings.endpoint}, path style, region {settings.region}"
    key = f"doctor/{uuid.uuid4().hex}"
    steps: list[tuple[str, Callable[[], bool], str]] = [
        ("write", lambda: bucket.put_new(key, b"1"), "the key needs the right to write objects"),
        ("read", lambda: bucket.get(key) == b"1", "the key needs the right to read objects"),
        ("list", lambda: bucket.list("doctor/").count(key) == 1, "the key needs the right to list the bucket"),
        (
            "If-None-Match",
            lambda: not bucket.put_new(key, b"2"),
            "this store ignores conditional writes: use another one",
        ),
        (
            "If-Match",
            lambda: not bucket.put_if(key, b"3", '"no-such-etag"'),
            "this store ignores If-Match: use another one",
        ),
    ]
    try:
        for name, holds, fix in steps:
            try:
                if not holds():
                    return [Finding("bucket", False, f"{where}: {name} does not work", fix)]
            except (AsyncgrpoError, OSError) as error:
                return [Finding("bucket", False, f"{where}: {name}: {_words(error)}", fix)]
    finally:
        try:
            bucket.delete([key])
        except AsyncgrpoError:
            pass
    return [Finding("bucket", True, f"{where}: read, write, list, If-None-Match, If-Match")]


def check_machine() -> list[Finding]:
    """GPUs, packages, FUSE and the port, which only matter where roles run on this machine."""
    found = []
    cards = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    found.append(Finding("gpus", None, ", ".join(cards) or "none here (Jobs have their own)"))
    here = packages.here()
    found += [_package(name, here) for name in ("torch", "vllm", "trl", "peft")]
    needs = {"/dev/fuse": os.access("/dev/fuse", os.R_OK | os.W_OK), "fusermount3": shutil.which("fusermount3")}
    lacking = " and no ".join(name for name, there in needs.items() if not there)
    found.append(
        Finding("fuse", None, f"no {lacking}: emulated volumes are directories" if lacking else ", ".join(needs))
    )
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("0.0.0.0", PORT))
        found.append(Finding("port", None, f"{PORT} is free"))
    except OSError as error:
        found.append(Finding("port", None, f"{PORT}: {error.strerror}; a replica on this machine needs it"))
    return found


def _package(name: str, here: Packages) -> Finding:
    if name not in here.folders:
        return Finding(name, None, f"not installed (emulate and roles on this machine need it: {preflight.INSTALL})")
    version = here.versions[name]
    if version is None:
        return Finding(name, None, "installed, of unknown version")
    check = {"trl": versions.check_trl, "vllm": versions.check_vllm}.get(name)
    try:
        if check is not None:
            check(version, "here")
    except ConfigError as error:
        return Finding(name, False, version, str(error))
    return Finding(name, True, version)


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
