import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from emulator import reaper

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
ESCAPE = [sys.executable, "-S", "-c", f"import os, subprocess; subprocess.Popen({SLEEP!r}, start_new_session=True)"]


def start_marked(command, mark):
    return subprocess.Popen(command, start_new_session=True, env={**os.environ, reaper.MARK: mark})


def wait_for(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def reaping():
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, mark], stdin=subprocess.PIPE, text=True, start_new_session=True
    )

    def tell(**message):
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()

    yield process, mark, tell
    if process.poll() is None:
        process.stdin.close()
        process.wait()


def test_it_ends_groups_and_those_that_left_them(reaping, tmp_path):
    process, mark, tell = reaping
    (tmp_path / "files" / "deep").mkdir(parents=True)
    grouped = subprocess.Popen(SLEEP, start_new_session=True)
    parent = start_marked(ESCAPE, mark)
    assert parent.wait(timeout=10) == 0
    wait_for(lambda: len(reaper.marked(mark)) == 1)
    tell(group=grouped.pid)
    tell(directory=str(tmp_path / "files"))
    process.stdin.close()
    assert process.wait(timeout=10) == 0
    assert grouped.wait(timeout=1) == -9
    assert reaper.marked(mark) == []
    assert not (tmp_path / "files").exists()


def test_it_leaves_a_group_it_was_told_to_forget(reaping):
    process, _, tell = reaping
    other = subprocess.Popen(SLEEP, start_new_session=True)
    tell(group=other.pid)
    tell(forget=other.pid)
    process.stdin.close()
    assert process.wait(timeout=10) == 0
    assert other.poll() is None
    other.kill()
    other.wait()


def ignored_signals(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("SigIgn")).split()[1], 16)


def test_it_ignores_signals_meant_for_its_parent(reaping):
    process, _, tell = reaping
    other = subprocess.Popen(SLEEP, start_new_session=True)
    tell(group=other.pid)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        wait_for(lambda signum=signum: ignored_signals(process.pid) & 1 << (signum - 1))
        process.send_signal(signum)
    process.stdin.close()
    assert process.wait(timeout=10) == 0
    assert other.wait(timeout=1) == -9


def test_zombies_are_not_alive():
    child = subprocess.Popen(["true"], start_new_session=True)
    wait_for(lambda: "Z" in Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2])
    assert reaper.in_group(child.pid) == []
    child.wait()
