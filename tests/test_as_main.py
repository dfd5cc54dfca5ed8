import subprocess
import sys
from pathlib import Path

import pytest

from jobs.bundle import app_dir

RUNNER = """
import sys
from pathlib import Path
from jobs import as_main
main = as_main.become(Path(sys.argv[1]), Path(sys.argv[2]).read_text(), sys.argv[3:])
as_main.run(main)
print("after")
"""
SCRIPT = """
import multiprocessing, pickle, sys
import neighbour
print(f"{__name__} {__spec__} {sys.argv[1:]} {neighbour.VALUE}", flush=True)

class Kept:
    def double(self, number):
        return 2 * number

def work(kept, answers):
    answers.put((__name__, kept.double(4)))

if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Kept())).double(2) == 4
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=work, args=(Kept(), answers))
    process.start()
    print(*answers.get(timeout=60), flush=True)
    process.join()
"""


def run(folder: Path, text: str, *args: str) -> subprocess.CompletedProcess[str]:
    (folder / "given.py").write_text(text)
    (folder / "there").mkdir(exist_ok=True)
    (folder / "there" / "neighbour.py").write_text("VALUE = 'found'")
    command = [sys.executable, "-c", RUNNER, str(folder / "there" / "train.py"), str(folder / "given.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(app_dir())})


def test_a_script_is_main_and_what_it_spawns_imports_it(tmp_path: Path) -> None:
    done = run(tmp_path, SCRIPT, "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "__main__ None ['--steps', '3'] found",
        "__mp_main__ None ['--steps', '3'] found",
        "__mp_main__ 8",
        "after",
    ]


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("import sys\nsys.exit()", 0, ""),
        ("import sys\nsys.exit(0)", 0, ""),
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('no such thing')", 1, "no such thing"),
        ("x = 1\nraise KeyError('lost')", 1, 'train.py", line 2, in <module>\n    raise KeyError'),
    ],
)
def test_how_a_script_may_end(tmp_path: Path, text: str, status: int, words: str) -> None:
    done = run(tmp_path, text)
    assert done.returncode == status and words in done.stderr
    assert ("after" in done.stdout) == (status == 0)
