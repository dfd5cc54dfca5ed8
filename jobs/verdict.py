"""Is an engine's answer complete, an engine's own verdict, or a reason to ask another engine?

Answers are long (a token id, a logprob, a text and an offset for each token), and all that counts is whether two lists
are equally long. So they are scanned, not parsed: in JSON `"name":` with bare quotes can only be a member's name, since
quotes within a string are escaped, and the lists hold nothing but numbers. That is for the one shape that counts,
vLLM's answer with one choice and token ids; all others are parsed.
"""

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

_IDS = b'"token_ids":['
_LOGPROBS = b'"token_logprobs":['
_FINISH = b'"finish_reason":'
_ABORT = b'"finish_reason":"abort"'
RETRYABLE_4XX = frozenset({408, 425, 429})
"""RFC 9110, 8470, 6585: the server could not take the request at this time; nothing is wrong with it."""
REFUSED = frozenset({401, 403, 407})
"""The engine or its gateway does not take our credentials: no fault of the client's."""


PATHS_OWN = frozenset({301, 302, 303, 307, 308, 405, 501})
"""What says something about a path, and nothing about the engine that is asked for it."""
_RELATIVE = re.compile(rb"^https?://[^/]*(?=/)")


class Blame(Enum):
    """What an answer that is no result says about the engine."""

    ENGINE = "engine"
    """It is broken, going away or unreachable: it should get nothing until it answers again."""
    VERSION = "version"
    """It lacks the version."""
    NOTHING = "nothing"
    """Only this answer was bad."""


class Elsewhere(Exception):
    """This attempt brought no result: ask another engine. `delivered` if the engine may have worked on it."""

    def __init__(self, reason: str, blame: Blame, *, delivered: bool = True) -> None:
        self.reason = reason
        self.blame = blame
        self.delivered = delivered
        super().__init__(reason)


@dataclass(slots=True)
class Answer:
    """What a client gets: a complete completion or an engine's own verdict, with the tokens that were generated."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    tokens: int = 0


def judge_status(status: int, body: bytes) -> None:
    """Passes the statuses that are a result: 2xx, and the 4xx by which an engine says what it thinks of a request.

    Raises:
        Elsewhere: for all others.
    """
    if 200 <= status < 300:
        return
    words = f"{status} {body[:300].decode(errors='replace')}".strip()
    if status == 404:
        raise Elsewhere(words, Blame.VERSION if b"does not exist" in body else Blame.ENGINE)
    if status in RETRYABLE_4XX:
        raise Elsewhere(words, Blame.NOTHING)
    if not 400 <= status < 500 or status in REFUSED:
        raise Elsewhere(words, Blame.ENGINE)


def of_the_path(status: int, body: bytes) -> bool:
    """Whether an engine says by this that it has no such path, or has it elsewhere: to a request that may be for any
    path, that is its answer. vLLM says 404 in JSON (`detail`, or `error`), a gateway that has lost its Job in HTML.
    """
    if status in PATHS_OWN:
        return True
    return status == 404 and body[:1] == b"{" and b"does not exist" not in body


def here(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers of a redirect that leads to the same server, as the client sees it: an engine knows its own address."""
    return [(name, _RELATIVE.sub(b"", value) if name == b"location" else value) for name, value in headers]


def judge_completion(body: bytes, choices: int = 1) -> int:
    """Returns how many tokens a 200's body brings; `choices` is the number of completions asked for.

    Raises:
        Elsewhere: it is cut off (`finish_reason: abort`, as an engine that is told to stop answers), has unequal
            numbers of tokens and logprobs, or is no completion at all.
    """
    if choices == 1:
        logprobs, ids = body.find(_LOGPROBS), body.rfind(_IDS)
        finish = body.rfind(_FINISH, 0, ids)
        if 0 < logprobs < finish < ids and body[:1] == b"{" and body[-1:] == b"}":
            if body.startswith(_ABORT, finish):
                raise Elsewhere("finish_reason abort", Blame.ENGINE)
            tokens, probs = _length(body, ids + len(_IDS)), _length(body, logprobs + len(_LOGPROBS))
            if tokens != probs:
                raise Elsewhere(f"{tokens} token_ids but {probs} token_logprobs", Blame.NOTHING)
            return tokens
    return _judge_parsed(body)


def _length(body: bytes, start: int) -> int:
    """Number of elements in the flat list of numbers that starts there."""
    end = body.find(b"]", start)
    return body.count(b",", start, end) + 1 if end > start else 0


def _judge_parsed(body: bytes) -> int:
    try:
        answer = json.loads(body)
        choices = answer["choices"]
        lengths = [(_size(choice.get("token_ids")), _logprobs(choice.get("logprobs"))) for choice in choices]
        aborted = any(choice.get("finish_reason") == "abort" for choice in choices)
        usage = answer.get("usage") or {}
        generated = int(usage.get("completion_tokens") or 0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Elsewhere(f"a 200 that is no completion: {body[:100]!r}", Blame.ENGINE) from error
    if aborted:
        raise Elsewhere("finish_reason abort", Blame.ENGINE)
    for ids, logprobs in lengths:
        if ids is not None and logprobs is not None and ids != logprobs:
            raise Elsewhere(f"{ids} token_ids but {logprobs} token_logprobs", Blame.NOTHING)
    return sum(ids or 0 for ids, _ in lengths) or generated


def _size(value: Any) -> int | None:
    return len(value) if isinstance(value, list) else None


def _logprobs(value: Any) -> int | None:
    """Number of logprobs, in the words of /v1/completions or of /v1/chat/completions."""
    if not isinstance(value, Mapping):
        return None
    return _size(value.get("token_logprobs", value.get("content")))


def renamed(body: bytes, name: str, public: str, count: int = -1) -> bytes:
    """An answer, or some events of one, with the model called as the client called it; all else as it came.

    `count` limits how often it is looked for, which saves the search through the rest of a long answer.
    """
    if name == public:
        return body
    old, new = json.dumps(name).encode(), json.dumps(public).encode()
    compact = b'"model":' + old
    if compact in body:
        return body.replace(compact, b'"model":' + new, count)
    return re.sub(rb'("model"\s*:\s*)' + re.escape(old), lambda match: match[1] + new, body)


def plain(headers: list[tuple[bytes, bytes]], body: bytes) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Undoes an engine's compression, asked for or not, and makes Content-Length say what the body is.

    Raises:
        Elsewhere: the body is not what its Content-Encoding says, or in an encoding that was not asked for.
    """
    encodings = [value for name, value in headers if name == b"content-encoding"]
    kept = [header for header in headers if header[0] not in (b"content-encoding", b"content-length")]
    if encodings:
        if encodings not in ([b"gzip"], [b"deflate"]):
            raise Elsewhere(f"content-encoding {encodings}, which nobody asked for", Blame.NOTHING)
        try:
            body = zlib.decompress(body, 47)  # 32 + 15: gzip or zlib, whichever its header says
        except zlib.error as error:
            raise Elsewhere(f"content-encoding {encodings}: {error}", Blame.NOTHING) from error
    return kept, body
