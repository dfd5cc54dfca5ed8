"""Rewards of the built-in recipes, and how any reward function is found by its name.

A reward has TRL's signature: keyword arguments `completions` (list of conversations), `prompts`, `completion_ids` and
every other column of the data set, each a list with one entry a sample; it returns a list of floats, None where a
sample cannot be scored. TRL calls it in the rollout process, plain functions in a worker thread.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jobs.errors import ConfigError
from jobs.math_check import Checker, boxed

Rewards = list[float | None]


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


_checker = Checker()


def _score_math(text: str, gold: str) -> float | None:
    thinking = "<think>" in text and "</think>" not in text
    return _checker.score(gold, None if thinking else boxed(text))
