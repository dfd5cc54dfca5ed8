"""Talking to the Hub's Jobs API: `huggingface_hub` with the time-outs and retries that it leaves to its caller.

Its client has no time-out of its own (huggingface_hub 1.33 and 2.4), and neither `run_job` nor `list_jobs` is retried.
"""

import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import httpx
from huggingface_hub import HfApi, JobInfo, constants, get_session
from huggingface_hub.errors import HfHubHTTPError

from jobs.errors import ConfigError

log = logging.getLogger(__name__)

CALL_S = 30
"""Time-out of one call. A Job's creation takes seconds; a connection that hangs must not hang its caller."""
PATIENCE_S = 300.0
"""How long a call that only reads, or that may be repeated, is tried again: the window of the Hub's API quota."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
"""Back-off between tries: doubles from the first to the longest, each with jitter."""
UNSURE = (HfHubHTTPError, httpx.TransportError)
"""What a call may raise without telling whether the Hub did what it was asked to."""

LOCAL = ("http://127.0.0.1:", "https://127.0.0.1:")
"""How the stand-in's address starts."""

T = TypeVar("T")


def is_local(endpoint: str) -> bool:
    """Whether it is the stand-in for the Hub, on this machine."""
    return endpoint.startswith(LOCAL)


def connect(endpoint: str, token: str) -> HfApi:
    """A client of the Hub at `endpoint`, with `CALL_S` as the time-out of calls that set none.

    Raises:
        ConfigError: the user forbids to go there, by HF_HUB_OFFLINE. It does not concern the stand-in.
    """
    if constants.is_offline_mode():
        if not is_local(endpoint):
            raise ConfigError(f"HF_HUB_OFFLINE is set, but Jobs are started and found through {endpoint}: unset it.")
        constants.HF_HUB_OFFLINE = False
    get_session().timeout = httpx.Timeout(CALL_S)
    return HfApi(endpoint=endpoint, token=token)


def passing(error: Exception) -> bool:
    """Whether another try may help: throttling, a server's error, no answer."""
    status = status_of(error)
    return status is None or status == 429 or status >= 500


def status_of(error: Exception) -> int | None:
    """The HTTP status of an answer that was an error; None if there was no answer."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None


def patiently(call: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """Returns what `call` returns, trying again after errors that pass, for `patience_s`; then raises the last one."""
    deadline, pause = time.monotonic() + patience_s, FIRST_PAUSE_S
    while True:
        try:
            return call()
        except UNSURE as error:
            if not passing(error) or time.monotonic() + pause > deadline:
                raise
            log.debug("the Hub: %s; trying again", error)
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, LONGEST_PAUSE_S)


def list_jobs(
    api: HfApi, namespace: str, labels: Mapping[str, str] | None = None, patience_s: float = PATIENCE_S
) -> list[JobInfo]:
    """All Jobs of the namespace that carry `labels`, from all pages of the listing."""
    wanted = dict(labels) if labels else None
    return patiently(lambda: list(api.list_jobs(namespace=namespace, labels=wanted, timeout=CALL_S)), patience_s)
