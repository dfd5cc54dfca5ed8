"""Rewards of the built-in recipes, and what makes anybody's reward function safe to train with.

A reward has TRL's signature: keyword arguments `completions` (list of conversations), `prompts`, `completion_ids` and
every other column of the data set, each a list with one entry a sample; it returns a list of floats, None where a
sample cannot be scored. TRL calls it in the rollout process, plain functions in a worker thread.
"""

import importlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from jobs import journal
from jobs.errors import ConfigError
from jobs.math_check import Checker, boxed

Rewards = list[float | None]
RewardFunction = Callable[..., Rewards] | Callable[..., Awaitable[Rewards]]

REPORTED_ERRORS = 10
"""Errors of a reward function told one by one; after that each time their number doubles. A flood helps nobody."""


def digit(completions: Sequence[Any], **_: Any) -> Rewards:
    """Share of the completion's characters that are "7"; 0 for an empty one."""
    texts = [text_of(completion) for completion in completions]
    return [text.count("7") / len(text) if text else 0.0 for text in texts]


def add(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> Rewards:
    """1 if the completion is exactly the `answer`, else 0."""
    return [float(text_of(completion) == right) for completion, right in zip(completions, answer, strict=True)]


def math(
    completions: Sequence[Any],
    answer: Sequence[str] | None = None,
    solution: Sequence[str] | None = None,
    **_: Any,
) -> Rewards:
    r"""1 if the last \boxed{} of a finished completion equals the gold answer mathematically, else 0.

    The gold answer is the column `answer`, or `solution` (whose last \boxed{} counts, if it has one). A completion that
    ends inside its box or inside its `<think>` was cut off: 0. None where the gold answer cannot be parsed.

    Raises:
        ConfigError: the data set has neither column.
        TimeoutError: the comparison took longer than jobs.math_check.DEADLINE_S; the process that did it is gone.
    """
    golds = answer if answer is not None else solution
    if golds is None:
        raise ConfigError("reward jobs.rewards:math: no column `answer` or `solution` in the data set; rename its own.")
    return [_score_math(text_of(c), str(gold)) for c, gold in zip(completions, golds, strict=True)]


def text_of(completion: Any) -> str:
    """The text of a completion: of its messages (TRL's conversational form), or itself if it is text."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message["content"]) for message in completion if message.get("content") is not None)


def resolve(name: str, where: str = "reward.functions") -> Callable[..., Any]:
    """Returns the function that `name` ("module:function") stands for; `where` names the setting in errors.

    Raises:
        ConfigError: not of that form, the module cannot be imported, or there is no such function in it.
    """
    module_name, colon, function_name = name.partition(":")
    if not (colon and module_name and function_name):
        raise ConfigError(f"{where} = {name!r}: expected module:function, such as jobs.rewards:digit.")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{where} = {name!r}: module {module_name} cannot be imported ({type(error).__name__}: {error}). "
            "It must be installed, or lie on PYTHONPATH, where the trainer runs."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [n for n, value in vars(module).items() if inspect.isroutine(value) and not n.startswith("_")]
        raise ConfigError(f"{where} = {name!r}: {module_name} has no {function_name}. It has: {', '.join(known)}.")
    return function  # type: ignore[no-any-return]


def guard(function: RewardFunction, weight: float = 1.0) -> "Guard | AsyncGuard":
    """Returns a reward that never ends the run: where `function` raises, the sample gets None and the error is counted.

    When a whole group fails, its samples are tried one by one, so that one bad sample costs only itself. Errors are
    told as `reward_error` lines of the journal. A ConfigError still ends the run: it is the same for all.
    `weight` multiplies the rewards, since AsyncGRPO (TRL 1.14 to 1.16) only sums functions. The result can be pickled
    if `function` can.
    """
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return AsyncGuard(function, weight) if is_async else Guard(function, weight)


class _Guarded:
    """What both guards share: the name that TRL logs, weighing, checking and counting."""

    def __init__(self, function: RewardFunction, weight: float) -> None:
        self.function, self.weight = function, weight
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.errors = 0
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def _checked(self, rewards: Any, count: int) -> Rewards:
        values = list(rewards)
        if len(values) != count:
            raise ValueError(f"returned {len(values)} rewards for {count} completions")
        return [None if value is None else float(value) * self.weight for value in values]

    def _failed(self, error: Exception) -> None:
        with self._lock:
            self.errors += 1
            count = self.errors
        if count <= REPORTED_ERRORS or count & (count - 1) == 0:
            text = f"{type(error).__name__}: {error}"
            journal.append({"event": "reward_error", "function": self.__name__, "count": count, "error": text})


class Guard(_Guarded):
    """A guarded plain function; see `guard`."""

    def __call__(self, **columns: Any) -> Rewards:
        """TRL's call: one reward or None for each of `completions`."""
        count = len(columns["completions"])
        try:
            return self._checked(self.function(**columns), count)
        except ConfigError:
            raise
        except Exception as error:
            if count == 1:
                self._failed(error)
                return [None]
        return [reward for one in _singly(columns, count) for reward in self(**one)]


class AsyncGuard(_Guarded):
    """A guarded coroutine function; see `guard`."""

    async def __call__(self, **columns: Any) -> Rewards:
        """TRL's call: one reward or None for each of `completions`."""
        count = len(columns["completions"])
        try:
            return self._checked(await self.function(**columns), count)  # type: ignore[misc]
        except ConfigError:
            raise
        except Exception as error:
            if count == 1:
                self._failed(error)
                return [None]
        return [reward for one in _singly(columns, count) for reward in await self(**one)]


def _singly(columns: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The columns of each sample alone; what is not one entry a sample is passed on as it is."""

    def one(value: Any, index: int) -> Any:
        return [value[index]] if isinstance(value, list | tuple) and len(value) == count else value

    return [{name: one(value, index) for name, value in columns.items()} for index in range(count)]


_checker = Checker()


def _score_math(text: str, gold: str) -> float | None:
    thinking = "<think>" in text and "</think>" not in text
    return _checker.score(gold, None if thinking else boxed(text))
