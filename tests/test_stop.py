import queue
import threading
import time

import pytest

from jobs.stop import InterruptibleQueue, Stop, Terminated


def unarmed() -> Stop:
    """A Stop that leaves the signals of the tests' own process alone."""
    stop = Stop.__new__(Stop)
    stop.training = stop.asked = False
    return stop


def test_waiting_for_rollouts_ends_when_asked() -> None:
    stop, rollouts = unarmed(), queue.Queue[int]()
    reader = InterruptibleQueue(rollouts, stop)
    rollouts.put(5)
    assert reader.get(timeout=5.0) == 5
    assert reader.qsize() == 0
    with pytest.raises(queue.Empty):
        reader.get(timeout=0.5)
    threading.Timer(0.1, lambda: setattr(stop, "asked", True)).start()
    begun = time.monotonic()
    with pytest.raises(Terminated):
        reader.get(timeout=60.0)
    assert time.monotonic() - begun < 5
