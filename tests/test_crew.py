import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import httpx
import pytest
from huggingface_hub import HfApi

from emulator.serve import Emulator
from jobs import crew as crew_module
from jobs.bucket import Bucket
from jobs.crew import Crew, JobPlan
from jobs.errors import RunFailed

SLEEP = ["python3", "-c", "import time; time.sleep(60)"]


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with Emulator() as emulator:
        yield emulator


@pytest.fixture
def crew(emulator: Emulator) -> Crew:
    return make_crew(emulator, SLEEP)


def make_crew(emulator: Emulator, command: list[str], hub: HfApi | None = None) -> Crew:
    plan = JobPlan("python:3.11", command, "cpu-basic", {"NOTE": "seen"}, 60, ports=[8000])
    hub = hub or HfApi(endpoint=emulator.endpoint, token=emulator.token)
    plans = {"replica": plan, "trainer": replace(plan, ports=[])}
    return Crew(hub, emulator.owner.name, "run", Bucket(emulator.bucket), plans, {"ASYNCGRPO_KEY": "hush-hush"})  # type: ignore[arg-type]


def until(done: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_replicas_are_started_announced_and_cancelled(emulator: Emulator, crew: Crew) -> None:
    for index in (0, 1):
        crew.start("replica", index)
    crew.start("trainer")
    until(lambda: all(job.status.stage == "RUNNING" for job in crew.jobs().values()))
    crew.tend(crew.jobs())
    bucket = Bucket(emulator.bucket)
    records = [json.loads(bucket.get(key)) for key in bucket.list("runs/run/replicas/")]
    assert [record["index"] for record in records] == [0, 1]
    assert len({record["urls"][0] for record in records}) == 2
    assert [record["job_id"] for record in records] == [crew.job_id("replica", 0), crew.job_id("replica", 1)]
    jobs = crew.jobs()
    assert {job.environment["ASYNCGRPO_RUN"] for job in jobs.values()} == {"run"}
    assert "hush-hush" not in str([job.__dict__ for job in jobs.values()])
    crew.cancel()
    assert {job.status.stage for job in crew.jobs().values()} == {"CANCELED"}


def test_a_dead_replica_is_started_again_with_a_pause_and_a_bound(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew_module, "RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(crew_module, "MAX_RESTARTS", 2)
    crew = make_crew(emulator, ["python3", "-c", "raise SystemExit(3)"])
    first = crew.start("replica", 0)

    def tended() -> bool:
        crew.tend(crew.jobs())
        return crew.given_up(0)

    until(tended)
    assert crew.restarts == 2 and len(crew.jobs()) == 3
    assert crew.job_id("replica", 0) != first


def test_in_a_network_group_each_replica_has_an_alias_of_its_own(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, groups: None
) -> None:
    monkeypatch.setattr(crew_module, "RESTART_PAUSE_S", 0.01)
    crew = make_crew(emulator, SLEEP)
    plan = replace(crew._plans["replica"], network_group="run-1", ports=[8000, 8001])
    crew._plans = {"replica": plan, "trainer": replace(plan, ports=[])}
    for role, index in (("trainer", 0), ("replica", 0), ("replica", 1)):
        crew.start(role, index)  # type: ignore[arg-type]
    networks = {job.id: job.network for job in crew.jobs().values()}
    assert {each.group for each in networks.values() if each} == {"run-1"}
    bucket = Bucket(emulator.bucket)

    def urls(index: int) -> list[str]:
        crew.tend(crew.jobs())
        return list(json.loads(bucket.get(f"runs/run/replicas/{index}.json"))["urls"])

    prefix = "http://${HF_NETWORK_GROUP_PREFIX}replica"
    assert urls(0) == [f"{prefix}-0-0:8000", f"{prefix}-0-0:8001"] and urls(1)[0] == f"{prefix}-1-0:8000"
    first = crew.job_id("replica", 1)
    crew.end(first)
    until(lambda: urls(1) == [f"{prefix}-1-1:8000", f"{prefix}-1-1:8001"])
    networks = {job.id: job.network for job in crew.jobs().values()}
    aliases = [
        each.aliases for job in (crew.job_id("trainer"), first, crew.job_id("replica", 1)) if (each := networks[job])
    ]
    assert aliases == [[], ["replica-1-0"], ["replica-1-1"]]
    assert not any(job.status.expose_urls for job in crew.jobs().values())
    crew.cancel()


def test_another_leader_takes_over_the_newest_of_each_place(emulator: Emulator, crew: Crew) -> None:
    crew.start("replica", 0)
    second = crew.start("replica", 0)
    trainer = crew.start("trainer")
    other = make_crew(emulator, SLEEP)
    other.adopt()
    assert (other.job_id("replica", 0), other.job_id("trainer")) == (second, trainer)
    other.start("replica", 0)
    generations = sorted(
        job.labels["asyncgrpo-generation"] for job in other.jobs().values() if job.labels["asyncgrpo-role"] == "replica"
    )
    assert generations == ["0", "1", "2"]
    other.cancel()


class LosesAnswers(HfApi):
    """The real client, but the answer to the first creation is lost after the Job was made."""

    lost = False

    def run_job(self, **kwargs: object) -> object:  # type: ignore[override]
        job = super().run_job(**kwargs)  # type: ignore[arg-type]
        if not self.lost:
            self.lost = True
            from huggingface_hub.errors import HfHubHTTPError

            request = httpx.Request("POST", "http://hub")
            raise HfHubHTTPError("500 Server Error", response=httpx.Response(500, request=request))
        return job


def test_an_answer_that_got_lost_starts_no_second_job(emulator: Emulator) -> None:
    crew = make_crew(emulator, SLEEP, LosesAnswers(endpoint=emulator.endpoint, token=emulator.token))
    job_id = crew.start("replica", 0)
    assert list(crew.jobs()) == [job_id]


def test_a_refusal_names_role_and_flavor(emulator: Emulator) -> None:
    crew = make_crew(emulator, SLEEP)
    crew._plans = {"replica": replace(crew._plans["replica"], flavor="h999")}
    with pytest.raises(RunFailed, match=r"replica 0 could not be started on flavor h999: (?s:.)*h999"):
        crew.start("replica", 0)


class LosesSlowly(HfApi):
    """The real client, but each creation's answer is lost, and the Job appears only while it is looked for."""

    delayed: dict[str, object] | None = None
    lists = 0

    def run_job(self, **kwargs: object) -> object:  # type: ignore[override]
        self.delayed = kwargs
        raise httpx.ReadTimeout("no answer", request=httpx.Request("POST", "http://hub"))

    def list_jobs(self, **kwargs: object) -> object:  # type: ignore[override]
        self.lists += 1
        if self.delayed and self.lists == 2:
            super().run_job(**self.delayed)  # type: ignore[arg-type]
        return super().list_jobs(**kwargs)  # type: ignore[arg-type]


def test_a_time_out_whose_job_appears_later_starts_no_second_one(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew_module, "SETTLE_PAUSE_S", 0.05)
    crew = make_crew(emulator, SLEEP, LosesSlowly(endpoint=emulator.endpoint, token=emulator.token))
    job_id = crew.start("replica", 0)
    assert list(crew.jobs()) == [job_id]


def test_a_second_job_for_a_place_is_cancelled(emulator: Emulator, crew: Crew) -> None:
    first = crew.start("replica", 0)
    twin = make_crew(emulator, SLEEP)
    second = twin.start("replica", 0)
    crew.tend(crew.jobs())
    stages = {job.id: job.status.stage for job in crew.jobs().values()}
    assert stages[second] == "CANCELED" and stages[first] != "CANCELED"


def test_jobs_that_only_bear_the_labels_are_left_alone(emulator: Emulator, crew: Crew) -> None:
    """Labels can be copied by anybody in the namespace."""
    own = crew.start("replica", 0)
    hub = HfApi(endpoint=emulator.endpoint, token=emulator.token)
    copied = {**crew.jobs()[own].labels, "asyncgrpo-generation": "7"}
    copied.pop("name")
    foreign = hub.run_job(
        image="thief/image",
        command=SLEEP,
        labels=copied,
        expose=[8000],
        namespace=emulator.owner.name,
    )
    crew.tend(crew.jobs())
    assert list(crew.jobs()) == [own]
    other = make_crew(emulator, SLEEP)
    other.adopt()
    assert other.job_id("replica", 0) == own
    other.tend(other.jobs())
    assert foreign.id not in Bucket(emulator.bucket).get("runs/run/replicas/0.json").decode()
    crew.cancel()
    assert hub.inspect_job(job_id=foreign.id, namespace=emulator.owner.name).status.stage != "CANCELED"


def test_a_job_of_another_user_is_not_the_runs(emulator: Emulator) -> None:
    crew = make_crew(emulator, SLEEP)
    crew.start("replica", 0)
    crew._initiator = "somebody-else"
    assert crew.jobs() == {}


def test_cancelling_goes_on_while_the_hub_fails(emulator: Emulator, crew: Crew) -> None:
    job_id = crew.start("replica", 0)
    answers = iter([503, 500, 503])
    emulator.hub.interfere = lambda method, path: next(answers, None)
    crew.cancel()
    assert crew.jobs()[job_id].status.stage == "CANCELED"
