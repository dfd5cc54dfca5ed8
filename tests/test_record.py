"""What is left beside a run, and a command whose readers are gone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import record
from jobs.bundle import app_dir
from jobs.errors import ConfigError
from jobs.logs import Forgiving

SPEAKS = """
import logging, subprocess, sys
from jobs import logs
logs.outlive_readers()
logs.to_stderr()
for _ in range(3):
    print("a line", file=sys.stderr)
    logging.getLogger("jobs").warning("another")
    sys.stderr.flush()
with open(%r, "w") as file:
    subprocess.run(["/bin/sh", "-c", "echo a child >&2"])
    print(file.fileno(), flush=True)
"""


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("no directory")
    with pytest.raises(ConfigError, match="runs/x: Not a directory"):
        record.folder("x")


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert record.read(tmp_path) is None
    record.write(tmp_path, {"run": "x", "error": None})
    assert record.read(tmp_path) == {"run": "x", "error": None}


def test_what_was_before_the_command_is_no_time_of_it() -> None:
    assert [record.since(10.0, at) for at in (12.345, 10.0, 9.0, None)] == [2.35, 0.0, None, None]


@pytest.mark.parametrize("lost", ["2>&-", "2>/dev/full", "0<&- 2>&-"])
def test_a_process_outlives_the_reader_of_its_log(tmp_path: Path, lost: str) -> None:
    (tmp_path / "speaks.py").write_text(SPEAKS % str(tmp_path / "file"))
    command = ["/bin/sh", "-c", f'"$0" speaks.py {lost}', sys.executable]
    environment = {"PYTHONPATH": str(app_dir())}
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0 and int(done.stdout) > 2, "no file is opened as what stderr was"
    assert (tmp_path / "file").read_text() == ""


def test_a_pipe_that_nobody_reads_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "speaks.py").write_text(SPEAKS % str(tmp_path / "file"))
    command = [sys.executable, "speaks.py"]
    environment = {"PYTHONPATH": str(app_dir())}
    unread, written = os.pipe()
    os.close(unread)
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=written, text=True)
    os.close(written)
    assert done.returncode == 0 and int(done.stdout) > 2


def test_what_can_be_written_is() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from jobs import logs; logs.outlive_readers(); import click; click.echo('x', err=True)",
        ],
        env={"PYTHONPATH": str(app_dir())},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "x\n"
    assert Forgiving(sys.__stderr__).fileno() == 2  # type: ignore[arg-type]


def test_a_failed_run_leaves_its_reason(tmp_path: Path) -> None:
    """`--json` prints the same."""
    command = [sys.executable, str(app_dir() / "asyncgrpo.py"), "emulate", "digit", "--engine", "sim", "--run", "fails"]
    command += ["--steps", "1", "--set", "trainer.optim=nope", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    summary = json.loads((tmp_path / "runs/fails/summary.json").read_text())
    assert done.returncode == 3 and json.loads(done.stdout) == summary
    assert "nope" in summary["error"] and summary["orphans"] == 0
    assert (summary["replicas"], summary["transport"]) == (2, "s3")
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 2 and "runs/fails already holds a run" in again.stderr
