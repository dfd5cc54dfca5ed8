"""Makes the faults of a run happen: sends signals to its Jobs and makes its bucket misbehave, when they are due."""

import contextlib
import logging
import os
import re
import signal
import threading
from functools import partial
from pathlib import Path

from emulator.faults import Fault, Faults
from emulator.serve import Emulator
from jobs.adapter_store import MANIFEST_FILE
from jobs.crew import Crew
from jobs.launch import Glance

log = logging.getLogger(__name__)


class Injector:
    """Looks at the run as the launcher does, and does each fault once, to the Job that has the place then."""

    def __init__(self, faults: Faults, seed: int = 0) -> None:
        self._faults = faults
        self._seed = seed
        self._waiting = list(faults.events)
        self._tearing = False
        self._emulator: Emulator | None = None

    def attach(self, emulator: Emulator) -> None:
        """Takes the started emulator; what bucket and Hub do throughout begins now."""
        self._emulator = emulator
        if emulator.moto and (self._faults.bucket_503 or self._faults.bucket_lag_s):
            emulator.moto.disturb(rate=self._faults.bucket_503, lag_s=self._faults.bucket_lag_s, seed=self._seed)
        if self._faults.jobs_500:
            emulator.hub.interfere = _fail_after_create

    def look(self, glance: Glance, crew: Crew) -> None:
        """Does what is due."""
        step = int(glance.progress.get("step") or 0)
        for fault in [fault for fault in self._waiting if fault.due(step, glance.elapsed_s)]:
            if fault.action == "tear" and self._tearing:
                continue  # one after the other
            self._waiting.remove(fault)
            log.warning("fault: %s %s at step %d", fault.action, fault.target, step)
            self._do(fault, crew)
        if self._tearing:
            self._tear(crew)

    def _do(self, fault: Fault, crew: Crew) -> None:
        assert self._emulator is not None
        if fault.target == "bucket":
            if self._emulator.moto:
                self._emulator.moto.refuse(seconds=fault.for_s)
            return
        if fault.target == "publish":
            if self._emulator.moto:
                self._emulator.moto.tear(f"/v{fault.index}/{MANIFEST_FILE}")
                self._tearing = True
            return
        if fault.target == "proxy":
            signal_ = partial(self._signal_proxy, crew.job_id("trainer"))
        else:
            signal_ = partial(self._emulator.signal, crew.job_id(fault.target, fault.index))
        if fault.action == "hang":
            signal_(signal.SIGSTOP)
            wake = threading.Timer(fault.for_s, signal_, (signal.SIGCONT,))
            wake.daemon = True
            wake.start()
        else:
            signal_(signal.SIGKILL if fault.action == "kill" else signal.SIGTERM)

    def _tear(self, crew: Crew) -> None:
        """Kills the proxy that waits to write the manifest, and lets the next one write it."""
        assert self._emulator is not None
        if self._emulator.moto and self._emulator.moto.torn():
            self._signal_proxy(crew.job_id("trainer"), signal.SIGKILL)
            self._emulator.moto.tear("")
            self._tearing = False

    def _signal_proxy(self, trainer: str, number: int) -> None:
        assert self._emulator is not None
        for pid in self._emulator.pids(trainer):
            with contextlib.suppress(OSError):  # it ended meanwhile
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"proxy" in words and b"role" in words:
                    os.kill(pid, number)


def _fail_after_create(method: str, path: str) -> int | None:
    """The Hub made the Job and says that it did not."""
    return 500 if method == "POST" and re.fullmatch(r"/api/jobs/[^/]+", path) else None
