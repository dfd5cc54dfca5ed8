"""A user's own TRL script through the command line: nobody but the bucket brings it to the trainer."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from jobs.bucket import Bucket
from tests.conftest import MotoBucket
from tests.e2e.test_emulate import PROGRAM, ROOT

pytestmark = pytest.mark.e2e

SEVENS = ROOT / "tests" / "scripts" / "sevens.toml"


def test_a_script_whose_trainer_is_killed_ends_with_its_adapter_in_the_bucket(
    tmp_path: Path, moto_bucket: MotoBucket
) -> None:
    (tmp_path / "recipe.toml").write_text(SEVENS.read_text())
    (tmp_path / "sevens.py").write_text(SEVENS.with_suffix(".py").read_text())
    done = subprocess.run(
        [*PROGRAM, "emulate", "recipe.toml", "--engine", "sim", "--run", "mine", "--json"]
        + ["--bucket", moto_bucket.environ["ASYNCGRPO_BUCKET"], "--faults", "kill trainer at step 14"],
        cwd=tmp_path,
        env={**os.environ, **moto_bucket.environ},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["steps"], summary["attempt"], summary["trainer_resumes"], summary["orphans"]) == (30, 2, 1, 0)
    assert summary["rollouts_lost"] == 0 and "step 30/30" in done.stderr
    bucket = Bucket.from_env(moto_bucket.environ)
    keys = {key.removeprefix("runs/mine/") for key in bucket.list("runs/mine/")}
    assert {
        "final/adapter_config.json",
        "final/adapter_model.safetensors",
        "metrics/1.jsonl",
        "metrics/2.jsonl",
    } <= keys
    assert "checkpoints/checkpoint-28/complete.json" in keys
    assert json.loads(bucket.get("runs/mine/spec.json"))["recipe"]["script"]["name"] == "sevens.py"
    rows = [json.loads(line) for line in bucket.get("runs/mine/metrics/2.jsonl").splitlines()]
    steps = [row["step"] for row in rows if "event" not in row]
    assert steps == list(range(steps[0], 31)) and steps[0] % 4 == 1 < steps[0]
    log = "".join(file.read_text() for file in tmp_path.glob("runs/mine/logs/*.log"))
    assert log.count("trained 30 steps") == 1
    assert log.count("the script says output_dir = 'sevens'") == 2


def test_a_script_that_is_not_there_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(SEVENS.read_text())
    done = subprocess.run(
        [*PROGRAM, "emulate", "recipe.toml"], cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    assert "trainer.script = 'sevens.py' cannot be read" in done.stderr and "Traceback" not in done.stderr
