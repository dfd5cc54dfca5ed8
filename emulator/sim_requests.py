"""Requests to a simulated engine: what vLLM 0.31 accepts, and its words for what it does not."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from emulator.sim_model import tokenize

MOST_LOGPROBS = 20
"""vLLM's --max-logprobs."""
MOST_STOPS = 4
INT64 = 2**63 - 1


class Refused(Exception):
    """A request that gets an error: HTTP status, and vLLM's message, type and param."""

    def __init__(
        self, message: str, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param

    def content(self) -> dict[str, Any]:
        """The answer's body."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}


@dataclass(frozen=True)
class Limits:
    """What a request is checked against."""

    served: str
    max_model_len: int
    vocabulary: int
    end: int


@dataclass(frozen=True)
class Completion:
    """A valid request for completions: token ids for each prompt."""

    model: str
    prompts: list[list[int]]
    n: int
    max_tokens: int
    temperature: float
    seed: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    stream: bool
    usage: bool
    token_ids: bool
    tokens_as_ids: bool
    ignore_end: bool
    stops: tuple[str, ...]
    stop_ids: frozenset[int]


def read_json(content_type: str, body: bytes) -> dict[str, Any]:
    """The JSON object in a request.

    Raises:
        Refused: another content type, no JSON, or no object.
    """
    if content_type.partition(";")[0].strip().lower() != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise Refused(message, kind="Bad Request")
    try:
        content = json.loads(body)
    except ValueError as error:
        where = f"body.{getattr(error, 'pos', 0)}"
        context = {"error": getattr(error, "msg", str(error))}
        raise invalid("json_invalid", where, "JSON decode error", {}, context) from error
    if not isinstance(content, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise invalid("model_attributes_type", "body", message, content)
    return content


def field(body: Mapping[str, Any], name: str) -> str:
    """A text that a request must have.

    Raises:
        Refused: it is missing or no text.
    """
    where = f"body.{name}"
    if name not in body:
        raise invalid("missing", where, "Field required", body)
    if not isinstance(body[name], str):
        raise invalid("string_type", where, "Input should be a valid string", body[name])
    return str(body[name])


def invalid(kind: str, where: str, message: str, value: Any, context: dict[str, Any] | None = None) -> Refused:
    """What a value of the wrong kind gets: one error of pydantic's, as vLLM prints it."""
    if isinstance(value, dict | list):
        value = f"<{type(value).__name__} of {len(value)} items>"
    entry = {"type": kind, "loc": where, "msg": message, "input": value if isinstance(value, str) else str(value)}
    entries = entry | ({"ctx": context} if context else {})
    return Refused(f"1 validation error:\n  {entries}", kind="Bad Request", param=where)


def unknown_model(name: str) -> Refused:
    """What a completion for a name that is not served gets."""
    return Refused(f"The model `{name}` does not exist.", 404, "NotFoundError", "model")


def completion(body: Mapping[str, Any], limits: Limits, known: Mapping[str, Any]) -> Completion:
    """Checks a request in vLLM's order; `known` holds the adapters' names.

    Raises:
        Refused: with vLLM's words.
    """
    prompt = body.get("prompt")
    for name in ("prompt_logprobs", "logprobs"):
        value = body.get(name)
        if value is not None and not isinstance(value, int | float):
            raise _refused(f"`{name}` must be an integer.", name, value)
        if value is not None and value < 0 and value != -1:
            raise _refused(f"`{name}` must be a positive value or -1.", name, value)
    if body.get("stream_options") and not body.get("stream"):
        message = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
        raise Refused(message, param="stream_options")
    if prompt is None or prompt == "":
        message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
        raise Refused(message, param="prompt")
    numbers = {name: _integer(body, name, default) for name, default in (("max_tokens", 16), ("n", 1), ("seed", None))}
    prompts = _prompts(prompt)
    model = body.get("model") or limits.served
    if model != limits.served and model not in known:
        raise unknown_model(model)
    max_tokens = 16 if numbers["max_tokens"] is None else numbers["max_tokens"]
    _check_prompts(prompts, max_tokens, limits)
    echo = bool(body.get("echo"))
    temperature = _number(body, "temperature", 1.0)
    _check_sampling(numbers["n"] or 0, max_tokens, temperature, _number(body, "top_p", 1.0), body.get("logprobs"), echo)
    stops = body.get("stop") or []
    if isinstance(stops, list) and len(stops) > MOST_STOPS:
        message = f"List should have at most {MOST_STOPS} items after validation, not {len(stops)}"
        raise invalid("too_long", "body.stop", message, stops)
    logprobs, prompt_logprobs = body.get("logprobs"), body.get("prompt_logprobs")
    return Completion(
        model=model,
        prompts=prompts,
        n=numbers["n"] or 1,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=numbers["seed"],
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo and prompt_logprobs is None else prompt_logprobs,
        echo=echo,
        stream=bool(body.get("stream")),
        usage=bool((body.get("stream_options") or {}).get("include_usage")),
        token_ids=bool(body.get("return_token_ids")),
        tokens_as_ids=bool(body.get("return_tokens_as_token_ids")),
        ignore_end=bool(body.get("ignore_eos")),
        stops=tuple([stops] if isinstance(stops, str) else stops),
        stop_ids=frozenset(body.get("stop_token_ids") or ()),
    )


def _prompts(prompt: Any) -> list[list[int]]:
    if isinstance(prompt, str):
        return [tokenize(prompt)]
    if isinstance(prompt, list):
        if not prompt:
            raise Refused("You must pass at least one prompt")
        if all(isinstance(token, int) and token >= 0 for token in prompt):
            return [prompt]
        if all(isinstance(each, str) for each in prompt):
            return [tokenize(each) for each in prompt]
        if all(isinstance(each, list) and all(isinstance(token, int) for token in each) for each in prompt):
            return [list(each) for each in prompt]
    raise invalid("list_type", "body.prompt.0", "Input should be a valid list", prompt)


def _check_prompts(prompts: list[list[int]], max_tokens: int, limits: Limits) -> None:
    for prompt in prompts:
        length, room = len(prompt), limits.max_model_len - max_tokens
        if length > room:
            # vLLM's own tokenizer stops one token beyond the room, so that this length may be a lower bound.
            bound = "at least " if length == room + 1 else ""
            raise Refused(
                f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested "
                f"{max_tokens} output tokens and your prompt contains {bound}{length} input tokens, for a total of "
                f"{bound}{length + max_tokens} tokens. Please reduce the length of the input prompt or the number of "
                f"requested output tokens. (parameter=input_tokens, value={length})",
                param="input_tokens",
            )
        if (outside := max(prompt, default=0)) >= limits.vocabulary:
            raise Refused(f"Token id {outside} is out of vocabulary")


def _check_sampling(
    n: int, max_tokens: int, temperature: float, top_p: float, logprobs: int | None, echo: bool
) -> None:
    if n < 1:
        raise Refused(f"n must be at least 1, got {n}.")
    if temperature < 0:
        raise _refused(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    if not 0 < top_p <= 1:
        raise _refused(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    if max_tokens < (0 if echo else 1):
        raise _refused(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    if logprobs is not None and logprobs > MOST_LOGPROBS:
        message = f"Requested sample logprobs of {logprobs}, which is greater than max allowed: {MOST_LOGPROBS}"
        raise Refused(f"{message} (parameter=logprobs, value={logprobs})", param="logprobs")


def _integer(body: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = body.get(name, default)
    if value is None:
        return None
    try:
        number = int(value)
    except (TypeError, ValueError):
        message = "Input should be a valid integer, unable to parse string as an integer"
        raise invalid("int_parsing", f"body.{name}", message, value) from None
    if abs(number) > INT64:
        message = f"Input should be less than or equal to {INT64}"
        raise invalid("less_than_equal", f"body.{name}", message, value, {"le": INT64})
    return number


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    try:
        return default if value is None else float(value)
    except (TypeError, ValueError):
        message = "Input should be a valid number, unable to parse string as a number"
        raise invalid("float_parsing", f"body.{name}", message, value) from None


def _refused(message: str, param: str, value: Any) -> Refused:
    return Refused(f"{message} (parameter={param}, value={value})", param=param)
