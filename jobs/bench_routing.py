"""`asyncgrpo bench routing`: GRPO traffic against simulated engines, under this router and under the usual policies.

An engine is a continuous batch: with n completions in it, each gains a token every BASE_S + n * PER_SEQUENCE_S, and a
prompt's uncached tokens hold it up for a while first. The two numbers are fitted to one H200 with Qwen2.5-Math-1.5B's
shape (128 in flight: about 10,600 tokens/s; 384: about 12,700). The trainer's side is a closed loop: rollouts are asked
for in order, G of a prompt after each other, as long as fewer than the cap are in flight.
"""

import heapq
import json
import random
import statistics
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from itertools import pairwise

from jobs.prefix import BLOCK_TOKENS, Prefix
from jobs.routing import Decision, Router

GROUP = 8
"""TRL's default `num_generations`."""
BASE_S = 3e-3
PER_SEQUENCE_S = 71e-6
PREFILL_S = 1 / 40_000
"""Seconds per uncached prompt token. Assumed: the facts have no figure for prefill alone."""
MAX_SEQUENCES = 256
"""vLLM's default `max_num_seqs`; more wait in the engine's queue."""
TEMPLATE_TOKENS = 96
"""A chat template with a system prompt, shared by all prompts."""
MAX_COMPLETION_TOKENS = 2048
"""TRL's default `max_completion_length`."""
REFERENCE_AHEAD = 8
REFERENCE_FAN_OUT = 4
"""The published reference spills at 8 requests ahead; how many children make a block common is assumed."""
SEEDS = 5


@dataclass(frozen=True)
class Rollout:
    """One completion to come: which problem it is for, its prompt and how long its completion will be."""

    problem: int
    prompt: Sequence[int] = field(repr=False)
    tokens: int


@dataclass(frozen=True)
class Scenario:
    """`speeds` has a factor for each engine; `rollouts_per_version` rollouts are asked for between syncs (0: all)."""

    name: str
    speeds: Sequence[float]
    problems_in_flight: int = 64
    problems: int = 1024
    rollouts_per_version: int = 0


@dataclass(frozen=True)
class Outcome:
    """What one run came to; `imbalance` is the largest deviation of an engine's tokens from its fair share."""

    makespan_s: float
    cold: float
    spilled: float
    imbalance: float


def rollouts(scenario: Scenario, seed: int) -> Iterator[Rollout]:
    """The trainer's demand: lengths are long-tailed within a problem, and problems differ in difficulty."""
    rng = random.Random(seed)
    template = [rng.randrange(150_000) for _ in range(TEMPLATE_TOKENS)]
    for problem in range(scenario.problems):
        prompt = [*template, *(rng.randrange(150_000) for _ in range(rng.randrange(60, 400)))]
        difficulty = rng.lognormvariate(5.6, 0.6)
        for _ in range(GROUP):
            tokens = int(difficulty * rng.lognormvariate(0, 0.6)) + 1
            yield Rollout(problem, prompt, min(MAX_COMPLETION_TOKENS, tokens))


class Policy(ABC):
    """Chooses an engine for each rollout."""

    spilled = 0

    def __init__(self, engines: int) -> None:
        self.engines = engines
        self.in_flight = [0] * engines

    def choose(self, version: str, rollout: Rollout, now: float) -> int:
        """The index of the engine that gets the rollout."""
        engine = self._pick(version, rollout, now)
        self.in_flight[engine] += 1
        return engine

    def finished(self, engine: int, rollout: Rollout, now: float) -> None:
        """The rollout came back."""
        self.in_flight[engine] -= 1

    @abstractmethod
    def _pick(self, version: str, rollout: Rollout, now: float) -> int: ...

    def _fewest(self) -> int:
        return self.in_flight.index(min(self.in_flight))


class RoundRobin(Policy):
    """Each in turn."""

    turn = -1

    def _pick(self, version: str, rollout: Rollout, now: float) -> int:
        self.turn += 1
        return self.turn % self.engines


class LeastRequests(Policy):
    """The one with the fewest requests in flight."""

    def _pick(self, version: str, rollout: Rollout, now: float) -> int:
        return self._fewest()


class StickyHash(Policy):
    """By a hash of the prompt alone."""

    def _pick(self, version: str, rollout: Rollout, now: float) -> int:
        return random.Random(hash(tuple(rollout.prompt))).randrange(self.engines)


class Reference(Policy):
    """The published proxy's rule, rebuilt from its description.

    A block that many different blocks follow is common; the block after the last common one names the prompt. It goes
    where it went first, or to the engine with the fewest requests if that one is REFERENCE_AHEAD requests ahead.
    """

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self.children: dict[int, set[int]] = {}
        self.homes: dict[int, int] = {}

    def _pick(self, version: str, rollout: Rollout, now: float) -> int:
        chain = Prefix(version, rollout.prompt).chain
        own = chain[1]
        for parent, child in pairwise(chain):
            self.children.setdefault(parent, set()).add(child)
            if len(self.children[parent]) >= REFERENCE_FAN_OUT:
                own = child
        home = self.homes.setdefault(own, self._fewest())
        ahead = self.in_flight[home] - min(self.in_flight)
        self.spilled += ahead >= REFERENCE_AHEAD
        return self._fewest() if ahead >= REFERENCE_AHEAD else home


class Ours(Policy):
    """jobs.routing."""

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self.router = Router()
        self.names = [str(engine) for engine in range(engines)]
        self.decisions: dict[int, Decision] = {}

    def _pick(self, version: str, rollout: Rollout, now: float) -> int:
        prefix = Prefix(version, rollout.prompt)
        decision = self.router.choose(version, prefix, self.names, MAX_COMPLETION_TOKENS, now)
        self.decisions[id(rollout)] = decision
        self.spilled += decision.spilled
        return int(decision.engine)

    def finished(self, engine: int, rollout: Rollout, now: float) -> None:
        """Lets the router learn from it, too."""
        super().finished(engine, rollout, now)
        self.router.finished(self.decisions.pop(id(rollout)), rollout.tokens, now)


POLICIES: dict[str, type[Policy]] = {
    "asyncgrpo": Ours,
    "reference": Reference,
    "sticky hash": StickyHash,
    "least requests": LeastRequests,
    "round robin": RoundRobin,
}


class Engine:
    """Exact processor sharing; `position` is what a completion that ran from the start would have gained, in tokens."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.now = 0.0
        self.position = 0.0
        self.running: list[tuple[float, int, Rollout]] = []
        self.waiting: deque[tuple[int, Rollout]] = deque()
        self.warm: set[tuple[str, int]] = set()
        self.tokens = 0
        self.epoch = 0

    def _step_s(self) -> float:
        return (BASE_S + PER_SEQUENCE_S * len(self.running)) / self.speed

    def advance(self, now: float) -> None:
        """Lets time pass. A prefill may have put the engine's own clock ahead; then nothing happens."""
        if now > self.now:
            if self.running:
                self.position += (now - self.now) / self._step_s()
            self.now = now

    def submit(self, serial: int, version: str, rollout: Rollout, now: float) -> bool:
        """Takes a rollout; returns whether its prompt was cold here."""
        self.advance(now)
        cold = (version, rollout.problem) not in self.warm
        self.warm.add((version, rollout.problem))
        uncached = len(rollout.prompt) - TEMPLATE_TOKENS if cold else BLOCK_TOKENS
        self.now += uncached * PREFILL_S / self.speed
        self.waiting.append((serial, rollout))
        self._fill()
        return cold

    def _fill(self) -> None:
        while self.waiting and len(self.running) < MAX_SEQUENCES:
            serial, rollout = self.waiting.popleft()
            heapq.heappush(self.running, (self.position + rollout.tokens, serial, rollout))

    def next_s(self) -> float | None:
        """When the next completion ends if nothing else happens."""
        return self.now + max(0.0, self.running[0][0] - self.position) * self._step_s() if self.running else None

    def finish(self, now: float) -> Rollout:
        """Ends the completion that is due."""
        self.advance(now)
        end, _, rollout = heapq.heappop(self.running)
        self.position = max(self.position, end)
        self.tokens += rollout.tokens
        self._fill()
        return rollout


def simulate(scenario: Scenario, policy: Policy, seed: int) -> Outcome:
    """Runs the scenario's rollouts to the last one."""
    engines = [Engine(speed) for speed in scenario.speeds]
    demand = rollouts(scenario, seed)
    events: list[tuple[float, int, int]] = []
    cap = scenario.problems_in_flight * GROUP
    now, in_flight, serial, cold = 0.0, 0, 0, 0

    def schedule(index: int) -> None:
        engine = engines[index]
        engine.epoch += 1
        if (due := engine.next_s()) is not None:
            heapq.heappush(events, (due, index, engine.epoch))

    while True:
        while in_flight < cap and (rollout := next(demand, None)) is not None:
            every = scenario.rollouts_per_version
            version = f"v{serial // every}" if every else "v1"
            index = policy.choose(version, rollout, now)
            cold += engines[index].submit(serial, version, rollout, now)
            schedule(index)
            in_flight += 1
            serial += 1
        while events and events[0][2] != engines[events[0][1]].epoch:
            heapq.heappop(events)
        if not events:
            break
        now, index, _ = heapq.heappop(events)
        policy.finished(index, engines[index].finish(now), now)
        in_flight -= 1
        schedule(index)
    total, speeds = sum(engine.tokens for engine in engines), sum(scenario.speeds)
    shares = [engine.tokens / total / (engine.speed / speeds) for engine in engines]
    return Outcome(now, cold / serial, policy.spilled / serial, max(abs(share - 1) for share in shares))


SCENARIOS = [
    Scenario("1 replica", [1], problems=512),
    Scenario("2 replicas", [1] * 2),
    Scenario("2 replicas, a sync in the middle of every 13th group", [1] * 2, rollouts_per_version=100),
    Scenario("2 replicas, one half as fast", [1, 0.5]),
    Scenario("4 replicas", [1] * 4),
    Scenario("8 replicas", [1] * 8),
    Scenario("32 replicas", [1] * 32, problems_in_flight=256, problems=2048),
    Scenario("256 replicas", [1] * 256, problems_in_flight=1024, problems=4096),
]


def mean(outcomes: Sequence[Outcome]) -> Outcome:
    """Each figure's mean."""
    return Outcome(*(statistics.fmean(values) for values in zip(*map(astuple, outcomes), strict=True)))


def measure(scenario: Scenario, seeds: int = SEEDS) -> dict[str, Outcome]:
    """Means over the same seeds for every policy."""
    engines = len(scenario.speeds)
    return {
        name: mean([simulate(scenario, policy(engines), seed) for seed in range(seeds)])
        for name, policy in POLICIES.items()
    }


def main(as_json: bool = False, seeds: int = SEEDS) -> None:
    """Prints the table of policies by scenarios, or the same as JSON."""
    table = {scenario.name: measure(scenario, seeds) for scenario in SCENARIOS}
    if as_json:
        sys.stdout.write(json.dumps(table, default=asdict, indent=1) + "\n")
        return
    for name, policies in table.items():
        sys.stdout.write(f"\n{name}\n  {'':16}{'makespan':>10}{'cold':>9}{'spilled':>9}{'imbalance':>11}\n")
        for policy, outcome in policies.items():
            sys.stdout.write(
                f"  {policy:16}{outcome.makespan_s:9.2f}s{outcome.cold:9.2%}{outcome.spilled:9.2%}"
                f"{outcome.imbalance:11.1%}\n"
            )
