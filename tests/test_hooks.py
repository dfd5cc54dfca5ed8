"""What a script finds in TRL's own classes; the trainer itself is not built here (see test_script_training)."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import recipe, trl_patches
from jobs.errors import ConfigError
from jobs.hooks import Hooks
from jobs.script import Script

SETTINGS = {"output_dir": "out", "vllm_server_base_url": "http://127.0.0.1:9", "use_cpu": True, "bf16": False}


class Run:
    """The hooks in TRL's classes, and what they were called with."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.events: list[Any] = []
        self.checkpoint: str | None = "the checkpoint"

    def install(self, settings: dict[str, Any] | None = None, **changes: Any) -> Hooks:
        values = {"name": "x", "model": {"id": "some/model"}, "script": {"name": "s.py", "text": ""}, **changes}
        hooks = Hooks(
            recipe.Recipe.from_dict(values), {**SETTINGS, **(settings or {})}, "/model", self.events.append, self.train
        )
        hooks.install()
        return hooks

    def train(self, trainer: Any, train: Callable[[str | None], Any]) -> Any:
        return train(self.checkpoint)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with trl_patches.without_vllm():
        from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    run = Run()

    def init(
        self: Any,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        peft_config: Any = None,
        rollout_worker: Any = None,
    ) -> None:
        run.given = {"model": model, "reward_funcs": reward_funcs, "peft_config": peft_config}
        self.args = args

    def train(self: Any, resume_from_checkpoint: Any = None) -> Any:
        run.events.append(resume_from_checkpoint)
        return "trained"

    # Put into TRL's places, and put back after the test together with what the hooks make of them.
    monkeypatch.setattr(AsyncGRPOTrainer, "__init__", init)
    monkeypatch.setattr(AsyncGRPOTrainer, "train", train)
    monkeypatch.setattr(AsyncGRPOConfig, "__post_init__", AsyncGRPOConfig.__post_init__)
    return run


def config(**fields: Any) -> Any:
    from trl.experimental.async_grpo import AsyncGRPOConfig

    return AsyncGRPOConfig(**fields)


def trainer(*args: Any, **fields: Any) -> Any:
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    return AsyncGRPOTrainer(*args, **fields)


def adapter(**fields: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(**fields)


def reward(completions: Any, **_: Any) -> list[float]:
    return [1.0 for _ in completions]


def test_the_recipe_holds_where_both_say_something(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.install({"max_steps": 5, "learning_rate": 0.5})
    with caplog.at_level(logging.WARNING):
        made = config(output_dir="mine", max_steps=200, num_generations=4, vllm_server_base_url="http://localhost:8000")
    assert (made.output_dir, made.vllm_server_base_url) == ("out", "http://127.0.0.1:9")
    assert (made.max_steps, made.learning_rate, made.num_generations) == (5, 0.5, 4)
    assert [record.getMessage() for record in caplog.records] == [
        "the script says output_dir = 'mine'; what holds is 'out'",
        "the script says max_steps = 200; what holds is 5",
    ]


def test_a_class_of_the_scripts_own_is_changed_too(run: Run) -> None:
    import dataclasses

    from trl.experimental.async_grpo import AsyncGRPOConfig

    run.install()

    @dataclasses.dataclass
    class Mine(AsyncGRPOConfig):  # type: ignore[misc]
        more: int = 3

    assert (Mine().output_dir, Mine(more=4).more) == ("out", 4)


def test_a_script_without_adapter_gets_the_recipes(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    hooks = run.install(lora={"r": 4, "alpha": 2})
    with caplog.at_level(logging.WARNING):
        made = trainer("some/model", reward)
    assert (run.given["peft_config"].r, run.given["peft_config"].lora_alpha) == (4, 2)
    assert run.given["model"] == "/model" and run.events == [made]
    (guarded,) = run.given["reward_funcs"]
    assert guarded.__name__ == "reward" and asyncio.run(guarded(completions=["a", "b"])) == [1.0, 1.0]
    assert not caplog.records and not hooks.trained


def test_the_recipes_adapter_and_model_hold_and_that_is_told(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.install(lora={"r": 4})
    with caplog.at_level(logging.WARNING):
        trainer(model="other/model", reward_funcs=[reward, reward], peft_config=adapter(r=64))
    assert run.given["peft_config"].r == 4 and len(run.given["reward_funcs"]) == 2
    assert "model = 'other/model'; what holds is 'some/model'" in caplog.text and "r=64" in caplog.text


def test_the_scripts_adapter_holds_where_the_recipe_has_none(run: Run) -> None:
    run.install(replica={"vllm": {"max_lora_rank": 16}})
    trainer("some/model", peft_config=adapter(r=16))
    assert run.given["peft_config"].r == 16
    with pytest.raises(ConfigError, match="rank 32 is greater than max_lora_rank 16"):
        trainer("some/model", peft_config=adapter(r=32))
    with pytest.raises(ConfigError, match="use_dora = True"):
        trainer("some/model", peft_config=adapter(r=8, use_dora=True))


def test_full_fine_tuning_is_one_clear_error(run: Run) -> None:
    run.install()
    with pytest.raises(ConfigError, match=r"trains without an adapter.*the recipe has no \[lora\]"):
        trainer("some/model", reward)


def test_what_would_train_on_rollouts_of_another_policy_is_refused(run: Run) -> None:
    run.install(lora={"r": 4})
    with pytest.raises(ConfigError, match="a rollout_worker: TRL does not tell it the adapter's name"):
        trainer("some/model", reward, rollout_worker=object())


def test_training_resumes_and_is_noted(run: Run, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    hooks = run.install(lora={"r": 4})
    made = trainer("some/model", args=config(save_strategy="no"))
    assert made.train() == "trained" and hooks.trained
    assert run.events == [made, "the checkpoint"]
    assert "save_strategy = 'no': a trainer that is killed starts anew" in caplog.text


@pytest.mark.parametrize("said", [True, False, None])
def test_what_to_resume_from_is_the_runs_to_say(run: Run, said: bool | None, tmp_path: Path) -> None:
    """`True` would be an error of transformers where there is no checkpoint yet, as in every first attempt."""
    run.checkpoint = None
    run.install(lora={"r": 4})
    made = trainer("some/model", args=config(save_strategy="steps"))
    made.train(resume_from_checkpoint=said)
    made.train(resume_from_checkpoint="the script's own")
    assert run.events == [made, None, "the script's own"]


def test_a_class_that_is_gone_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import trl.experimental.async_grpo as module

    monkeypatch.delattr(module, "AsyncGRPOConfig")
    with pytest.raises(ConfigError, match=r"lacks trl\.experimental\.async_grpo\.AsyncGRPOConfig, which"):
        run.install()


def test_a_script_is_read_back_from_the_specification() -> None:
    values = {"name": "x", "model": {"id": "m"}, "script": {"name": "s.py", "text": "1"}}
    assert recipe.Recipe.from_dict(values).script == Script("s.py", "1", [])
