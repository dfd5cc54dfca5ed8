"""SIGTERM, as a trainer takes it: training ends between two steps, and what has been learned is saved."""

import queue
import signal
from typing import Any

TERMINATED = 128 + signal.SIGTERM
"""Exit status of a process that was ended by SIGTERM."""
QUEUE_POLL_S = 0.5
"""How soon a trainer that waits for rollouts notices that it shall end."""


class Terminated(BaseException):
    """SIGTERM arrived: save and leave. Not an Exception, so that nobody retries it."""


class Stop:
    """Whether SIGTERM has arrived. Before training there is nothing to save, and the process ends at once."""

    def __init__(self) -> None:
        self.training = False
        self.asked = False
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, *_: Any) -> None:
        self.asked = True
        if not self.training:
            raise SystemExit(TERMINATED)


class InterruptibleQueue:
    """The rollout queue as the trainer reads it: waiting ends with `Terminated` when the process is asked to end."""

    def __init__(self, rollouts: Any, stop: Stop) -> None:
        self._rollouts, self._stop = rollouts, stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollouts, name)

    def get(self, timeout: float) -> Any:
        """The next rollout; raises queue.Empty after `timeout` seconds."""
        for wait_s in [QUEUE_POLL_S] * int(timeout / QUEUE_POLL_S):
            if self._stop.asked:
                raise Terminated
            try:
                return self._rollouts.get(timeout=wait_s)
            except queue.Empty:
                continue
        raise queue.Empty
