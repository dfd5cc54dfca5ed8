"""Makes the faults of a run happen: sends signals to its Jobs and makes its bucket misbehave, when they are due."""

import logging
import os
import signal
import threading
from pathlib import Path

from emulator.faults import Fault, Faults
from emulator.serve import Emulator
from jobs.crew import Crew
from jobs.launch import Glance

log = logging.getLogger(__name__)


class Injector:
    """Looks at the run as the launcher does, and does each fault once, to the Job that has the place then."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._waiting = list(faults.events)
        self._emulator: Emulator | None = None

    def attach(self, emulator: Emulator) -> None:
        """Takes the started emulator; what the bucket does throughout begins now."""
        self._emulator = emulator
        if emulator.moto and (self._faults.bucket_503 or self._faults.bucket_lag_s):
            emulator.moto.disturb(rate=self._faults.bucket_503, lag_s=self._faults.bucket_lag_s)

    def look(self, glance: Glance, crew: Crew) -> None:
        """Does what is due."""
        step = int(glance.progress.get("step") or 0)
        for fault in [fault for fault in self._waiting if fault.due(step, glance.elapsed_s)]:
            self._waiting.remove(fault)
            log.warning("fault: %s %s at step %d", fault.action, fault.target, step)
            self._do(fault, crew)

    def _do(self, fault: Fault, crew: Crew) -> None:
        assert self._emulator is not None
        if fault.target == "bucket":
            if self._emulator.moto:
                self._emulator.moto.refuse(seconds=fault.for_s)
            return
        if fault.target == "proxy":
            self._kill_proxy(crew.job_id("trainer"))
            return
        job_id = crew.job_id(fault.target, fault.index)
        if fault.action == "hang":
            self._emulator.signal(job_id, signal.SIGSTOP)
            wake = threading.Timer(fault.for_s, self._emulator.signal, (job_id, signal.SIGCONT))
            wake.daemon = True
            wake.start()
        else:
            self._emulator.signal(job_id, signal.SIGKILL if fault.action == "kill" else signal.SIGTERM)

    def _kill_proxy(self, trainer: str) -> None:
        assert self._emulator is not None
        for pid in self._emulator.pids(trainer):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"proxy" in words and b"role" in words:
                os.kill(pid, signal.SIGKILL)
