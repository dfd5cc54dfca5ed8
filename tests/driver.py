"""A trainer as its server sees it: what TRL 1.16 sends, without a model. `python -m tests.driver URL IN_FLIGHT`

The main thread does one synchronous call for each line on standard input, patiently as `jobs.trl_patches` has it; a
thread keeps IN_FLIGHT rollouts under way, each with a body of its own that is sent again, the same, after any error,
with TRL's pauses. What happens is told on standard output, a JSON object a line; times are of CLOCK_MONOTONIC, which is
one clock for all processes of a machine.
"""

import asyncio
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from typing import Any

import aiohttp
import requests

from jobs import processes
from jobs.trl_patches import PatientRequests

PROMPTS, GROUP, MAX_TOKENS = 24, 4, 8
OUTER_TRIES, INNER_TRIES = 30, 3
"""TRL wraps its retries of a request in more retries."""
RETRYABLE = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


def prompt(number: int) -> list[int]:
    """Twenty tokens: longer than a block, so that a prompt has an engine of its own."""
    return [3 + (7 * number + n) % 50 for n in range(20)]


def tell(**event: Any) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")  # two threads tell; a short write to a pipe is one piece


class Rollouts:
    """The rollout process of TRL: completions under the version that is current when each starts."""

    def __init__(self, url: str, in_flight: int) -> None:
        self.url, self.in_flight, self.version, self.stopping = url, in_flight, 0, False
        self._count = 0

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as self._session:
            await asyncio.gather(*(self._one_after_another() for _ in range(self.in_flight)))
        tell(event="stopped", rollouts=self._count)

    async def _one_after_another(self) -> None:
        while not self.stopping:
            if not self.version:
                await asyncio.sleep(0.01)
                continue
            number, self._count = self._count, self._count + 1
            await self._rollout(number, number // GROUP % PROMPTS, self.version)

    async def _rollout(self, number: int, prompt_number: int, version: int) -> None:
        body = {
            "model": f"trl-policy-v{version}",
            "prompt": prompt(prompt_number),
            "max_tokens": MAX_TOKENS,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "repetition_penalty": 1.0,
            "n": 1,
            "return_token_ids": True,
            "logprobs": 0,
            "seed": random.getrandbits(63),
        }
        asked, errors = time.monotonic(), Counter[str]()
        answer = await self._patiently(body, errors)
        choice = answer["choices"][0]
        tell(
            event="answered",
            rollout=number,
            version=version,
            prompt=prompt_number,
            seed=body["seed"],
            model=answer["model"],
            tokens=choice["token_ids"],
            logprobs=choice["logprobs"]["token_logprobs"],
            asked=asked,
            at=time.monotonic(),
            errors=errors,
        )

    async def _patiently(self, body: dict[str, Any], errors: Counter[str]) -> Any:
        for outer in range(OUTER_TRIES):
            for inner in range(INNER_TRIES):
                try:
                    async with self._session.post(
                        f"{self.url}/v1/completions", json=body, timeout=aiohttp.ClientTimeout(total=600)
                    ) as response:
                        response.raise_for_status()
                        return await response.json()
                except RETRYABLE as error:
                    errors[str(getattr(error, "status", type(error).__name__))] += 1
                    last = inner == INNER_TRIES - 1
                    await asyncio.sleep(2 ** min(outer if last else inner, 4))
        raise AssertionError(f"a rollout was lost: {errors}")


def main(url: str, in_flight: int) -> None:
    processes.die_with_parent(int(os.environ["ASYNCGRPO_PARENT"]))
    http = PatientRequests(requests)
    rollouts = Rollouts(url, in_flight)
    thread = threading.Thread(target=rollouts.run, daemon=True)
    thread.start()
    for line in sys.stdin:
        command = json.loads(line)
        what, began = command["do"], time.monotonic()
        status, words = 200, ""
        if what == "roll":
            rollouts.version = command["version"]
        elif what == "stop":
            rollouts.stopping = True
            thread.join()
        else:
            answer = http.post(f"{url}{what}", json=command.get("body"), timeout=1800)
            status, words = answer.status_code, answer.text
        tell(event="done", do=what, status=status, words=words, began=began, at=time.monotonic())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
