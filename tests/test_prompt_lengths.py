import logging
from collections.abc import Callable
from types import SimpleNamespace

import datasets
import pytest

from jobs import prompt_lengths, tiny
from jobs.errors import ConfigError
from jobs.prompt_lengths import judge, lengths
from tests.test_train import WAIT_S, Training, cache, engine, train  # noqa: F401 (fixtures)


def test_the_longest_prompts_are_counted_as_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.build("digit"))
    prompts = [[{"role": "user", "content": "a" * count}] for count in (3, 50, 7)]
    around = len("<user\n>\n" + "<assistant\n")  # <: start, >: end, one token each
    assert lengths(prompts, tokenizer, {}) == {1: 50 + around, 2: 7 + around, 0: 3 + around}
    monkeypatch.setattr(prompt_lengths, "TOKENIZED", 1)
    assert lengths(prompts, tokenizer, {}) == {1: 50 + around}


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("x" * 400, "'" + "x" * 59 + "..."),
        (["one", "two"], "['one', 'two']"),
        ([], "[]"),
        (None, "None"),
    ],
)
def test_a_prompt_that_is_no_conversation_is_refused(prompt: object, told: str) -> None:
    fine = [{"role": "user", "content": "1 + 1?"}]
    with pytest.raises(ConfigError) as caught:
        lengths([fine, prompt], None, {})
    assert f"the prompt of row 1 is {told}, not a conversation" in str(caught.value)
    assert "Make each prompt one, such as [{'role': 'user', 'content': text}]." in str(caught.value)


def test_what_the_chat_template_refuses_is_told_with_its_row() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.build("digit"))
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match=r"take the prompt of row 0: TemplateError: roles must alternate"):
        lengths([[{"role": "system", "content": "a"}]], tokenizer, {})


def test_a_data_set_without_prompts_is_not_looked_at() -> None:
    """An environment gives them, and the data set says which."""
    trainer = SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace()),
        train_dataset=datasets.Dataset.from_dict({"environment": ["a"]}),
    )
    prompt_lengths.check(trainer, 64)


def test_what_does_not_fit_is_refused_and_what_barely_does_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"row 7 has 40 tokens, and 2 prompts at least .*max_model_len = 32"):
        judge({3: 32, 7: 40, 1: 31}, 32, 8)
    with caplog.at_level(logging.WARNING):
        judge({}, 32, 8)
        judge({1: 24}, 32, 8)
        assert not caplog.records
        judge({1: 24, 4: 25, 5: 31}, 32, 8)
    assert "(row 5) has 31 tokens; after 2 prompts" in caplog.text


def test_a_prompt_that_cannot_fit_is_found_before_training(train: Callable[..., Training]) -> None:  # noqa: F811
    training = train("trainer.max_steps=3", "replica.vllm.max_model_len=64")
    assert training.process.wait(WAIT_S) == 2
    assert "error: dataset: the prompt of row " in training.log.read_text().splitlines()[-1]
