"""A reward server: a reward that is named by its URL in `reward.functions` and given by whoever answers there.

Each group of completions is one POST: a JSON object with what a reward function gets, `prompts`, `completions` and the
other columns of the data set, each a list with one entry a completion. The answer is a JSON list with a number for each
completion, null where it cannot be scored. If ASYNCGRPO_REWARD_TOKEN is set, it is sent as a bearer token.
"""

import asyncio
import ipaddress
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from jobs.errors import ConfigError, RunFailed

TOKEN = "ASYNCGRPO_REWARD_TOKEN"
"""Environment variable with the bearer token; on Hugging Face Jobs it travels as a secret."""
CALL_TIMEOUTS = 2
"""All tries for a group take this many times `reward.timeout_s`. A group that fails is tried again completion by
completion, all at once, and TRL takes a scorer that is silent for 300 s (`heartbeat_stale_after_s`) for hung."""
TRIES = 3
"""How often a request is sent on which the server fails (500, or no answer in time): the fault may lie in a completion.
A server that is away or busy (502, 503, 504, 429, no connection) is asked again until the time is over."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
"""Back-off between tries: doubles from the first to the longest, each with jitter."""
AWAY_S = 600.0
"""A server that was away for so long ends the run: what is not scored teaches nothing. A restart or a cold start takes
a few minutes."""
CONNECT_S = 10.0
SHOWN_CHARACTERS = 200
"""What errors show of the server's own words."""

_BUSY = (408, 425, 429, 502, 503, 504)
_WRONG = {
    401: f"set {TOKEN} to a token that it takes",
    403: f"set {TOKEN} to a token that it takes",
    404: "check the path of the URL",
    405: "the endpoint must take POST",
}
"""Answers to a wrong setting, and what helps. From a server that has already given rewards they say that it is away:
gateways answer so for it, and tokens are replaced."""


class Unanswered(Exception):
    """Nobody answered; asking for each completion alone would not help."""


def is_url(function: str) -> bool:
    """Whether an entry of `reward.functions` names a server rather than a Python function."""
    return function.startswith(("http://", "https://"))


def token_of(environ: Mapping[str, str]) -> str | None:
    """The bearer token, without the newline that one read from a file may have.

    Raises:
        ConfigError: it can be no header's value; errors of HTTP libraries would show it.
    """
    token = environ.get(TOKEN, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{TOKEN}: a token is one line of printable ASCII characters, and this one is not.")
    return token or None


def secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """What a Job needs in secret to ask reward servers; raises what `token_of` does."""
    token = token_of(environ)
    return {TOKEN: token} if token else {}


class RewardServer:
    """A reward server as a reward function of TRL's: a coroutine function. It can be pickled.

    `where` names the setting in errors; `timeout_s` is what one request may take.

    Raises:
        ConfigError: it is no URL, or one that holds a password.
    """

    def __init__(self, url: str, where: str = "reward.functions", timeout_s: float = 60.0) -> None:
        if not _can_be_asked(url):
            raise ConfigError(f"{where} = {url.rpartition('@')[2]!r}: expected http(s)://host[:port]/path.")
        parts = urlsplit(url)
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        if "@" in parts.netloc:
            raise ConfigError(
                f"{where} = {shown!r}: the URL holds a password, which everybody could read in the run's "
                f"specification. Take it out, and set {TOKEN} instead."
            )
        self.url, self.timeout_s = url, timeout_s
        self.host = str(parts.hostname)
        self.__name__ = f"{parts.netloc}{parts.path}"  # what metrics are called
        self._what = f"{where} = {shown!r}"
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_scored = False
        self._away_since: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None, "_loop": None}

    async def __call__(
        self, completions: Sequence[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        """The server's rewards, one for each completion.

        Raises:
            Unanswered: it is away.
            ValueError: it fails on these completions, or its answer is none.
            ConfigError: it refuses every group: a wrong path or token.
            RunFailed: it has been away for AWAY_S.
        """
        answer = await self._post(self._body({**columns, "completions": completions}))
        return self._read(answer, len(completions))

    async def close(self) -> None:
        """Closes its connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    @property
    def longest_s(self) -> float:
        """What a group may take in all: once together, and once more completion by completion."""
        return 2 * CALL_TIMEOUTS * self.timeout_s

    @property
    def is_loopback(self) -> bool:
        """Whether the URL names the machine it is used on."""
        try:
            return ipaddress.ip_address(self.host).is_loopback or ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return self.host == "localhost"

    def check(self, patience_s: float) -> None:
        """Sees whether anybody answers at all, be it with an error: a GET that scores nothing and holds no token.

        Raises:
            ConfigError: nobody does within `patience_s`.
        """
        deadline = time.monotonic() + patience_s
        while True:
            try:
                httpx.get(self.url, timeout=httpx.Timeout(CONNECT_S))
                return
            except httpx.TransportError as error:
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"{self._what}: nobody answers there ({_words(error)}). Start the server, or check host and "
                        "port; the machine of the trainer must reach it."
                    ) from error
                time.sleep(LONGEST_PAUSE_S * random.uniform(0.1, 0.2))

    def _body(self, columns: Mapping[str, Any]) -> bytes:
        parts = []
        for name, values in columns.items():
            try:
                parts.append(f"{json.dumps(name)}: {json.dumps(values, allow_nan=False)}")
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{self._what}: column `{name}` of the data set cannot be sent as JSON ({error}). Drop it from the "
                    "data set, or make it text or numbers."
                ) from error
        return f"{{{', '.join(parts)}}}".encode()

    async def _post(self, body: bytes) -> httpx.Response:
        begun = time.monotonic()
        deadline = begun + CALL_TIMEOUTS * self.timeout_s
        pause, failures = FIRST_PAUSE_S, 0
        while True:
            try:
                answer = await self._send(body, min(self.timeout_s, deadline - time.monotonic()))
                status = answer.status_code
                away = status in _BUSY or (self._has_scored and status in _WRONG)
                if not away:
                    self._away_since = None
                    if status < 500:
                        return answer
                why = f"status {status}: {self._said(answer)}"
            except httpx.TransportError as error:
                why, away = _words(error), not isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout)
            failures += not away
            if failures >= TRIES:
                raise ValueError(f"{self._what}: failed {TRIES} times, the last with {why}")
            if time.monotonic() + pause > deadline:
                break
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, LONGEST_PAUSE_S)
        if not away:
            raise ValueError(f"{self._what}: no answer within {CALL_TIMEOUTS * self.timeout_s:g} s ({why})")
        self._away_since = self._away_since or begun
        if (silent_s := time.monotonic() - self._away_since) > AWAY_S:
            raise RunFailed(f"{self._what}: away for {silent_s:.0f} s ({why}). Start the server, then the run again.")
        raise Unanswered(f"{self._what}: away for {silent_s:.0f} s ({why})")

    async def _send(self, body: bytes, timeout_s: float) -> httpx.Response:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._client, self._loop = httpx.AsyncClient(limits=httpx.Limits(max_connections=None)), loop
        headers = {"content-type": "application/json", "accept": "application/json"}
        if token := token_of(os.environ):
            headers["authorization"] = f"Bearer {token}"
        timeout = httpx.Timeout(max(timeout_s, 0.001), connect=CONNECT_S)
        return await self._client.post(self.url, content=body, headers=headers, timeout=timeout)

    def _read(self, answer: httpx.Response, count: int) -> list[float | None]:
        status = answer.status_code
        if answer.has_redirect_location:
            to = urlsplit(answer.headers["location"])
            raise ConfigError(f"{self._what}: redirects to {to.netloc}{to.path}. Give the URL that it leads to.")
        if fix := _WRONG.get(status):
            raise ConfigError(f"{self._what}: status {status} ({self._said(answer)}): {fix}.")
        if not answer.is_success:
            raise ValueError(f"{self._what}: status {status}: {self._said(answer)}")
        expected = f"expected a JSON list of {count} numbers or nulls"
        try:
            rewards = answer.json()
        except ValueError as error:
            raise ValueError(f"{self._what}: {expected}, got {self._said(answer)!r}") from error
        if not isinstance(rewards, list):
            raise ValueError(f"{self._what}: {expected}, got {self._said(answer)}")
        if len(rewards) != count:
            raise ValueError(f"{self._what}: {expected}, got {len(rewards)} of them")
        for index, reward in enumerate(rewards):
            if not (reward is None or isinstance(reward, int | float)):
                raise ValueError(f"{self._what}: {expected}, got {json.dumps(reward)[:SHOWN_CHARACTERS]} at {index}")
        self._has_scored = True
        return rewards

    def _said(self, answer: httpx.Response) -> str:
        """The start of the server's answer, on one line and without the token."""
        text = " ".join(answer.text.split())[:SHOWN_CHARACTERS]
        token = token_of(os.environ)
        return (text.replace(token, "***") if token else text) or answer.reason_phrase


def _can_be_asked(url: str) -> bool:
    """Whether httpx and the resolver take it: they find more faults, as late as they ask."""
    try:
        port, read = urlsplit(url).port, httpx.URL(url)
        return bool(read.host and read.raw_host.decode("ascii").encode("idna")) and (port is None or port > 0)
    except (ValueError, httpx.InvalidURL):
        return False


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
