"""Which engine gets a completion: one that holds the prompt's prefix, unless it is too far ahead of the least loaded.

Pure decisions: no I/O and no clock (times come in as arguments), the same calls give the same answers.

A prompt is known if it was sent before under this name, or if it continues one that was (a further turn of the same
conversation). All other overlap is a template: what prompts share without one continuing the other is no reason to go
anywhere, however long it is. A prompt that more different prompts continue than it was ever asked for is one too.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from jobs.prefix import BLOCK_TOKENS, Prefix

CAPACITY_BLOCKS = 262_144
"""Blocks and prompts remembered, least recently used first out: 4.2 million tokens, 56 MB (measured). An H200's KV
cache for a 1.5B model holds about as many tokens."""
SPILL_COMPLETIONS = 12
"""A prompt's engine may be ahead of the least loaded by this many expected completions before a rollout goes elsewhere:
more than a group of 8 piles up by itself. From `asyncgrpo bench routing`."""
SPILL_FRACTION = 0.25
"""... or by this fraction of the mean load, if that is more: with hundreds in flight a dozen is noise."""
EXPECTED_TOKENS = 256.0
"""A completion's expected length until one has finished; it only has to be the same for all."""
LENGTH_WEIGHT = 1 / 64
"""Weight of each finished completion in the expected length: about the last hundred count."""
PACE_DECAY = 1 - 1 / 64
"""The same for an engine's pace."""
PACE_MIN_COMPLETIONS = 16
"""Completions before an engine's pace is believed."""
PACE_MIN_S = 0.1
"""Shorter completions say nothing about an engine's pace: the network and the proxy take as long."""
PACE_EQUAL = 1.25
"""Engines whose paces differ by less than this factor count as equally fast: the rest is noise of load and length."""
LIVES = 4096
"""Engine lives (starts and restarts) told apart; after that many all is forgotten and learnt anew."""


@dataclass(slots=True)
class Decision:
    """Where a completion goes and what it is reckoned to cost there; hand it back to `finished` or `cancelled`.

    `affinity`: the engine has the prompt's private prefix. Otherwise the completion is cold; `spilled` if it is so
    because the engines that have the prefix were too far ahead.
    """

    engine: str
    affinity: bool
    spilled: bool
    cached_tokens: int
    cost_tokens: int
    started: float
    open: bool = True


@dataclass(slots=True)
class _Node:
    """A block, or a whole prompt: the engines that hold it, as bits.

    For a block: `tails` has bit k if a known prompt ended k units after it. For a prompt (found by its identity and by
    its end): how often it was `asked`, and by how many different prompts it was `continued`.
    """

    holders: int = 0
    tails: int = 0
    asked: int = 0
    continued: int = 0


@dataclass(slots=True)
class _Engine:
    bit: int
    outstanding_tokens: int = 0
    in_flight: int = 0
    newest: int = 0  # when it last got a prompt nobody knew: ties go to whoever waited longest
    completions: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    slowness: float = 1.0

    def pace(self) -> float | None:
        """Seconds per token of recent completions, None until enough have finished."""
        return self.seconds / self.tokens if self.completions >= PACE_MIN_COMPLETIONS and self.tokens > 0 else None


# A plain dict finds its first entry by walking over all that were deleted before it: 3 ms an eviction, measured.
_Space = OrderedDict[int, _Node]


class Router:
    """Remembers who holds which prefix and how much each engine has to do."""

    def __init__(
        self,
        *,
        capacity_blocks: int = CAPACITY_BLOCKS,
        spill_completions: float = SPILL_COMPLETIONS,
        spill_fraction: float = SPILL_FRACTION,
    ) -> None:
        self._capacity_blocks = capacity_blocks
        self._spill_completions = spill_completions
        self._spill_fraction = spill_fraction
        self._spaces: dict[str, _Space] = {}
        self._blocks = 0
        self._engines: dict[str, _Engine] = {}
        self._lives = 0
        self._new_prompts = 0
        self._expected_tokens = EXPECTED_TOKENS
        self._finished = 0

    @property
    def blocks(self) -> int:
        """Blocks and prompts remembered now."""
        return self._blocks

    @property
    def expected_tokens(self) -> float:
        """The length a completion is expected to have."""
        return self._expected_tokens

    def engines(self) -> list[str]:
        """Names of all engines that ever were candidates."""
        return list(self._engines)

    def outstanding_tokens(self, engine: str) -> int:
        """Tokens the engine is reckoned to have to compute yet."""
        known = self._engines.get(engine)
        return known.outstanding_tokens if known else 0

    def in_flight(self, engine: str) -> int:
        """Decisions for this engine that are neither finished nor cancelled."""
        known = self._engines.get(engine)
        return known.in_flight if known else 0

    def choose(
        self,
        name: str,
        prefix: Prefix | None,
        candidates: Sequence[str],
        max_tokens: int | None = None,
        now: float = 0.0,
    ) -> Decision:
        """Picks one of `candidates` (not empty) for a completion of at most `max_tokens` under `name`; `now` in s.

        From here on the engine counts as holding the prompt, and the completion as outstanding there. A prompt without
        a prefix goes by load alone.
        """
        space = self._space(name)
        known, holders = self._lookup(space, prefix) if prefix else (None, 0)
        expected = self._expected_tokens if max_tokens is None else min(self._expected_tokens, max_tokens)
        prompt_tokens = prefix.tokens if prefix else 0
        chosen, spilled = self._weigh(candidates, holders, prompt_tokens + expected)
        engine = self._engines[chosen]
        affinity = bool(holders & engine.bit)
        if prefix is None:
            cached_tokens = 0
        elif known is not None and affinity:
            cached_tokens = prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
            known.asked += 1
        else:
            cached_tokens = self._remember(space, prefix, engine.bit)
        if not affinity:
            self._new_prompts += 1
            engine.newest = self._new_prompts
        cost_tokens = prompt_tokens - cached_tokens + int(expected)
        engine.outstanding_tokens += cost_tokens
        engine.in_flight += 1
        return Decision(chosen, affinity, spilled, cached_tokens, cost_tokens, now)

    def finished(self, decision: Decision, completion_tokens: int, now: float = 0.0) -> None:
        """The completion is complete: frees the engine of it and learns from its length and its time."""
        self.cancelled(decision)
        engine = self._engines[decision.engine]
        self._expected_tokens += (completion_tokens - self._expected_tokens) * LENGTH_WEIGHT
        if (seconds := now - decision.started) >= PACE_MIN_S:
            engine.completions += 1
            engine.seconds = engine.seconds * PACE_DECAY + seconds
            engine.tokens = engine.tokens * PACE_DECAY + completion_tokens
        self._finished += 1
        if self._finished % PACE_MIN_COMPLETIONS == 0:
            self._learn_slowness()

    def cancelled(self, decision: Decision) -> None:
        """The completion is off, whatever the reason: frees the engine of it. A second call does nothing."""
        if decision.open:
            decision.open = False
            engine = self._engines[decision.engine]
            engine.outstanding_tokens -= decision.cost_tokens
            engine.in_flight -= 1

    def forget_engine(self, name: str) -> None:
        """The engine died or was restarted: it holds nothing and its pace is unknown."""
        if name in self._engines:
            engine = self._engines[name]
            engine.bit = self._new_bit()
            engine.completions, engine.seconds, engine.tokens, engine.slowness = 0, 0.0, 0.0, 1.0

    def forget_version(self, name: str) -> None:
        """Nothing is remembered under this wire name any more."""
        self._blocks -= len(self._spaces.pop(name, ()))

    def _space(self, name: str) -> _Space:
        """What is known under this wire name, moved to the end of the spaces as the most recently used."""
        space = self._spaces.pop(name, None)
        self._spaces[name] = space = _Space() if space is None else space
        return space

    def _lookup(self, space: _Space, prefix: Prefix) -> tuple[_Node | None, int]:
        """The prompt itself if it is known, and the engines that hold it or the longest known prompt it continues."""
        if (node := space.get(prefix.identity)) is not None:
            space.move_to_end(prefix.identity)
            return node, node.holders
        if (node := space.get(prefix.end())) is not None:  # the same ids, written in another way
            space[prefix.identity] = node
            self._blocks += 1
            return node, node.holders
        for block in range(len(prefix.chain) - 1, -1, -1):
            if (node := space.get(prefix.chain[block])) is None or not node.tails:
                continue
            room = len(prefix.units) - block * prefix.width
            for tail in range(min(prefix.width - 1, room), -1, -1):
                if node.tails >> tail & 1 and (ended := space.get(prefix.end_at(block, tail))) is not None:
                    ended.continued += 1
                    if ended.continued <= ended.asked:
                        return None, ended.holders
        return None, 0

    def _weigh(self, candidates: Sequence[str], holders: int, own_tokens: float) -> tuple[str, bool]:
        """The engine to take, and whether that is a spill."""
        least = home = ""
        least_load = home_load = total = 0.0
        newest = 0
        for name in candidates:
            engine = self._engines.get(name) or self._meet(name)
            load = (engine.outstanding_tokens + own_tokens) * engine.slowness
            total += load
            if not least or load < least_load or (load == least_load and engine.newest < newest):
                least, least_load, newest = name, load, engine.newest
            if holders & engine.bit and (not home or load < home_load):
                home, home_load = name, load
        if not home:
            return least, False
        allowed = max(self._spill_completions * self._expected_tokens, self._spill_fraction * total / len(candidates))
        return (least, True) if home_load - least_load > allowed else (home, False)

    def _remember(self, space: _Space, prefix: Prefix, bit: int) -> int:
        """Notes that the engine holds the prompt from now on; returns how many of its first tokens it held already.

        The prompt's first blocks become the most recently used, so that a chain is forgotten from its end.
        """
        before = len(space)
        held = 0
        counting = True
        for link in prefix.chain[1:]:
            node = space.get(link)
            counting = counting and node is not None and bool(node.holders & bit)
            held += counting
        end = prefix.end()
        node = _newest(space, end)
        node.asked += 1
        node.holders |= bit
        space[prefix.identity] = node
        space.move_to_end(prefix.identity)
        for link in reversed(prefix.chain):
            _newest(space, link).holders |= bit
        node = space[prefix.chain[-1]]
        node.tails |= 1 << len(prefix.units) % prefix.width
        self._blocks += len(space) - before
        self._evict()
        return min(held * BLOCK_TOKENS, prefix.tokens)

    def _evict(self) -> None:
        while self._blocks > self._capacity_blocks:
            name, space = next(iter(self._spaces.items()))
            if space:
                space.popitem(last=False)
                self._blocks -= 1
            else:
                del self._spaces[name]

    def _meet(self, name: str) -> _Engine:
        self._engines[name] = engine = _Engine(self._new_bit())
        return engine

    def _new_bit(self) -> int:
        """A bit that no engine life had before; when they are used up, all is forgotten and they start again."""
        if self._lives >= LIVES:
            self._spaces.clear()
            self._blocks = self._lives = 0
            for engine in self._engines.values():
                engine.bit = self._new_bit()
        self._lives += 1
        return 1 << self._lives - 1

    def _learn_slowness(self) -> None:
        """Reckons how slow each engine is against the mean; 1 for all while they differ by no more than noise."""
        paces = {name: pace for name, engine in self._engines.items() if (pace := engine.pace()) is not None}
        if not paces:
            return
        unequal = max(paces.values()) > PACE_EQUAL * min(paces.values())
        mean = sum(paces.values()) / len(paces)
        for name, engine in self._engines.items():
            engine.slowness = paces.get(name, mean) / mean if unequal else 1.0


def _newest(space: _Space, key: int) -> _Node:
    """The node under this key, new if there is none, as the most recently used."""
    if (node := space.get(key)) is None:
        node = space[key] = _Node()
    else:
        space.move_to_end(key)
    return node
