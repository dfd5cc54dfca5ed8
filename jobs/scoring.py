"""What makes anybody's reward functions safe to train with: weights, errors that cost one sample, several at once.

TRL (1.14 to 1.16) calls each function with a group's completions, ends the run when one raises, and adds up what they
return, taking None for 0 unless all say None. So a sample on which one of several functions fails would look worse than
it is. Here it is scored by none of them: TRL leaves it out of its group.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from jobs import journal
from jobs.errors import ConfigError, RunFailed
from jobs.recipe import Reward
from jobs.reward_server import RewardServer, Unanswered, is_url
from jobs.rewards import resolve

Rewards = list[float | None]
RewardFunction = Callable[..., Rewards] | Callable[..., Awaitable[Rewards]]

REPORTED_ERRORS = 10
"""Errors of a reward function told one by one; after that each time their number doubles. A flood helps nobody."""
MOST_FAILED_IN_A_ROW = 256
"""So many samples in a row on which a function fails end the run: nothing is learned from it, and it costs money. Two
steps of the recipe `sanity`."""
SERVER_PATIENCE_S = 60.0
"""How long a trainer that starts waits for a reward server: it may be on its way, too."""
FAILED = math.nan
"""Stands for the reward of a sample on which the function failed; None is a function's own word."""


def from_settings(settings: Reward) -> "Scoring":
    """The functions and servers of a recipe's `[reward]`.

    Raises:
        ConfigError: one that cannot be had.
    """
    functions = [function(name, f"reward.functions[{i}]", settings) for i, name in enumerate(settings.functions)]
    return Scoring(functions, settings.weights or [1.0] * len(functions))


def function(name: str, where: str, settings: Reward) -> RewardFunction:
    """What an entry of `reward.functions` stands for; raises ConfigError if nothing."""
    return RewardServer(name, where, settings.timeout_s) if is_url(name) else resolve(name, where)


class Scoring:
    """All reward functions of a run. It can be pickled, if they can.

    Weights are multiplied here, since AsyncGRPO (TRL 1.14 to 1.16) has none.
    """

    def __init__(self, functions: Sequence[RewardFunction], weights: Sequence[float]) -> None:
        self._guards = [Guard(each, weight) for each, weight in zip(functions, weights, strict=True)]
        self._groups: dict[int, tuple[asyncio.Future[list[Rewards]], set[int]]] = {}

    @property
    def columns(self) -> list["Column"]:
        """What TRL is given: a coroutine function for each reward function."""
        return [Column(self, i, guard.name, guard.is_async) for i, guard in enumerate(self._guards)]

    def check_servers(self) -> None:
        """Raises ConfigError if nobody answers at a reward server within SERVER_PATIENCE_S."""
        for guard in self._guards:
            if isinstance(guard.function, RewardServer):
                guard.function.check(SERVER_PATIENCE_S)

    async def score(self, columns: dict[str, Any]) -> list[Rewards]:
        """The rewards of one group by each function, None for a sample on which any of them failed."""
        scores = await asyncio.gather(*(guard.score(columns) for guard in self._guards))
        failed = [any(one is not None and math.isnan(one) for one in sample) for sample in zip(*scores, strict=True)]
        return [[None if lost else one for one, lost in zip(each, failed, strict=True)] for each in scores]

    async def column(self, index: int, columns: dict[str, Any]) -> Rewards:
        """The rewards of one group by one function. TRL asks for all functions at once, with the same lists."""
        key = id(columns["completions"])
        if key not in self._groups:
            self._groups[key] = asyncio.ensure_future(self.score(columns)), set(range(len(self._guards)))
        scores, unread = self._groups[key]
        unread.discard(index)
        if not unread:
            del self._groups[key]
        return (await scores)[index]


class Column:
    """One reward function as TRL sees it. `waits`: it is worth scoring several groups at a time."""

    def __init__(self, scoring: Scoring, index: int, name: str, waits: bool) -> None:
        self._scoring, self._index, self.waits = scoring, index, waits
        self.__name__ = name

    async def __call__(self, **columns: Any) -> Rewards:
        """TRL's call: one reward or None for each of `completions`."""
        return await self._scoring.column(self._index, columns)


class Guard:
    """A reward function that never ends the run by what it does with one sample: it fails, and the error is counted.

    When a whole group fails, its samples are tried one by one, so that one bad sample costs only itself. Errors are
    told as `reward_error` lines of the journal.
    """

    def __init__(self, function: RewardFunction, weight: float = 1.0) -> None:
        self.function, self.weight = function, weight
        self.name = str(getattr(function, "__name__", type(function).__name__))
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        self.errors = 0
        self._told = 0
        self._in_a_row = 0
        self._turn: asyncio.Lock | None = None

    async def score(self, columns: dict[str, Any]) -> Rewards:
        """Weighted rewards of a group, FAILED where there is none.

        Raises:
            ConfigError: the function says that no sample can ever be scored.
            RunFailed: it has failed for MOST_FAILED_IN_A_ROW samples.
        """
        count = len(columns["completions"])
        try:
            rewards = self._checked(await self._call(columns), count)
        except (ConfigError, RunFailed):
            raise
        except Exception as error:
            if count == 1 or isinstance(error, Unanswered):
                self._failed(error, count)
                return [FAILED] * count
        else:
            self._in_a_row = 0
            return rewards
        alone = _singly(columns, count)
        if self.is_async:
            each = await asyncio.gather(*(self.score(one) for one in alone))
        else:
            each = [await self.score(one) for one in alone]
        return [reward for one in each for reward in one]

    async def _call(self, columns: dict[str, Any]) -> Any:
        if self.is_async:
            return await self.function(**columns)  # type: ignore[misc]
        if self._turn is None:
            self._turn = asyncio.Lock()
        async with self._turn:  # TRL never calls a plain function twice at a time, and few are made for it
            return await asyncio.to_thread(self.function, **columns)

    def _checked(self, rewards: Any, count: int) -> Rewards:
        values = [None if value is None else float(value) for value in rewards]
        if len(values) != count:
            raise ValueError(f"returned {len(values)} rewards for {count} completions")
        if wrong := [value for value in values if value is not None and not math.isfinite(value)]:
            raise ValueError(f"returned {wrong[0]}: a reward is a finite number, or None")
        return [None if value is None else value * self.weight for value in values]

    def _failed(self, error: Exception, count: int) -> None:
        self.errors += count
        self._in_a_row += count * (not isinstance(error, Unanswered))  # a server that is away has a limit of its own
        text = f"{type(error).__name__}: {error}"
        if self.errors <= REPORTED_ERRORS or self.errors >= 2 * self._told:
            new, self._told = self.errors - self._told, self.errors
            journal.append({"event": "reward_error", "function": self.name, "count": new, "error": text})
        if self._in_a_row >= MOST_FAILED_IN_A_ROW:
            raise RunFailed(f"reward {self.name}: failed for {self._in_a_row} samples in a row, the last with {text}")


def _singly(columns: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The columns of each sample alone; what is not one entry a sample is passed on as it is."""

    def one(value: Any, index: int) -> Any:
        return [value[index]] if isinstance(value, list | tuple) and len(value) == count else value

    return [{name: one(value, index) for name, value in columns.items()} for index in range(count)]
