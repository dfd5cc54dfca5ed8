"""Are the prompts of a data set conversations that fit into the model's context?

One that is too long would end the run when it is drawn: vLLM refuses it, and TRL asks for it 90 times more before it
gives up. One that is plain text, TRL (1.14 to 1.16) takes for a list of messages, one for each character. A chat
template makes nothing of those, and the run learns without its prompts; or empty turns, longer than the text; or fails.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jobs.errors import ConfigError

log = logging.getLogger(__name__)

TOKENIZED = 1000
"""How many prompts are tokenized, those with the most characters: a second; a million prompts would take minutes."""
SHOWN_CHARACTERS = 60
"""What an error shows of a prompt: enough to know it by."""


def check(trainer: Any, max_model_len: int | None) -> None:
    """Looks at the prompts of an AsyncGRPOTrainer; `max_model_len` is the replicas', None if it is the model's own.

    Raises:
        ConfigError: one leaves no room for a single token, is no conversation, or none that the chat template takes.
    """
    limit = max_model_len or getattr(trainer.model.config, "max_position_embeddings", None)
    columns = getattr(trainer.train_dataset, "column_names", None) or []
    prompts = "prompt" in columns and hasattr(trainer.train_dataset, "__len__")
    if limit is None or not prompts:  # a stream, or prompts that come from an environment
        return
    template = trainer.args.chat_template_kwargs or {}
    found = lengths(trainer.train_dataset["prompt"], trainer.processing_class, template)
    judge(found, limit, trainer.args.max_completion_length)


def lengths(prompts: Sequence[Any], tokenizer: Any, template: Mapping[str, Any]) -> dict[int, int]:
    """Tokens of the longest conversations by their row, counted as TRL will send them.

    Raises:
        ConfigError: see `check`.
    """
    characters = {}
    for row, prompt in enumerate(prompts):
        check_conversation(prompt, row)
        characters[row] = sum(len(str(message.get("content"))) for message in prompt)
    longest = sorted(characters, key=characters.__getitem__, reverse=True)[:TOKENIZED]
    return {row: _tokens(prompts[row], row, tokenizer, template) for row in longest}


def check_conversation(prompt: Any, row: int) -> None:
    """Raises ConfigError if a prompt is not a list of messages."""
    if isinstance(prompt, list) and prompt and all(isinstance(message, Mapping) for message in prompt):
        return
    told = repr(prompt)
    told = told if len(told) <= SHOWN_CHARACTERS else told[:SHOWN_CHARACTERS] + "..."
    raise ConfigError(
        f"dataset: the prompt of row {row} is {told}, not a conversation: TRL would take it for a list of messages, "
        "and the model would not see it. Make each prompt one, such as [{'role': 'user', 'content': text}]."
    )


def _tokens(prompt: Any, row: int, tokenizer: Any, template: Mapping[str, Any]) -> int:
    try:
        return len(tokenizer.apply_chat_template(prompt, return_dict=False, add_generation_prompt=True, **template))
    except Exception as error:  # jinja's, TypeError, ValueError: a template may raise anything
        raise ConfigError(
            f"dataset: the model's chat template does not take the prompt of row {row}: {type(error).__name__}: {error}"
        ) from error


def judge(tokens: Mapping[int, int], limit: int, completion: int) -> None:
    """Raises ConfigError if a prompt fills the context; tells of those that cut a completion of full length short."""
    row = max(tokens, key=tokens.__getitem__, default=None)
    if row is None:
        return
    if tokens[row] >= limit:
        number = sum(each >= limit for each in tokens.values())
        raise ConfigError(
            f"dataset: the prompt of row {row} has {tokens[row]} tokens, and {number} prompts at least leave no room "
            f"for an answer with replica.vllm.max_model_len = {limit}. Drop them from the data set, or raise that."
        )
    if short := sum(each + completion > limit for each in tokens.values()):
        log.warning(
            "the longest prompt (row %d) has %d tokens; after %d prompts at least a completion is cut below "
            "trainer.max_completion_length = %d, for replica.vllm.max_model_len is %d",
            *(row, tokens[row], short, completion, limit),
        )
