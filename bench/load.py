"""Load for engines: completions of random prompts, a fixed number in flight, and what the engines make of them.

Tokens are counted by the engines themselves (`vllm:generation_tokens_total`) between two moments of a steady load, so
that neither the start nor the end of single completions matters. Processor time is that of the engines' processes.
"""

import asyncio
import os
import random
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

GROUP = 8
"""Completions of one prompt, as with TRL's num_generations."""
COUNTER = re.compile(rb"^vllm:generation_tokens_total\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)
STEPS = re.compile(rb"^vllm:iteration_tokens_total_count\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Shape:
    """What is asked for: prompts of `prompt_tokens` random ids below `vocabulary`, `new_tokens` new ones each."""

    model: str
    prompt_tokens: int = 128
    new_tokens: int = 256
    vocabulary: int = 32000
    logprobs: int | None = 0
    seeded: bool = False
    way: str = "tokens"
    """`tokens`: as TRL asks, which a replica answers for tokens alone (jobs.tokens). `vllm`: the same with a member
    that has no effect, so that vLLM's /v1/completions answers it. `generate`: vLLM's /inference/v1/generate."""


@dataclass(frozen=True)
class Result:
    """What a load gave. Processor seconds are per thousand tokens, summed over the engines, by kind of process."""

    in_flight: int
    engines: int
    tokens_per_s: float
    steps_per_s: float
    """Of one engine, on the mean."""
    failed: int
    cpu: Mapping[str, float]


def request(shape: Shape, prompt: list[int], new_tokens: int, draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Path and body of one completion."""
    sampling: dict[str, Any] = {
        "max_tokens": new_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "n": 1,
        "ignore_eos": True,  # weights are random: every completion has its full length
    }
    if shape.seeded:
        sampling["seed"] = draw.getrandbits(63)
    if shape.logprobs is not None:
        sampling["logprobs"] = shape.logprobs
    if shape.way == "generate":
        sampling |= {"detokenize": False, "output_kind": 2}  # RequestOutputKind.FINAL_ONLY
        return "/inference/v1/generate", {"model": shape.model, "token_ids": prompt, "sampling_params": sampling}
    if shape.way == "vllm":
        sampling["user"] = "bench"
    return "/v1/completions", {"model": shape.model, "prompt": prompt, "return_token_ids": True, **sampling}


async def run(
    urls: Sequence[str],
    headers: Mapping[str, str],
    shape: Shape,
    in_flight: int,
    warm_s: float,
    measure_s: float,
    processes: Mapping[str, Iterable[int]] | None = None,
    counters: Sequence[str] = (),
) -> Result:
    """Keeps `in_flight` completions going, spread evenly over `urls`, and measures after `warm_s`.

    `counters` are the engines' URLs if `urls` is a proxy before them. `processes` are pids by kind of process.
    """
    draw = random.Random(in_flight * 1000 + len(urls))
    failed = 0
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers=headers, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def worker(url: str, prompts: list[list[int]]) -> None:
            nonlocal failed
            new_tokens = draw.randint(1, shape.new_tokens)  # so that not all end and begin at the same time
            while True:
                path, body = request(shape, prompts[0], new_tokens, draw)
                new_tokens = shape.new_tokens
                if draw.random() < 1 / GROUP:
                    prompts[0] = _prompt(shape, draw)
                try:
                    async with session.post(url + path, json=body) as answer:
                        await answer.read()
                        failed += answer.status != 200
                except aiohttp.ClientError:
                    failed += 1
                if failed > 10 * in_flight:
                    raise RuntimeError(f"{failed} completions failed")

        tasks = []
        for first in range(0, in_flight, GROUP):
            shared = [_prompt(shape, draw)]
            url = urls[first // GROUP % len(urls)]
            tasks += [asyncio.create_task(worker(url, shared)) for _ in range(min(GROUP, in_flight - first))]
        try:
            watched = list(counters or urls)
            await asyncio.sleep(warm_s)
            before, cpu_before, start = await _count(session, watched), _cpu(processes), time.monotonic()
            await asyncio.sleep(measure_s)
            after, cpu_after, end = await _count(session, watched), _cpu(processes), time.monotonic()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    tokens = after[0] - before[0]
    return Result(
        in_flight,
        len(watched),
        tokens / (end - start),
        (after[1] - before[1]) / (end - start) / len(watched),
        failed,
        {kind: (cpu_after[kind] - cpu_before[kind]) / tokens * 1000 if tokens else 0.0 for kind in cpu_before},
    )


def _prompt(shape: Shape, draw: random.Random) -> list[int]:
    return [draw.randrange(shape.vocabulary) for _ in range(shape.prompt_tokens)]


async def _count(session: aiohttp.ClientSession, urls: Sequence[str]) -> tuple[float, float]:
    tokens = steps = 0.0
    for url in urls:
        async with session.get(url + "/metrics") as answer:
            text = await answer.read()
            tokens += sum(float(value) for value in COUNTER.findall(text))
            steps += sum(float(value) for value in STEPS.findall(text))
    return tokens, steps


def _cpu(processes: Mapping[str, Iterable[int]] | None) -> dict[str, float]:
    return {kind: sum(cpu_s(pid) for pid in pids) for kind, pids in (processes or {}).items()}


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def children(pid: int) -> list[int]:
    """Pids of all descendants of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            direct = [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
        for child in direct:
            found += [child, *children(child)]
    return found
