"""Which process a fault meets, and in which order faults come."""

import signal
import subprocess
import sys
from types import SimpleNamespace

from emulator.faults import parse
from emulator.injector import Injector
from jobs.launch import Glance

CREW = SimpleNamespace(job_id=lambda role, index=0: role)


def look(injector, step):
    injector.look(Glance({"step": step}, {}, 1.0), CREW)


def test_the_proxy_alone_is_killed_and_who_has_ended_meanwhile_is_passed_over():
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    gone = subprocess.Popen(["true"])
    gone.wait()
    with (
        subprocess.Popen([*wait, "role", "proxy"], stdin=subprocess.PIPE) as proxy,
        subprocess.Popen([*wait, "role", "trainer"], stdin=subprocess.PIPE) as trainer,
    ):
        injector = Injector(parse("kill proxy at step 3"))
        injector.attach(SimpleNamespace(moto=None, pids=lambda job: [gone.pid, trainer.pid, proxy.pid]))
        look(injector, 2)
        assert proxy.poll() is None
        look(injector, 3)
        assert proxy.wait(10) == -signal.SIGKILL
        assert trainer.poll() is None
        look(injector, 4)  # once


def test_two_publishes_are_torn_one_after_the_other():
    told = []
    torn = iter([False, True, True])
    moto = SimpleNamespace(tear=told.append, torn=lambda: next(torn))
    injector = Injector(parse("tear publish v3; tear publish v7"))
    injector.attach(SimpleNamespace(moto=moto, pids=lambda job: []))
    for step in range(3):
        look(injector, step)
    assert told == ["/v3/manifest.json", "", "/v7/manifest.json", ""]
