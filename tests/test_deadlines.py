from typing import Any

from jobs.deadlines import Watch
from jobs.recipe import JobSettings
from tests.jobs_info import job

SETTINGS = JobSettings(schedule_deadline_s=100, start_deadline_s=200, ready_deadline_s=50, lease_s=60)


def looks(watch: Watch, jobs: list[Any], progress: dict[str, Any], *times: float) -> list[list[str]]:
    return [[overdue.words for overdue in watch.look({j.id: j for j in jobs}, progress, now)] for now in times]


def test_a_trainer_that_waits_too_long_for_its_machine_ends_the_run() -> None:
    jobs = [job("t", "trainer", stage="SCHEDULING"), job("r", "replica")]
    early, late = looks(Watch(SETTINGS), jobs, {}, 0, 101)
    assert early == [] and "no h200 for the trainer within jobs.schedule_deadline_s = 100 s" in late[0]


def test_a_replica_may_wait_while_another_has_its_machine() -> None:
    waiting = job("r1", "replica", 1, stage="SCHEDULING")
    assert looks(Watch(SETTINGS), [job("t", "trainer"), job("r0"), waiting], {}, 0, 150) == [[], []]
    assert looks(Watch(SETTINGS), [waiting], {}, 0, 150)[1]


def test_no_first_step_is_fatal_and_a_new_attempt_has_its_own_time() -> None:
    watch, starting = Watch(SETTINGS), {"state": "starting", "updated_at": 1}
    first, second = job("t1", "trainer"), job("t2", "trainer")
    for now in range(0, 200, 50):
        assert looks(watch, [first], {**starting, "updated_at": now}, now) == [[]]
    assert looks(watch, [second], {**starting, "updated_at": 201}, 201) == [[]]
    assert "start_deadline_s = 200" in looks(watch, [second], {**starting, "updated_at": 402}, 402)[0][0]


def test_a_trainer_that_tells_nothing_is_replaced() -> None:
    watch = Watch(SETTINGS)
    assert looks(watch, [job("t", "trainer")], {"state": "training", "updated_at": 5}, 0, 59) == [[], []]
    (overdue,) = watch.look({"t": job("t", "trainer")}, {"state": "training", "updated_at": 5}, 61)
    assert not overdue.fatal and "told nothing" in overdue.words
    assert looks(watch, [job("t", "trainer")], {"state": "training", "updated_at": 62}, 62) == [[]]


def test_a_replica_that_is_never_ready_is_replaced() -> None:
    engines = [{"name": "0.0", "state": "ready"}, {"name": "0.1", "state": "suspect", "reason": "out of slots"}]
    progress = {"state": "training", "updated_at": 0, "proxy": {"replicas": engines}}
    watch = Watch(SETTINGS)
    assert looks(watch, [job("r")], progress, 0, 50) == [[], []]
    assert (
        "replica 0 was not ready within jobs.ready_deadline_s = 50 s (out of slots)"
        in looks(watch, [job("r")], progress, 51)[0]
    )
    engines[1]["state"] = "ready"
    assert looks(watch, [job("r")], progress, 52) == [[]]


def test_before_the_proxy_answers_no_replica_is_judged() -> None:
    assert looks(Watch(SETTINGS), [job("r")], {"state": "starting", "updated_at": 0}, 0, 1000) == [[], []]
