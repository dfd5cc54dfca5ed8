import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from huggingface_hub import constants

import asyncgrpo
from emulator.serve import Emulator
from jobs import bundle, job_logs, labels, lease, operate
from jobs import crew as crew_module
from jobs.bucket import Bucket
from jobs.errors import ConfigError
from jobs.operate import Operation
from jobs.site import HUB, Site
from tests.test_crew import SLEEP, until
from tests.test_launch import ROLES, alive, launch, recipe, stages


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    with Emulator() as emulator:
        yield emulator


@pytest.fixture
def site(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(bundle, "command", lambda *args: [sys.executable, str(ROLES), *args])
    monkeypatch.setattr(crew_module, "CANCEL_PAUSE_S", 0.05)
    monkeypatch.setattr(job_logs, "DRAINED_S", 0.3)
    return Site.from_env(emulator.environment())


def begin(site: Site, run: str) -> Operation:
    with launch(site, run, recipe("goes on", steps=3)) as started:
        started.start()
        started.detach()
    return Operation(site, Bucket(site.bucket), run)


def command(emulator: Emulator, *args: str) -> Any:
    return CliRunner().invoke(asyncgrpo.main, args, env=emulator.environment())


def test_runs_are_listed_without_a_bucket(emulator: Emulator) -> None:
    keys = ("HF_ENDPOINT", "HF_TOKEN")
    environment = {name: value for name, value in emulator.environment().items() if name in keys}
    listed = CliRunner().invoke(asyncgrpo.main, ["status", "--json"], env=environment)
    assert listed.exit_code == 0 and isinstance(json.loads(listed.stdout), list)


def test_offline_means_the_hub_and_not_its_stand_in(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    far = CliRunner().invoke(asyncgrpo.main, ["status"], env={"HF_TOKEN": "hf_x", "HF_ENDPOINT": HUB})
    assert far.exit_code == 2 and "HF_HUB_OFFLINE is set" in far.stderr
    near = CliRunner().invoke(asyncgrpo.main, ["status", "--json"], env=emulator.environment())
    assert near.exit_code == 0


def test_a_run_is_looked_at_scaled_and_stopped_from_anywhere(site: Site, emulator: Emulator) -> None:
    operation = begin(site, "anywhere")
    until(lambda: operation.status()["step"] == 3 and operation.status()["leader"] == "trainer")
    shown = json.loads(command(emulator, "status", "anywhere", "--json").stdout)
    assert (shown["state"], shown["replicas_wanted"], len(shown["jobs"])) == ("training", 2, 3)
    assert shown["jobs"][0]["role"] == "trainer" and shown["usd_per_hour"] == pytest.approx(0.03)
    assert shown["cost_usd"] == pytest.approx(3 * 0.01 / 60, abs=1e-4)
    (listed,) = [each for each in json.loads(command(emulator, "status", "--json").stdout) if each["run"] == "anywhere"]
    assert (listed["recipe"], listed["trainer"], listed["replicas"]) == ("digit", "RUNNING", 2)
    assert listed["usd_per_hour"] == pytest.approx(0.03) and "anywhere  digit" in command(emulator, "status").stdout
    table = command(emulator, "status", "anywhere").stdout
    assert "anywhere (digit): training, step 3 of 3" in table and "led by trainer" in table
    assert command(emulator, "scale", "anywhere", "--replicas", "3").exit_code == 0
    until(lambda: sum("replica" in job for job in alive(site, "anywhere")) == 3)
    newest = ("logs", "anywhere", "--role", "replica", "--index", "2")
    until(lambda: command(emulator, *newest).stdout == "replica 2\n")
    assert "attempt 1" in command(emulator, "logs", "anywhere").stdout
    missing = command(emulator, "logs", "anywhere", "--role", "replica", "--index", "9")
    assert missing.exit_code == 2 and "It has: replica 0, replica 1, replica 2, trainer 0" in missing.output
    stopped = json.loads(command(emulator, "stop", "anywhere", "--json").stdout)
    assert len(stopped["cancelled"]) == 4 and alive(site, "anywhere") == []
    assert operation.status()["state"] == "stopped"
    assert "anywhere" not in command(emulator, "status").stdout
    with pytest.raises(ConfigError, match="is over"):
        operation.scale(2)


def test_stopping_a_run_that_is_followed_ends_it_for_good(site: Site) -> None:
    """The launcher does not start again what is being stopped."""
    failure: list[BaseException] = []

    def follow() -> None:
        try:
            with launch(site, "followed", recipe("goes on")) as started:
                started.start()
                started.follow(lambda _: None)
        except Exception as error:
            failure.append(error)

    follower = threading.Thread(target=follow)
    follower.start()
    until(lambda: len(alive(site, "followed")) == 3)
    Operation(site, Bucket(site.bucket), "followed").stop()
    follower.join(20)
    assert not follower.is_alive() and alive(site, "followed") == [] and len(stages(site, "followed")) == 3
    assert "cancelled" in str(failure[0])


def test_a_run_that_is_not_there(emulator: Emulator) -> None:
    result = command(emulator, "status", "nobody")
    assert result.exit_code == 2 and "'nobody' is not in the bucket" in result.output


def test_fewer_than_one_replica(site: Site) -> None:
    operation = begin(site, "tiny-scale")
    with pytest.raises(ConfigError, match="asyncgrpo stop tiny-scale"):
        operation.scale(0)
    operation.stop()


def test_what_nobody_leads_is_reaped_and_what_only_looks_like_it_is_not(
    site: Site, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = begin(site, "orphaned")
    healthy = begin(site, "healthy")
    until(lambda: len(alive(site, "orphaned")) == 3 and operation.status()["step"] == 3)
    trainer = next(job["id"] for job in operation.status()["jobs"] if job["role"] == "trainer")
    emulator.signal(trainer, 9)
    until(lambda: len(alive(site, "orphaned")) == 2)
    hub = site.hub()

    def run_job(image: str, job_command: list[str], run: str, deadline: float, generation: int = 0) -> str:
        own = labels.of_job(run, "replica", 0, generation, deadline)
        return hub.run_job(image=image, command=job_command, labels=own, namespace=site.namespace).id

    soon, past = time.time() + 600, time.time() - 600
    copied = run_job("thief/image", SLEEP, "orphaned", past)
    overdue = run_job("python:3.11", [*SLEEP, "role", "replica"], "elsewhere", past)
    in_time = run_job("python:3.11", [*SLEEP, "role", "replica"], "elsewhere", soon)
    strange = run_job("python:3.11", [*SLEEP, "x"], "elsewhere", past)
    unrelated = hub.run_job(image="python:3.11", command=SLEEP, namespace=site.namespace).id
    bucket = Bucket(site.bucket)
    age_s = Bucket.age_s
    monkeypatch.setattr(Bucket, "age_s", lambda self, key: age_s(self, key) + (601 if "orphaned" in key else 0))
    found, foreign = operate.reapable(site)
    assert {each.job.id for each in found} == {job.split()[1] for job in alive(site, "orphaned")} - {copied} | {overdue}
    assert {job.id for job in foreign} == {copied, strange}
    assert all("not renewed" in each.why for each in found if each.job.id != overdue)
    declined = CliRunner().invoke(asyncgrpo.main, ["reap"], env=emulator.environment(), input="n\n")
    assert "cancelled 0" in declined.stdout and f"{copied}  bears a run's labels" in declined.stderr
    result = command(emulator, "reap", "--yes", "--json")
    assert len(json.loads(result.stdout)["cancelled"]) == 3
    still = {job.id for job in hub.list_jobs(namespace=site.namespace) if job.status.stage in ("RUNNING", "SCHEDULING")}
    assert {copied, in_time, strange, unrelated} <= still and overdue not in still
    assert len(alive(site, "healthy")) == 3
    healthy.stop()
    for job_id in (copied, in_time, strange, unrelated):
        hub.cancel_job(job_id=job_id, namespace=site.namespace)
    assert 0 <= bucket.age_s(lease.lease_key("healthy")) < 60


def test_the_wait_for_a_machine_is_nobodys_orphan(
    emulator: Emulator, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = begin(site, "waits")
    monkeypatch.setattr(Bucket, "age_s", lambda self, key: 10_000.0)
    jobs = list(operation.crew.jobs().values())
    for job in jobs:
        job.status.stage = "SCHEDULING" if job.labels["asyncgrpo-role"] == "trainer" else job.status.stage
    monkeypatch.setattr(operate.hub, "list_jobs", lambda *_: jobs)
    assert operate.reapable(site) == ([], [])
    monkeypatch.undo()
    operation.crew.cancel()


def test_a_run_on_machines_of_ones_own_is_looked_at_and_stopped_by_its_bucket(emulator: Emulator) -> None:
    environ = {**emulator.environment(), "HF_TOKEN": None, "HF_ENDPOINT": None}

    def own(*args: str) -> Any:
        return CliRunner().invoke(asyncgrpo.main, args, env=environ)

    assert own("launch", "digit", "--run", "own", "--no-jobs").exit_code == 0
    assert json.loads(own("status", "own", "--json").stdout)["state"] == "starting"
    assert own("logs", "own").exit_code == own("scale", "own", "--replicas", "3").exit_code == 2
    assert own("stop", "own").exit_code == 0
    assert lease.ended(Bucket(emulator.bucket), "own")
