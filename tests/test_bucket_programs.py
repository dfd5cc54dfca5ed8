import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from emulator import bucket_programs, tls
from emulator.bucket import BucketDidNotStart
from emulator.bucket_programs import PROGRAMS, ProgramServer, find
from jobs import bundle
from jobs.bucket import Bucket
from jobs.errors import ConfigError
from tests.stores import installed


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_over_https_is_gone_afterwards(name, tmp_path):
    if not installed(name):
        pytest.skip(f"{name} is not on this machine: {PROGRAMS[name].install}")
    server = ProgramServer(name, certificate=tls.issue(tmp_path))
    settings = server.start()
    directory = server._directory
    try:
        assert settings.endpoint.startswith("https://127.0.0.1:")
        Bucket(settings, retry_s=5).put("a", b"1")
        assert Bucket(settings, retry_s=5).list("") == ["a"]
        assert settings.secret_key not in " ".join(server.process.args)
    finally:
        server.stop()
    assert server.process.returncode is not None
    assert not directory.exists()


HOST = """
import pathlib, sys
from emulator.bucket_programs import ProgramServer
server = ProgramServer("seaweedfs", pathlib.Path(sys.argv[1]))
server.start()
print(server.process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(
    not installed("seaweedfs"), reason=f"seaweedfs is not on this machine: {PROGRAMS['seaweedfs'].install}"
)
def test_it_ends_when_its_host_is_killed(tmp_path):
    environ = {**os.environ, "PYTHONPATH": str(bundle.app_dir())}
    with subprocess.Popen(
        [sys.executable, "-c", HOST, str(tmp_path)],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as host:
        pid = int(host.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        host.kill()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_program_that_is_missing_is_told_with_the_fix(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(bucket_programs.sys, "executable", "/nowhere/python")
    for name, program in PROGRAMS.items():
        with pytest.raises(ConfigError, match=f"--bucket {name}: there is no program '{program.executable}'"):
            find(name)


def test_a_program_that_ends_at_once_is_told_with_its_last_lines(monkeypatch, tmp_path):
    script = tmp_path / "minio"
    script.write_text("#!/bin/sh\necho cannot bind: $1 >&2; exit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(bucket_programs.sys, "executable", str(tmp_path / "python"))
    server = ProgramServer("minio")
    with pytest.raises(BucketDidNotStart, match=r"ended with status 3(.|\n)*cannot bind: server"):
        server.start()
    assert not server._directory.exists()
