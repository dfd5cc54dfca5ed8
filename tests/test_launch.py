import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import asyncgrpo
from emulator.serve import Emulator
from jobs import bundle, lease
from jobs import crew as crew_module
from jobs import launch as launch_module
from jobs import recipe as recipes
from jobs.bucket import Bucket
from jobs.errors import AsyncgrpoError, ConfigError, RunFailed
from jobs.launch import Launch
from jobs.recipe import Recipe
from jobs.replica import announced
from jobs.site import Site
from jobs.spec import RunSpec
from tests.test_crew import until

ROLES = Path(__file__).with_name("roles.py")
ALIVE = ("SCHEDULING", "RUNNING")


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    with Emulator() as emulator:
        yield emulator


@pytest.fixture
def site(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(bundle, "command", lambda *args: [sys.executable, str(ROLES), *args])
    monkeypatch.setattr(crew_module, "SETTLE_PAUSE_S", 0.02)
    monkeypatch.setattr(crew_module, "CANCEL_PAUSE_S", 0.05)
    yield Site.from_env(emulator.environment())
    emulator.hub.interfere = None


def recipe(end: str = "", steps: int = 5, **overrides: Any) -> Recipe:
    settings = {"trainer.max_steps": steps, "description": json.dumps(end), "jobs.replica_flavor": '"cpu-basic"'}
    settings |= {"jobs.trainer_flavor": '"cpu-basic"', **overrides}
    return recipes.load("digit", None, [f"{name}={value}" for name, value in settings.items()])


def launch(site: Site, run: str, chosen: Recipe | None = None) -> Launch:
    return Launch(site, chosen or recipe(), run, "vllm", None, 0)


def stages(site: Site, run: str) -> dict[str, str]:
    jobs = site.hub().list_jobs(namespace=site.namespace, labels={"asyncgrpo-run": run})
    return {f"{job.labels['asyncgrpo-role']} {job.id}": job.status.stage for job in jobs}


def alive(site: Site, run: str) -> list[str]:
    return [job for job, stage in stages(site, run).items() if stage in ALIVE]


def test_a_run_from_its_claim_to_its_summary(site: Site) -> None:
    with launch(site, "whole") as run:
        run.start()
        looks = []
        summary = run.follow(looks.append)
    assert summary["reward_last"] == 1.0 and summary["bucket"] == site.bucket.url
    assert looks[-1].progress["state"] == "done" and alive(site, "whole") == []
    spec = json.loads(Bucket(site.bucket).get("runs/whole/spec.json"))
    assert spec["recipe"]["replica"]["vllm"]["max_cpu_loras"] == 24


def test_a_name_is_taken_once(site: Site) -> None:
    Bucket(site.bucket).put_new("runs/taken/spec.json", b"{}")
    with pytest.raises(ConfigError, match="--run"), launch(site, "taken") as run:
        run.start()
    assert stages(site, "taken") == {}


def test_a_run_that_fails_says_why_in_the_trainers_words(site: Site) -> None:
    with pytest.raises(RunFailed, match="its reasons"), launch(site, "fails", recipe("fails")) as run:
        run.start()
        run.follow(lambda _: None)
    assert alive(site, "fails") == []


def test_a_killed_trainer_gets_a_new_attempt(site: Site) -> None:
    with launch(site, "dies", recipe("dies")) as run:
        run.start()
        summary = run.follow(lambda _: None)
    assert (summary["attempt"], summary["trainer_resumes"]) == (2, 1)
    assert sorted(stage for job, stage in stages(site, "dies").items() if "trainer" in job) == ["COMPLETED", "ERROR"]


@pytest.mark.parametrize("point", [0, 1, 2])
@pytest.mark.parametrize("status", [402, 500, 503])
def test_whatever_the_hub_answers_while_jobs_are_created_nothing_stays(
    site: Site, emulator: Emulator, point: int, status: int
) -> None:
    """Each status is answered after the Job was made: the worst that can be."""
    name = f"answers-{status}-{point}"
    created = 0

    def interfere(method: str, path: str) -> int | None:
        nonlocal created
        if method != "POST" or path.endswith("/cancel"):
            return None
        created += 1
        return status if created > point else None

    emulator.hub.interfere = interfere
    try:
        with launch(site, name) as run:
            run.start()
            assert status >= 500, "402 is no answer that may be wrong"
            assert len(stages(site, name)) == 3, "found again: none was started twice"
            raise AsyncgrpoError("enough")
    except AsyncgrpoError as error:
        assert status >= 500 or "could not be started on flavor cpu-basic" in str(error)
    assert alive(site, name) == []
    assert lease.ended(Bucket(site.bucket), name)


@pytest.mark.parametrize("calls", range(1, 9))
def test_an_interrupt_at_any_call_leaves_nothing(site: Site, emulator: Emulator, calls: int, monkeypatch: Any) -> None:
    name, made = f"interrupted-{calls}", 0
    for method in ("run_job", "list_jobs", "whoami"):
        real = getattr(type(site.hub()), method)

        def counted(*args: Any, _real: Any = real, **kwargs: Any) -> Any:
            nonlocal made
            made += 1
            answer = _real(*args, **kwargs)
            if made == calls:
                raise KeyboardInterrupt
            return answer

        monkeypatch.setattr(type(site.hub()), method, counted)
    try:
        with launch(site, name, recipe("goes on")) as run:
            run.start()
            run.follow(lambda _: None)
    except KeyboardInterrupt:
        pass
    assert made >= calls and alive(site, name) == []


def test_without_a_follower_the_trainer_leads(site: Site, emulator: Emulator) -> None:
    with launch(site, "alone", recipe("goes on")) as run:
        run.start()
        run.detach()
    bucket = Bucket(site.bucket)
    until(lambda: json.loads(bucket.get("runs/alone/leader.json"))["who"] == "trainer")
    until(lambda: len(bucket.list("runs/alone/replicas/")) == 2)
    dead = json.loads(bucket.get("runs/alone/replicas/1.json"))["job_id"]
    emulator.signal(dead, 9)
    until(lambda: json.loads(bucket.get("runs/alone/replicas/1.json"))["job_id"] != dead)
    lease.end(bucket, "alone")
    until(lambda: "trainer" not in str(alive(site, "alone")))
    for job in alive(site, "alone"):
        site.hub().cancel_job(job_id=job.split()[1], namespace=site.namespace)


def test_secrets_stay_secret(emulator: Emulator, site: Site) -> None:
    graded = Site.from_env({**emulator.environment(), "ASYNCGRPO_REWARD_TOKEN": "rs-secret"})
    with launch(graded, "secrets") as run:
        run.start()
        jobs = list(run.crew.jobs().values())
        key = run.crew._secrets["ASYNCGRPO_KEY"]
        assert run.crew._secrets["ASYNCGRPO_REWARD_TOKEN"] == "rs-secret"
    shown = json.dumps([[job.command, job.environment, job.labels] for job in jobs]) + repr(graded)
    bucket = Bucket(site.bucket)
    for secret in (key, site.token, site.bucket.secret_key, "rs-secret"):
        assert secret not in shown
        assert all(secret.encode() not in bucket.get(key) for key in bucket.list("runs/secrets/"))


def test_the_command_follows_a_run_to_its_summary(
    site: Site, emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_module, "SHOWN_S", 1.0)  # these roles leave no adapter, and it is waited for
    flavors = [f"jobs.{role}_flavor=cpu-basic" for role in ("trainer", "replica")]
    sets = [word for each in [*flavors, "trainer.max_steps=3"] for word in ("--set", each)]
    args = ["launch", "digit", "--run", "commanded", *sets, "--json"]
    result = CliRunner().invoke(asyncgrpo.main, [*args, "--follow"], env=emulator.environment())
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (
        (summary["run"], summary["steps"]) == ("commanded", 3) and summary["cost_usd"] > 0 and summary["first_step_s"]
    )
    assert json.loads((tmp_path / "runs/commanded/summary.json").read_text()) == summary
    again = CliRunner().invoke(asyncgrpo.main, args, env=emulator.environment())
    assert again.exit_code == 2 and "choose another with --run" in again.output
    wrong = ["launch", "digit", "--run", "fails-followed", *sets, "--set", 'description="fails"', "--json", "--follow"]
    failed = CliRunner().invoke(asyncgrpo.main, wrong, env=emulator.environment())
    kept = json.loads((tmp_path / "runs/fails-followed/summary.json").read_text())
    assert failed.exit_code == 3 and json.loads(failed.stdout) == kept and "its reasons" in kept["error"]
    left = CliRunner().invoke(asyncgrpo.main, ["launch", "digit", "--run", "left", *sets], env=emulator.environment())
    assert left.exit_code == 0 and "next: asyncgrpo status left" in left.stderr
    until(lambda: alive(site, "left") == [])


def test_a_run_for_machines_of_ones_own_is_claimed_without_jobs(site: Site, emulator: Emulator) -> None:
    """Its roles need no Hub, and a replica there tells the proxy itself where it is."""
    without_hub = {**emulator.environment(), "HF_TOKEN": None, "HF_ENDPOINT": None}
    args = ["launch", "digit", "--run", "own-hosts", "--no-jobs"]
    result = CliRunner().invoke(asyncgrpo.main, args, env=without_hub)
    assert result.exit_code == 0, result.output
    environ = dict(line.split("=", 1) for line in result.stdout.splitlines())
    assert len(environ["ASYNCGRPO_KEY"]) == 64 and environ["ASYNCGRPO_RUN"] == "own-hosts"
    assert stages(site, "own-hosts") == {}
    bucket = Bucket.from_env(environ)
    spec = RunSpec.read(bucket, "own-hosts")
    assert spec.model.kind == "bucket" and bucket.list(f"{spec.model.source}/")
    record = "runs/own-hosts/replicas/1.json"
    with announced(bucket, "own-hosts", 1, {**environ, "ASYNCGRPO_URLS": "http://a:8000,http://a:8001"}):
        assert json.loads(bucket.get(record))["urls"] == ["http://a:8000", "http://a:8001"]
    assert bucket.list("runs/own-hosts/replicas/") == []
    with announced(bucket, "own-hosts", 1, environ):
        assert bucket.list("runs/own-hosts/replicas/") == [], "on the Hub, whoever leads does it"
    lease.end(bucket, "own-hosts")
    again = CliRunner().invoke(asyncgrpo.main, [*args, "--resume"], env=without_hub)
    assert again.exit_code == 0 and not lease.ended(bucket, "own-hosts")
    for wrong, words in (([], "--resume that one"), (["--resume", "--set", "lora.r=4"], "do not fit")):
        refused = CliRunner().invoke(asyncgrpo.main, [*args, *wrong], env=without_hub)
        assert refused.exit_code == 2 and words in refused.stderr
    refused = CliRunner().invoke(asyncgrpo.main, ["launch", "digit", "--resume"], env=without_hub)
    assert refused.exit_code == 2 and "Name it with --run" in refused.stderr
    refused = CliRunner().invoke(asyncgrpo.main, ["launch", "digit", "--no-jobs", "--dry-run"], env=without_hub)
    assert refused.exit_code == 2 and "leave one of them out" in refused.stderr
    as_json = CliRunner().invoke(asyncgrpo.main, [*args, "--resume", "--json"], env=without_hub)
    assert json.loads(as_json.stdout)["ASYNCGRPO_RUN"] == "own-hosts"
