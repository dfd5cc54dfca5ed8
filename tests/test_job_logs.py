"""A21: reading logs through silence, broken lines, replays and streams that end too early."""

from collections.abc import Iterator

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from emulator.serve import Emulator
from jobs import job_logs
from tests.test_crew import until

NUMBERS = "import time\nfor i in range(30):\n    print('line', i, flush=True)\n    time.sleep(0.05)"
WANTED = [f"line {i}" for i in range(30)]


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    with Emulator() as emulator:
        yield emulator


@pytest.fixture
def api(emulator: Emulator) -> Iterator[HfApi]:
    yield HfApi(endpoint=emulator.endpoint, token=emulator.token)
    emulator.hub.interrupt_logs = None


def start(api: HfApi, emulator: Emulator, code: str) -> str:
    return api.run_job(image="python:3.11", command=["python", "-c", code], namespace=emulator.owner.name).id


def read(api: HfApi, emulator: Emulator, job_id: str, follow: bool = True) -> list[str]:
    return list(job_logs.lines(api, emulator.owner.name, job_id, follow))


@pytest.mark.parametrize("verdict", ["end", "drop"])
def test_a21_no_line_is_lost_or_shown_twice(emulator: Emulator, api: HfApi, verdict: str) -> None:
    """Each connection breaks in the middle of a line, or ends though the Job is running, some lines after the last."""
    reached = 0

    def interrupt(job_id: str, sent: int) -> str | None:
        nonlocal reached
        if sent == reached + 7:
            reached = sent
            return verdict
        return None

    emulator.hub.interrupt_logs = interrupt
    assert read(api, emulator, start(api, emulator, NUMBERS)) == WANTED
    assert reached >= 21, "it broke several times"


def test_a21_silence_is_no_end(emulator: Emulator, api: HfApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_logs, "QUIET_S", 0.3)
    job_id = start(api, emulator, "import time\nprint('first', flush=True)\ntime.sleep(1.5)\nprint('second')")
    assert read(api, emulator, job_id) == ["first", "second"]


def test_a21_without_following_it_ends_while_the_job_goes_on(
    emulator: Emulator, api: HfApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_logs, "DRAINED_S", 0.3)
    job_id = start(api, emulator, "import time\nprint('so far', flush=True)\ntime.sleep(60)")
    until(lambda: read(api, emulator, job_id, follow=False) == ["so far"])
    api.cancel_job(job_id=job_id, namespace=emulator.owner.name)


def test_a_job_that_is_over_tells_all(emulator: Emulator, api: HfApi) -> None:
    job_id = start(api, emulator, "print('all')\nraise SystemExit(3)")
    until(lambda: api.inspect_job(job_id=job_id, namespace=emulator.owner.name).status.stage == "ERROR")
    assert read(api, emulator, job_id) == read(api, emulator, job_id, follow=False) == ["all"]


def test_a_job_that_does_not_exist(emulator: Emulator, api: HfApi) -> None:
    with pytest.raises(HfHubHTTPError):
        read(api, emulator, "0" * 24)
