import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.serve import Emulator
from jobs import leader as leader_module
from jobs import lease
from jobs.bucket import Bucket, BucketSettings
from jobs.crew import Crew
from jobs.leader import Leader, Leadership, StandIn, ask_for, changes, drained, why_over
from jobs.progress import progress_key
from jobs.recipe import JobSettings
from tests.conftest import MotoBucket
from tests.test_crew import make_crew, until

SLEEP = ["python3", "-c", "import time; time.sleep(60)"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def bucket(moto_bucket: MotoBucket) -> Bucket:
    return Bucket(BucketSettings.from_env(moto_bucket.environ))


def test_one_leads_until_its_heart_stops(bucket: Bucket) -> None:
    clock = Clock()
    first = Leadership(bucket, "run", "launcher", 60, clock)
    second = Leadership(bucket, "run", "trainer", 60, clock)
    third = Leadership(bucket, "run", "replica 0", 150, clock)
    assert first.hold() and not second.hold() and not third.hold()
    for clock.now in (20.0, 40.0, 60.0, 80.0):
        assert first.hold() and not second.hold() and not third.hold()
    clock.now = 141.0  # the first one has hung since 80
    assert second.hold() and not third.hold()
    assert not first.hold(), "it sees that another one leads"


def test_a_leader_that_lets_go_is_followed_at_once(bucket: Bucket) -> None:
    clock = Clock()
    first, second = Leadership(bucket, "run", "launcher", 60, clock), Leadership(bucket, "run", "trainer", 60, clock)
    assert first.hold()
    first.release()
    assert second.hold() and not first.hold()


def test_of_two_that_take_over_at_once_one_wins(bucket: Bucket) -> None:
    clock = Clock()
    claims = [Leadership(bucket, "run", str(i), 60, clock) for i in range(4)]
    assert claims[0].hold()
    assert not any(claim.hold() for claim in claims[1:])
    clock.now = 61.0
    assert sum(claim.hold() for claim in claims[1:]) == 1


@given(st.integers(0, 8), st.sets(st.integers(0, 8)))
def test_changes_lead_to_the_wanted_number(wanted: int, present: set[int]) -> None:
    due = changes(wanted, sorted(present))
    assert (present | set(due.join)) - set(due.leave) == set(range(wanted))
    assert not set(due.join) & present and set(due.leave) <= present


def test_a_replica_is_drained_when_all_its_engines_are_gone() -> None:
    def proxy(**states: str) -> dict[str, object]:
        return {"replicas": [{"name": name.replace("_", ".")[1:], "state": state} for name, state in states.items()]}

    assert not drained(1, {}), "nothing is known without the proxy"
    assert not drained(1, proxy(r1_0="gone", r1_1="draining", r10="ready"))
    assert drained(1, proxy(r1_0="gone", r1_1="gone", r10="ready"))
    assert drained(1, proxy(r0="ready")), "forgotten already"


@pytest.mark.parametrize(
    ("stage", "state", "restarts", "over"),
    [
        ("COMPLETED", "done", 0, True),
        ("ERROR", "failed", 0, True),
        ("ERROR", "training", 0, False),
        ("ERROR", "preempted", 2, False),
        ("ERROR", "training", 3, True),
        ("CANCELED", "training", 0, True),
        ("ERROR", None, 0, True),
    ],
)
def test_which_trainers_are_started_again(stage: str, state: str | None, restarts: int, over: bool) -> None:
    assert (why_over(stage, state, restarts) is not None) == over


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with Emulator() as emulator:
        yield emulator


def lead(emulator: Emulator, crew: Crew, who: str = "launcher") -> Leader:
    bucket = Bucket(emulator.bucket)
    return Leader(bucket, "run", crew, 2, Leadership(bucket, "run", who, 60))


def test_replicas_join_and_drain_while_the_run_goes_on(emulator: Emulator) -> None:
    bucket, crew = Bucket(emulator.bucket), make_crew(emulator, SLEEP)
    leader = lead(emulator, crew)
    for index in (0, 1):
        crew.start("replica", index)
    ask_for(bucket, "run", 3)
    assert leader.tend(crew.jobs(), {}) and crew.replicas() == [0, 1, 2]
    until(lambda: leader.tend(crew.jobs(), {}) and len(bucket.list("runs/run/replicas/")) == 3)
    ask_for(bucket, "run", 1)
    busy = {"replicas": [{"name": str(i), "state": "draining" if i else "ready"} for i in range(3)]}
    leader.tend(crew.jobs(), busy)
    assert bucket.list("runs/run/replicas/") == ["runs/run/replicas/0.json"], "first out of the proxy's sight"
    assert all(job.status.stage != "CANCELED" for job in crew.jobs().values()), "they answer what they have"
    leaving = {crew.job_id("replica", 1), crew.job_id("replica", 2)}
    leader.tend(crew.jobs(), {"replicas": [{"name": "0", "state": "ready"}, {"name": "1", "state": "gone"}]})
    assert {job.id for job in crew.jobs().values() if job.status.stage == "CANCELED"} == leaving
    leader.tend(crew.jobs(), {})
    assert crew.replicas() == [0]
    ask_for(bucket, "run", 2)
    leader.tend(crew.jobs(), {})
    assert crew.replicas() == [0, 1] and crew.job_id("replica", 1) not in leaving
    crew.cancel()


def test_who_does_not_lead_asks_the_hub_nothing(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replica looks every 10 s, and the Hub counts the calls of all of them together."""
    bucket, crew = Bucket(emulator.bucket), make_crew(emulator, SLEEP)
    assert lead(emulator, make_crew(emulator, SLEEP)).leads()
    monkeypatch.setattr(Crew, "jobs", lambda self: pytest.fail("it lists the run's Jobs"))
    StandIn(bucket, "run", lead(emulator, crew, "replica 0"), JobSettings()).look()


def test_a_record_that_cannot_be_read_is_nobodys_lead(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    bucket.put(leader_module.leader_key("run"), b"<html>")
    leader = Leader(bucket, "run", None, 2, Leadership(bucket, "run", "trainer", 60))  # type: ignore[arg-type]
    assert not leader.leads() and "leading the run: " in caplog.text


def test_a_job_of_the_run_leads_when_the_launcher_has_gone(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes over the Jobs, starts a dead replica and a killed trainer again, and knows when the run is over."""
    bucket, first = Bucket(emulator.bucket), make_crew(emulator, SLEEP)
    launcher = lead(emulator, first)
    for index in (0, 1):
        first.start("replica", index)
    trainer = first.start("trainer")
    assert launcher.tend(first.jobs(), {})
    launcher.leadership.release()
    crew = make_crew(emulator, SLEEP)
    stand_in = StandIn(bucket, "run", lead(emulator, crew, "replica 0"), JobSettings())
    bucket.put(progress_key("run"), json.dumps({"state": "training"}).encode())
    until(lambda: all(job.status.stage == "RUNNING" for job in first.jobs().values()))
    for dead in (trainer, first.job_id("replica", 1)):
        emulator.signal(dead, 9)
    until(lambda: sum(job.status.stage == "ERROR" for job in first.jobs().values()) == 2)

    def whole() -> bool:
        stand_in.look()
        return sum(job.status.stage == "RUNNING" for job in crew.jobs().values()) == 3

    until(whole)
    assert crew.job_id("trainer") != trainer and len(crew.jobs()) == 5
    bucket.put(progress_key("run"), json.dumps({"state": "failed"}).encode())
    emulator.signal(crew.job_id("trainer"), 9)
    until(lambda: crew.jobs()[crew.job_id("trainer")].status.stage == "ERROR")
    stand_in.look()
    assert not [job for job in crew.jobs().values() if job.status.stage in ("RUNNING", "SCHEDULING")]
    assert json.loads(bucket.get(lease.lease_key("run")))["state"] == "ended"


def test_a_trainer_that_leads_cancels_the_replicas_when_it_is_over(emulator: Emulator) -> None:
    bucket, crew = Bucket(emulator.bucket), make_crew(emulator, SLEEP)
    crew.start("replica", 0)
    trainer = crew.start("trainer")
    stand_in = StandIn(bucket, "run", lead(emulator, crew, "trainer"), JobSettings(), look_s=0.05)
    stand_in.start()
    until(lambda: stand_in.leader.leadership.held)
    stand_in.close(over=True)
    stages = {job.id: job.status.stage for job in crew.jobs().values()}
    assert stages.pop(trainer) != "CANCELED" and set(stages.values()) == {"CANCELED"}
    assert json.loads(bucket.get(leader_module.leader_key("run")))["who"] is None
    crew.cancel()


def test_a_leading_job_replaces_a_trainer_that_tells_nothing(emulator: Emulator) -> None:
    bucket, crew = Bucket(emulator.bucket), make_crew(emulator, SLEEP)
    for index in (0, 1):
        crew.start("replica", index)
    silent = crew.start("trainer")
    until(lambda: crew.jobs()[silent].status.stage == "RUNNING")
    bucket.put(progress_key("run"), json.dumps({"state": "training", "updated_at": 1}).encode())
    stand_in = StandIn(bucket, "run", lead(emulator, make_crew(emulator, SLEEP), "replica 0"), JobSettings(lease_s=0))

    def replaced() -> bool:
        stand_in.look()
        return stand_in.leader.crew.job_id("trainer") != silent

    until(replaced)
    assert crew.jobs()[silent].status.stage == "CANCELED"
    crew.cancel()
