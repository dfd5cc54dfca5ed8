"""What every test gets: nothing may outlive it, and a few real things to talk to."""

import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

GRACE_S = 5.0
"""How long a process may take to end after its test: it was told to stop and is on its way."""
MARK = f"ASYNCGRPO_TESTS={os.getpid()}"
"""Stands in the environment of whatever these tests start, by which a process is known after its parent has died."""
BUCKETS = count(1)

os.environ.update([MARK.split("=")])
# A time limit's SIGTERM ends the tests as Ctrl-C does: with fixtures torn down, so that what they started ends too.
signal.signal(signal.SIGTERM, signal.default_int_handler)


def started() -> dict[int, str]:
    """Return {process id: command line} of every living process that these tests started, directly or not."""
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    marked: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if MARK.encode() in (folder / "environ").read_bytes().split(b"\0"):
                marked.add(pid)
        except OSError:  # it ended meanwhile, or is somebody else's
            continue
        # A zombie has no command line. multiprocessing's tracker lives as long as its parent, by design.
        if line and "multiprocessing.resource_tracker" not in line:
            lines[pid] = line

    def ours(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == os.getpid():
                return True
        return False

    return {pid: line for pid, line in lines.items() if pid != os.getpid() and (pid in marked or ours(pid))}


def killed(before: Collection[int] = ()) -> dict[int, str]:
    """Kill what these tests started and left running, apart from `before`, and return what that was."""
    deadline = time.monotonic() + GRACE_S
    while (left := {pid: line for pid, line in started().items() if pid not in before}) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return left


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process behind, and kill what it left."""
    before = started()
    yield
    if left := killed(before):
        pytest.fail(f"{request.node.name} left processes behind: {left}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The same for the fixtures of modules and of the session, which have been torn down by now."""
    if left := killed():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nFixtures left processes behind: {left}", file=sys.stderr)


@pytest.fixture(scope="session")
def groups(tmp_path_factory: pytest.TempPathFactory) -> None:
    """For tests that need network groups: skip them, with the reason, where the emulator cannot have any."""
    from emulator.network import Network

    if lacking := Network().missing(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no network groups on this machine: {lacking}")


@pytest.fixture
def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class MotoBucket:
    """A fresh, empty bucket on a real S3 server in a thread of this process.

    `environ` holds what a Job gets: AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and
    ASYNCGRPO_BUCKET.
    """

    name: str
    endpoint: str
    environ: dict[str, str] = field(repr=False)


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """Yield the URL of a moto S3 server on a free loopback port."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def moto_bucket(moto_endpoint: str) -> MotoBucket:
    """Return a new bucket, unlike any other test's, with the environment that opens it."""
    return new_bucket(moto_endpoint)


def new_bucket(moto_endpoint: str) -> MotoBucket:
    """Make a bucket on the moto server."""
    import boto3

    name = f"test-{next(BUCKETS)}"
    environ = {
        "AWS_ENDPOINT_URL": moto_endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "ASYNCGRPO_BUCKET": f"s3://{name}",
    }
    boto3.client(
        "s3",
        endpoint_url=moto_endpoint,
        region_name=environ["AWS_REGION"],
        aws_access_key_id=environ["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environ["AWS_SECRET_ACCESS_KEY"],
    ).create_bucket(Bucket=name)
    return MotoBucket(name, moto_endpoint, environ)
