"""Roles of a run without models, for tests of what launches and leads: `python roles.py role trainer|replica`.

The replica idles. The trainer writes progress as the real one does, for TEST_STEPS steps, and ends as TEST_END says.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs import attempts, lease
from jobs.bucket import Bucket
from jobs.leader import StandIn
from jobs.progress import Progress, progress_key
from jobs.spec import RunSpec
from jobs.summary import summarize, summary_key


def trainer() -> int:
    bucket, run = Bucket.from_env(os.environ), os.environ["ASYNCGRPO_RUN"]
    spec = RunSpec.read(bucket, run)
    steps, end = int(spec.recipe.trainer["max_steps"]), spec.recipe.description
    if end == "fails at once":
        sys.stdout.write("words of its last line\n")
        return 3
    while end == "never starts":
        time.sleep(0.1)
    progress = Progress(run, attempts.claim(bucket, run), steps, time.time())
    stand_in = StandIn.from_env(bucket, spec, "trainer", os.environ)
    assert stand_in is not None
    stand_in._look_s = 0.1
    stand_in.start()
    sys.stdout.write(f"attempt {progress.attempt}\n")
    for step in range(1, steps + 1):
        progress.add({"step": step, "reward": step / steps, "time": time.time()})
        progress.updated_at = time.time()
        bucket.put(progress_key(run), json.dumps(progress.to_dict()).encode())
        if not lease.keep(bucket, run):
            return 143
        if end == "dies" and progress.attempt == 1:
            os.kill(os.getpid(), 9)
        time.sleep(0.05)
    while end in ("goes on", "replicas die"):
        time.sleep(0.1)
        if not lease.keep(bucket, run):
            return 143
    progress.state = "failed" if end == "fails" else "done"
    progress.reason = "its reasons" if end == "fails" else None
    bucket.put(progress_key(run), json.dumps(progress.to_dict()).encode())
    rows = [{"step": step, "reward": step / steps} for step in range(1, steps + 1)]
    bucket.put(summary_key(run), json.dumps(summarize(spec, progress.to_dict(), rows)).encode())
    stand_in.close(over=True)
    lease.end(bucket, run)
    return 3 if end == "fails" else 0


def replica() -> int:
    sys.stdout.write(f"replica {os.environ['ASYNCGRPO_REPLICA']}\n")
    if RunSpec.read(Bucket.from_env(os.environ), os.environ["ASYNCGRPO_RUN"]).recipe.description == "replicas die":
        sys.stdout.write("words of its last line\n")
        return 3
    time.sleep(60)
    return 0


if __name__ == "__main__":
    sys.exit({"trainer": trainer, "replica": replica}[sys.argv[2]]())
