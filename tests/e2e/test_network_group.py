"""Runs whose trainer reaches its replicas in a network group: no port is exposed, no token sent."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from emulator.serve import Emulator
from jobs import recipe, tiny
from jobs.bucket import Bucket
from jobs.launch import Launch
from jobs.roster import Roster
from jobs.site import Site
from tests.e2e.test_emulate import QUICK, emulate
from tests.test_crew import until

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("groups")]
GROUP = ["--set", "jobs.network=group"]
WAIT_S = 120.0
"""For what takes some 5 s on an idle machine: a replica's start."""


def test_a_killed_replica_is_replaced_under_another_alias(tmp_path: Path) -> None:
    fault = ["--faults", "kill replica[1] at step 3"]
    status, summary, words = emulate(tmp_path, "digit", *QUICK, *GROUP, "--steps", "60", *fault, "--json")
    assert status == 0 and summary is not None, words
    assert (summary["steps"], summary["rollouts_lost"], summary["orphans"]) == (60, 0, 0)
    assert summary["replica_deaths"] >= 1 and summary["replica_rejoins"] >= 1
    logs = "".join(file.read_text() for file in (tmp_path / "runs" / summary["run"] / "logs").glob("*.log"))
    assert "-replica-1-0:8000" in logs, "whoever died is known by its alias"


STRANGER = """
import os, time, urllib.error, urllib.request
url = f"http://{os.environ['HF_NETWORK_GROUP_PREFIX']}replica-0-0:8001/asyncgrpo/replica"
for key in (None, "0" * 64, os.environ["KEY"]):
    while True:
        asked = urllib.request.Request(url, headers={"x-asyncgrpo-key": key} if key else {})
        try:
            print(urllib.request.urlopen(asked, timeout=10).status, flush=True)
            break
        except urllib.error.HTTPError as error:
            print(error.code, flush=True)
            break
        except OSError:  # the engine is not up yet
            time.sleep(0.1)
"""


def test_a_member_without_the_runs_key_gets_nothing(tmp_path: Path) -> None:
    """Any Job of the namespace may join the group: the second engine of a replica answers those who know the key."""
    chosen = recipe.load("digit", None, ["jobs.network=group", "replica.count=1", "replica.engines=2"])
    chosen = replace(chosen, jobs=replace(chosen.jobs, replica_flavor="cpu-basic", trainer_flavor="cpu-basic"))
    with Emulator(grace_s=2) as emulator:
        site = Site.from_env(emulator.environment())
        site = replace(site, environment={"ASYNCGRPO_CACHE": str(tmp_path)})
        with Launch(site, chosen, "closed", "sim", "emulator.sim_engine", 0) as launch:
            launch.start(tiny.build("digit"))
            key = launch.crew._secrets["ASYNCGRPO_KEY"]
            group = Roster.read(Bucket(site.bucket), "closed").plans["replica"].network_group
            api = HfApi(endpoint=emulator.endpoint, token=emulator.token)
            where = {"namespace": emulator.owner.name}
            stranger = api.run_job(
                image="python", command=["python", "-c", STRANGER], secrets={"KEY": key}, network_group=group, **where
            )
            until(lambda: api.inspect_job(job_id=stranger.id, **where).status.stage == "COMPLETED", WAIT_S)
            assert list(api.fetch_job_logs(job_id=stranger.id, **where, follow=True)) == ["401", "401", "200"]
            member = launch.crew.jobs()[launch.crew.job_id("replica", 0)]
            assert member.status.expose_urls is None and key not in json.dumps(member.__dict__, default=str)
