"""Trains with every version of TRL that is supported: the real loop on this machine, one run each, and a table of them.

Usage: ./build.sh test-matrix [VERSION...]        all of jobs.versions.TRL by default; exit status 1 if one fails

A version other than that of .venv gets an environment of its own, .venv-trl/<version>: what
requirements/trl-<version>.txt pins, in front of all other packages of .venv. The emulator starts the trainer's Job in
it, as in an image that has this TRL; all else is as in any other run. The trainer is killed on the way and resumes.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packages import ROOT

sys.path.insert(0, str(ROOT))

from jobs.packages import installed
from jobs.versions import TRL

PROGRAM = ROOT / "dist" / "asyncgrpo.pyz"
IMAGE = "trl"
RUN_S = 600.0
"""A run took 100 to 228 s on two cores that others used as well."""
STEPS = 60
KILLED_AT, SAVED_EVERY = 25, 20
CLIMBS = 0.3
"""How much the reward has to rise in so many steps: when first run, it went from .01 to .65, .71 and .70."""
RATIO = (0.8, 1.2)
"""Bounds of every step's mean ratio of probabilities; right weights and steps that learn stay within .9 and 1.1."""
EXPECTED = {"steps": STEPS, "attempt": 2, "trainer_resumes": 1, "rollouts_lost": 0, "orphans": 0}
"""Fields of the summary that have one right value."""
COLUMNS = ("reward_first", "reward_last", "steps", "attempt", "ratio_min", "ratio_max", "rollouts", "rollouts_lost")
TOLD = re.compile(r"jobs\.train: trl (\S+), on the CPU")
"""The line in which the training process says which TRL it has imported."""


@dataclass(frozen=True)
class Outcome:
    """One run: its exit status, its summary (empty without one), and the versions of TRL that its trainers told."""

    version: str
    status: int
    summary: dict[str, Any]
    trained_with: tuple[str, ...]
    folder: Path


def wrong(outcome: Outcome) -> list[str]:
    """What is not as it should be."""
    summary = outcome.summary
    if outcome.status != 0 or not summary:
        return [f"exit status {outcome.status}"]
    found = []
    if set(outcome.trained_with) != {outcome.version}:
        found.append(f"trained with {', '.join(outcome.trained_with) or 'an unknown TRL'}")
    for field, expected in EXPECTED.items():
        if summary[field] != expected:
            found.append(f"{field} {summary[field]} instead of {expected}")
    if not summary["reward_last"] >= summary["reward_first"] + CLIMBS:
        found.append("the reward does not climb")
    if not RATIO[0] <= summary["ratio_min"] <= summary["ratio_max"] <= RATIO[1]:
        found.append(f"ratio outside {RATIO[0]} to {RATIO[1]}")
    return found


def environment(version: str) -> Path:
    """Returns the interpreter whose environment has this TRL; makes the environment if it is not there yet."""
    if version == installed("trl"):
        return Path(sys.executable)
    lock, folder = ROOT / "requirements" / f"trl-{version}.txt", ROOT / ".venv-trl" / version
    python, stamp = folder / "bin" / "python", folder / "installed"
    base = sysconfig.get_path("purelib")
    wanted = hashlib.sha256(f"{base}\n{lock.read_text()}".encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.EnvBuilder(symlinks=True).create(folder)
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    (own / "base.pth").write_text(f"{base}\n")  # behind what the environment has itself
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--require-hashes", "--requirement", str(lock)], check=True, stdout=sys.stderr)
    stamp.write_text(wanted)
    return python


def train(version: str) -> Outcome:
    """Runs the recipe `digit` with this TRL, and reads what it leaves."""
    run = f"trl-{version.replace('.', '-')}-{time.strftime('%m%d-%H%M%S')}"
    command = [sys.executable, str(PROGRAM), "emulate", "digit", "--run", run, "--steps", str(STEPS)]
    command += [
        "--set",
        f"jobs.trainer_image={IMAGE}:{version}",
        "--image",
        f"{IMAGE}:{version}={environment(version)}",
    ]
    command += ["--faults", f"kill trainer at step {KILLED_AT}", "--set", f"trainer.save_steps={SAVED_EVERY}"]
    sys.stderr.write(f"\n== trl {version}\n")
    try:
        status = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, timeout=RUN_S).returncode
    except subprocess.TimeoutExpired:
        status = 124  # as timeout(1) has it
    folder = ROOT / "runs" / run
    summary = folder / "summary.json"
    told = (TOLD.findall(log.read_text(errors="replace")) for log in sorted(folder.glob("logs/*.log")))
    return Outcome(
        version,
        status,
        json.loads(summary.read_text()) if summary.exists() else {},
        tuple(version for each in told for version in each),
        folder,
    )


def table(outcomes: list[Outcome]) -> str:
    """The runs side by side, in Markdown."""
    rows = [["trl", *COLUMNS, "verdict"]]
    rows += [
        [each.version, *(_shown(each.summary.get(name)) for name in COLUMNS), "; ".join(wrong(each)) or "ok"]
        for each in outcomes
    ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _shown(value: object) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def main(versions: list[str]) -> int:
    """Runs these versions, all if none is named. Returns the exit status."""
    if unknown := [version for version in versions if version not in TRL]:
        sys.stderr.write(f"trl {', '.join(unknown)}: not supported; there are {', '.join(TRL)}.\n")
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    outcomes = [train(version) for version in versions or TRL]
    print(table(outcomes))
    failed = [each for each in outcomes if wrong(each)]
    for each in failed:
        sys.stderr.write(f"trl {each.version}: see {each.folder}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
