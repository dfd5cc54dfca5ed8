"""What of TRL is about to be patched or used: looked for first, so that one that is gone is named before training."""

import importlib
import inspect
from typing import Any

from jobs import packages, versions
from jobs.errors import ConfigError

TRAINER = "trl.experimental.async_grpo.async_grpo_trainer"
WORKER = "trl.experimental.async_grpo.async_rollout_worker"
CLIENT = "trl.experimental.async_grpo.vllm_client"
"""Where TRL 1.14 to 1.16 keep what is patched."""


def imported(name: str) -> Any:
    """A module of TRL's. Raises ConfigError, naming TRL's version, where it is not there."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _changed(f"the module {name}: {error}") from error


def existing(owner: Any, name: str) -> Any:
    """What is about to be patched or used. Raises ConfigError, naming TRL's version, where it is not there."""
    if not hasattr(owner, name):
        raise _changed(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
    return getattr(owner, name)


def replace(owner: Any, name: str, patch: Any) -> None:
    """Puts `patch` in the place of what is there; see `existing`."""
    existing(owner, name)
    setattr(owner, name, patch)


def takes(function: Any, parameter: str) -> None:
    """Raises ConfigError, naming TRL's version, where a function about to be called with `parameter` lacks it."""
    if parameter not in inspect.signature(function).parameters:
        raise _changed(f"the parameter {parameter} of {function.__qualname__}")


def _changed(what: str) -> ConfigError:
    return ConfigError(
        f"trl {packages.installed('trl')}, as it is installed here, lacks {what}, which asyncgrpo patches. Install one "
        f"of {', '.join(versions.TRL)} as it was published."
    )
