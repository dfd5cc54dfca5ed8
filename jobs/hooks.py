"""What a script finds when it uses TRL's AsyncGRPOConfig and AsyncGRPOTrainer: those, fitted to the run.

The script stays as it is; the two classes are changed before it runs. One rule says which settings hold: the recipe's,
where it says something (the plan, the replicas and what was checked follow from it), and the script's otherwise. What
depends on the machine (server, output directory, ...) is set here. Each value of the script's that is not kept is told.
"""

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from jobs import script as scripts
from jobs.errors import ConfigError
from jobs.manifest import check_config
from jobs.recipe import Recipe
from jobs.scoring import Scoring
from jobs.trl_targets import existing, imported

log = logging.getLogger("jobs.train")

UNFIT = {
    "weight_transfer": "it would sync whole weights, which do not reach the replicas",
    "rollout_worker": "TRL does not tell it the adapter's name, so its rollouts would be the base model's",
}
"""Arguments of AsyncGRPOTrainer (TRL 1.16) with which it cannot train here, and why."""

Train = Callable[[str | None], Any]
"""Trains a trainer from a checkpoint, or from its beginning; returns what TRL's `train` does."""


@dataclasses.dataclass
class Hooks:
    """The changes to both classes, and whether the script has used them.

    `settings` are the fields of AsyncGRPOConfig that hold whatever the script says; `model` is the base model as it
    lies on this machine. `attach` is called with each new trainer; `train` with a trainer and TRL's own way to train
    it. `tell` says whether this process tells what does not hold: one of several is enough.
    """

    recipe: Recipe
    settings: Mapping[str, Any]
    model: str
    attach: Callable[[Any], None]
    train: Callable[[Any, Train], Any]
    tell: bool = True
    trained: bool = False

    def install(self) -> None:
        """Changes the classes in place; what a script derives from them is changed with them."""
        trl = imported("trl.experimental.async_grpo")
        for owner, name, hook in (
            ("AsyncGRPOConfig", "__post_init__", self._configure),
            ("AsyncGRPOTrainer", "__init__", self._construct),
            ("AsyncGRPOTrainer", "train", self._train),
        ):
            known = existing(trl, owner)
            setattr(known, name, _around(existing(known, name), hook))

    def _configure(self, original: Callable[..., None], config: Any) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
        for name, value in self.settings.items():
            said = getattr(config, name)
            if said not in (value, defaults[name]):
                self._overruled(name, said, value)
            setattr(config, name, value)
        original(config)

    def _construct(self, original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(trainer, *args, **kwargs)
        said = given.arguments
        for name, why in UNFIT.items():
            if said.get(name) is not None:
                raise ConfigError(f"trainer.script gives AsyncGRPOTrainer a {name}: {why}. Remove it.")
        if said.get("model") not in (self.recipe.model.id, self.model):
            self._overruled("model", said.get("model"), self.recipe.model.id)
        said["model"] = self.model
        said["peft_config"] = self._adapter(said.get("peft_config"))
        functions = said.get("reward_funcs") or []
        functions = functions if isinstance(functions, list) else [functions]
        said["reward_funcs"] = Scoring(functions, [1.0] * len(functions)).columns
        original(*given.args, **given.kwargs)
        self.attach(trainer)

    def _adapter(self, said: Any) -> Any:
        lora = self.recipe.lora
        if lora is not None:
            if said is not None:
                self._overruled("peft_config", said, lora)
            return lora.peft()
        if said is None:
            raise ConfigError(scripts.NO_ADAPTER)
        check_config(said.to_dict(), self.recipe.replica.vllm.get("max_lora_rank"))
        return said

    def _train(
        self,
        original: Callable[..., Any],
        trainer: Any,
        resume_from_checkpoint: str | bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self.tell and trainer.args.save_strategy == "no":
            log.warning(
                "save_strategy = 'no': a trainer that is killed starts anew. Set trainer.save_strategy = 'steps' and "
                "trainer.save_steps in the recipe."
            )
        # True means the last one in the output directory: the run's own, which comes first if there is one.
        said = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else None
        result = self.train(trainer, lambda resume: original(trainer, resume or said, *args, **kwargs))
        self.trained = True
        return result

    def _overruled(self, name: str, said: Any, holds: Any) -> None:
        if self.tell:
            log.warning("the script says %s = %r; what holds is %r", name, said, holds)


def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """`original` as a method that calls `hook` with it first."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(original, self, *args, **kwargs)

    return method
