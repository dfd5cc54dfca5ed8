"""What a recipe's numbers may be: type and range of each that is computed with, here, by TRL or by vLLM."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs.errors import ConfigError

if TYPE_CHECKING:
    from jobs.recipe import Recipe


@dataclass(frozen=True)
class Limit:
    """What a setting that is a number may be: how that is said, the type, and which numbers of it are fine."""

    words: str
    type: type[int] | type[float]
    fits: Callable[[float], bool]

    def check(self, where: str, value: Any) -> None:
        """Raises ConfigError for a value of another type, true and false too, or out of range; NaN is out of each."""
        number = isinstance(value, int if self.type is int else (int, float)) and not isinstance(value, bool)
        if not number or not self.fits(value):
            said = repr(value) if isinstance(value, float) else json.dumps(value, default=str)
            raise ConfigError(f"{where} = {said}: expected {self.words}.")


WHOLE = Limit("a whole number", int, lambda n: True)
FROM_MINUS_1 = Limit("a whole number of at least -1", int, lambda n: n >= -1)
FROM_0 = Limit("a whole number of at least 0", int, lambda n: n >= 0)
FROM_1 = Limit("a whole number of at least 1", int, lambda n: n >= 1)
FROM_1_OR_AUTO = Limit("a whole number of at least 1, or -1 to leave it to TRL", int, lambda n: n >= 1 or n == -1)
FINITE = Limit("a finite number", float, math.isfinite)
NOT_NEGATIVE = Limit("a finite number of at least 0", float, lambda n: 0 <= n < math.inf)
POSITIVE = Limit("a finite number above 0", float, lambda n: 0 < n < math.inf)
NOT_NEGATIVE_OR_INF = Limit("a number of at least 0", float, lambda n: n >= 0)
POSITIVE_OR_INF = Limit("a number above 0", float, lambda n: n > 0)
BELOW_1 = Limit("a number of at least 0 and below 1", float, lambda n: 0 <= n < 1)
TO_1 = Limit("a number of at least 0 and at most 1", float, lambda n: 0 <= n <= 1)
ABOVE_0_TO_1 = Limit("a number above 0 and at most 1", float, lambda n: 0 < n <= 1)
STEPS = Limit(
    "a whole number of steps, or a part of all of them (at least 0 and below 1)",
    float,
    lambda n: 0 <= n < math.inf and (n < 1 or n % 1 == 0),
)

OWN_LIMITS = {
    "reward.weights": FINITE,
    "reward.timeout_s": POSITIVE,
    "lora.alpha": POSITIVE,
    "lora.dropout": BELOW_1,
    "replica.count": FROM_1,
    "proxy.publish_deadline_s": POSITIVE,
    "proxy.load_deadline_s": POSITIVE,
    "proxy.park_timeout_s": POSITIVE,
    "proxy.max_parked": FROM_0,
    "proxy.max_body_bytes": FROM_1,
    "proxy.max_batch": FROM_1,
    "proxy.max_redispatches": FROM_0,
    "jobs.timeout_s": FROM_1,
    "jobs.schedule_deadline_s": FROM_1,
    "jobs.start_deadline_s": FROM_1,
    "jobs.ready_deadline_s": FROM_1,
    "jobs.lease_s": FROM_1,
}
"""Fields of a recipe beyond their types. What depends on other fields is looked at in jobs.preflight."""

TRAINER_LIMITS = {
    "max_steps": FROM_1_OR_AUTO,
    "num_train_epochs": POSITIVE,
    "per_device_train_batch_size": FROM_1,
    "per_device_eval_batch_size": FROM_1,
    "gradient_accumulation_steps": FROM_1,
    "learning_rate": NOT_NEGATIVE,
    "warmup_steps": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "adam_beta1": BELOW_1,
    "adam_beta2": BELOW_1,
    "adam_epsilon": NOT_NEGATIVE,
    "max_grad_norm": NOT_NEGATIVE_OR_INF,
    "logging_steps": STEPS,
    "save_steps": STEPS,
    "save_total_limit": WHOLE,
    "seed": FROM_0,
    "data_seed": FROM_0,
    "dataloader_num_workers": FROM_0,
    "ddp_timeout": FROM_1,
    "num_generations": FROM_1,
    "max_completion_length": FROM_1,
    "temperature": POSITIVE,
    "top_p": ABOVE_0_TO_1,
    "top_k": FROM_MINUS_1,
    "min_p": TO_1,
    "repetition_penalty": POSITIVE,
    "max_tool_calling_iterations": FROM_0,
    "fork_threshold_tokens": FROM_0,
    "vllm_server_timeout": POSITIVE_OR_INF,
    "request_timeout": POSITIVE,
    "weight_sync_timeout": POSITIVE,
    "epsilon": NOT_NEGATIVE,
    "epsilon_high": NOT_NEGATIVE,
    "token_budget": WHOLE,
    "max_inflight_tasks": FROM_1_OR_AUTO,
    "max_staleness": FROM_0,
    "queue_maxsize": FROM_0,
    "weight_sync_steps": FROM_1,
    "heartbeat_stale_after_s": POSITIVE_OR_INF,
    "num_completions_to_print": FROM_0,
}
"""Fields of AsyncGRPOConfig (TRL 1.16) that this program computes with, and the usual ones among the others. TRL checks
few of them: with a staleness below 0 it drops each sample, with no task in flight it waits for ever."""

OPTIONAL = frozenset(
    ("save_total_limit", "data_seed", "min_p", "max_tool_calling_iterations", "epsilon_high", "token_budget")
    + ("num_completions_to_print",)
)
"""Those that may be None, as a script can say."""

VLLM_LIMITS = {
    "max_model_len": FROM_1,
    "max_loras": FROM_1,
    "max_cpu_loras": FROM_1,
    "max_lora_rank": FROM_1,
    "tensor_parallel_size": FROM_1,
    "pipeline_parallel_size": FROM_1,
    "data_parallel_size": FROM_1,
    "max_num_seqs": FROM_1,
    "gpu_memory_utilization": ABOVE_0_TO_1,
}
"""Flags of `vllm serve` (0.31) that this program computes with or sets."""


def check(recipe: "Recipe") -> "Recipe":
    """The same recipe, once each number in it is seen to be one in its range: everything computes with them.

    A recipe that is read back, in a run that may be an old one, is not looked at.

    Raises:
        ConfigError: the first that is not, names field, value and range; or Python's True or False, which are text to
            TOML, and text is true.
    """
    for where, limit, value in _numbers(recipe):
        limit.check(where, value)
    for section, settings in (("trainer", recipe.trainer), ("replica.vllm", recipe.replica.vllm)):
        for name, value in settings.items():
            if value in ("True", "False"):
                raise ConfigError(f"{section}.{name} = {value!r} is text: write {value.lower()}, as TOML does.")
    return recipe


def _numbers(recipe: "Recipe") -> Iterator[tuple[str, Limit, Any]]:
    for where, limit in OWN_LIMITS.items():
        section, _, name = where.partition(".")
        said = getattr(getattr(recipe, section), name, [])  # a script's run may have neither rewards nor lora
        if isinstance(said, list):
            yield from ((f"{where}[{i}]", limit, each) for i, each in enumerate(said))
        else:
            yield where, limit, said
    for name, value in recipe.settings.items():
        if name in TRAINER_LIMITS and not (value is None and name in OPTIONAL):
            where = f"trainer.{name}" if name in recipe.trainer else f"{name} in trainer.script"
            yield where, TRAINER_LIMITS[name], value
    for name, value in recipe.replica.vllm.items():
        if name in VLLM_LIMITS:
            yield f"replica.vllm.{name}", VLLM_LIMITS[name], value
