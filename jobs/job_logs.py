"""A Job's log as it comes, through lost connections: no line is lost, none is shown twice.

The Hub sends it as events from its start, each time anew, and its stream may end or break while the Job goes on. The
client's own `fetch_job_logs` (huggingface_hub 1.33) takes such an end for the end of the log.
"""

import json
import time
from collections.abc import Iterator

import httpx
from huggingface_hub import HfApi, get_session

from jobs import hub
from jobs.crew import TERMINAL

QUIET_S = 120.0
"""How long a followed stream may be silent before it is taken for dead: four of the Hub's keep-alives, 30 s apart."""
DRAINED_S = 5.0
"""Without following: silence after which the log so far is taken to be complete. The Hub sends it at once."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""Between two connections: doubles while nothing new comes."""
OWN_LINE = "===== Job started"
"""How the Hub's own line begins; the Job did not write it."""


def lines(api: HfApi, namespace: str, job_id: str, follow: bool) -> Iterator[str]:
    """The Job's lines so far; with `follow`, those to come as well, until the Job is over.

    Raises:
        HfHubHTTPError: there is no such Job, or the token may not see it.
    """
    seen, pause = 0, FIRST_PAUSE_S
    while True:
        over = _is_over(api, namespace, job_id)
        before, whole = seen, False
        try:
            for number, line in enumerate(
                _stream(api, namespace, job_id, QUIET_S if follow and not over else DRAINED_S)
            ):
                if number >= seen:
                    seen = number + 1
                    if not line.startswith(OWN_LINE):
                        yield line
            whole = True
        except httpx.ReadTimeout:
            whole = not follow or over
        except httpx.TransportError:
            pass
        # What was written between the last line and the Job's end may only be in the next stream.
        if whole and (not follow or over):
            return
        pause = FIRST_PAUSE_S if seen > before else min(pause * 2, LONGEST_PAUSE_S)
        time.sleep(pause)


def _is_over(api: HfApi, namespace: str, job_id: str) -> bool:
    job = hub.patiently(lambda: api.inspect_job(job_id=job_id, namespace=namespace))
    return job.status.stage in TERMINAL


def _stream(api: HfApi, namespace: str, job_id: str, quiet_s: float) -> Iterator[str]:
    """The lines of one connection; an event that broke off in the middle is none."""
    url = f"{api.endpoint}/api/jobs/{namespace}/{job_id}/logs"
    headers = {"authorization": f"Bearer {api.token}"}
    with get_session().stream("GET", url, headers=headers, timeout=quiet_s) as response:
        if response.status_code != 200:  # what does not pass, `_is_over` will meet and raise
            raise httpx.RemoteProtocolError(f"status {response.status_code}")
        for line in response.iter_lines():
            if line.startswith("data: "):
                try:
                    yield str(json.loads(line.removeprefix("data: "))["data"])
                except (ValueError, KeyError):
                    return
