"""Attempts: each start of a run's trainer is one, with a number of its own that no other start can have."""

import json
import time
import uuid

from jobs.bucket import Bucket


def claim(bucket: Bucket, run: str) -> int:
    """Takes the next free attempt of the run, counted from 1, by a conditional PUT."""
    prefix = f"runs/{run}/attempts/"
    taken = [int(key.removeprefix(prefix).removesuffix(".json")) for key in bucket.list(prefix)]
    attempt = max(taken, default=0) + 1
    claimant = json.dumps({"nonce": uuid.uuid4().hex, "claimed_at": time.time()}).encode()
    while not bucket.put_new(f"{prefix}{attempt}.json", claimant):
        attempt += 1
    return attempt
