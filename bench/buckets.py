"""`digit` on every S3 server that the emulator can start, over both transports: does it learn, and what does it cost?

    python bench/buckets.py [--steps 60] [--engine vllm] [BUCKET ...]

Prints a row of a table for each run as it ends; exit status 1 if one failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUCKETS = ("moto", "moto:aws", "moto:r2", "moto:minio", "seaweedfs")
TRANSPORTS = ("s3", "mount")
COLUMNS = ("reward_first", "reward_last", "rollouts_lost", "orphans", "weight_sync_s_p50", "wall_s")


def emulate(arguments: list[str]) -> dict[str, float]:
    """The summary of one run. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "dist/asyncgrpo.pyz"), "emulate", "digit", *arguments, "--json"]
        return json.loads(subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE).stdout)


def main() -> int:
    """Run them one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="60")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("buckets", nargs="*", default=BUCKETS, metavar="BUCKET")
    options = parser.parse_args()
    print("| bucket | transport | " + " | ".join(COLUMNS) + " | load |\n|" + "---|" * (len(COLUMNS) + 3), flush=True)
    status = 0
    for bucket in options.buckets:
        for transport in TRANSPORTS:
            run = ["--bucket", bucket, "--transport", transport, "--steps", options.steps, "--engine", options.engine]
            load = os.getloadavg()[0]
            try:
                summary = emulate(run)
            except subprocess.CalledProcessError as error:
                print(f"| {bucket} | {transport} | exit status {error.returncode} |", flush=True)
                status = 1
                continue
            figures = " | ".join(f"{summary[column]:.4g}" for column in COLUMNS)
            print(f"| {bucket} | {transport} | {figures} | {load:.1f} |", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
