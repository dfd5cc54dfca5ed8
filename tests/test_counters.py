"""Counts of a process that is killed."""

import subprocess
import sys
from pathlib import Path

import pytest

from jobs.counters import Counters

COUNTING = """
import sys
from pathlib import Path
from jobs.counters import Counters

counters = Counters.kept_in(Path(sys.argv[1]))
counters.asked += 7
counters.answered += 4
counters.affinity += 3
counters.cold += 1
counters.spilled += 1
print("counted", flush=True)
sys.stdin.read()
"""


def test_what_was_counted_up_to_sigkill_is_there(tmp_path: Path) -> None:
    file = tmp_path / "counters"
    command = [sys.executable, "-c", COUNTING, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as counting:
        assert counting.stdout and counting.stdout.readline() == b"counted\n"
        counting.kill()
    counters = Counters.read(file)
    assert counters.completions() == {
        "in_flight": 3,
        "asked": 7,
        "answered": 4,
        "lost": 0,
        "cancelled": 0,
        "redispatched": 0,
        "upstream_retries": 0,
    }
    assert counters.routing() == {"decisions": 4, "affinity": 0.75, "cold": 0.25, "spilled": 0.25}


@pytest.mark.parametrize("left", [None, b"", b"cut"])
def test_a_process_that_ended_before_it_counted_left_zeros(tmp_path: Path, left: bytes | None) -> None:
    file = tmp_path / "counters"
    if left is not None:
        file.write_bytes(left)
    counters = Counters.read(file)
    assert set(counters.completions().values()) == {0}
    assert counters.routing() == {"decisions": 0, "affinity": None, "cold": None, "spilled": None}
