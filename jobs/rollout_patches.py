"""What TRL needs to be told about its rollout process, which generates and scores beside the trainer.

Each workaround is one function with its reason, as in `jobs.trl_patches`, whose `apply` calls those that every run
needs. Nothing here imports TRL before it is called.
"""

import asyncio
import contextlib
import functools
import multiprocessing.context
import multiprocessing.process
import os
import queue
import signal
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

from jobs import processes
from jobs.errors import ConfigError, RunFailed
from jobs.trl_targets import TRAINER, WORKER, existing, imported, replace, takes

TRL_SCORE_QUEUE = 16
"""Groups; the default of `_AsyncRolloutLoop` in TRL 1.14 to 1.16."""
GROUPS_SCORED_AT_ONCE = 8
"""Each is as stale as its rewards take; what an LLM judge or a sandbox behind a server serves easily at a time."""
STOP_GRACE_S = 2.0
"""What the rollout process gets to end by itself: enough when it is idle. Rollouts in flight then are of no use."""
TOLD_WITHIN_S = 5.0
"""How long the words of a rollout process that has failed are waited for: many times what a busy machine takes."""
USED_TO_STOP = ("_process", "_stop_event_mp", "rollout_buffer", "metrics_queue")
"""Attributes of TRL's rollout worker that `stop_at_once` needs at the end: looked for at the beginning."""


def own_rollout_process(fork: bool) -> None:
    """Makes the rollout process end with the trainer, however that ends; TRL's own outlives a killed trainer.

    With `fork` it is also forked instead of spawned, which spares it the imports: 5 to 7 s of CPU (measured), and on
    two cores the first step waits for them. Only for a CPU: a GPU's context must not be inherited. It is forked before
    training begins, by a process without OpenMP threads, and uses no torch.
    """
    worker = existing(imported(WORKER), "AsyncRolloutWorker")
    original = existing(worker, "start")

    @functools.wraps(original)
    def start(self: Any) -> None:
        replace(self, "_mp_ctx", types.SimpleNamespace(Process=_ForkedRollout if fork else _SpawnedRollout))
        original(self)
        for name in USED_TO_STOP:
            existing(self, name)

    worker.start = start


class _TiedProcess(multiprocessing.process.BaseProcess):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trainer = os.getpid()

    def run(self) -> None:
        processes.die_with_parent(self._trainer)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork inherits the trainer's handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the trainer ends this process
        score_side_by_side()  # here: one that was spawned has TRL as it was published
        super().run()


class _ForkedRollout(_TiedProcess, multiprocessing.context.ForkProcess):
    pass


class _SpawnedRollout(_TiedProcess, multiprocessing.context.SpawnProcess):
    pass


def stop_at_once() -> None:
    """Ends the rollout process when training ends, without TRL's wait of 15 s.

    It cannot end while its queues are full, and it waits for completions in flight that nobody will train on. So the
    queues are drained meanwhile, and after STOP_GRACE_S it is terminated; the proxy sees its connections close.
    """
    worker = existing(imported(WORKER), "AsyncRolloutWorker")
    original = existing(worker, "stop")

    @functools.wraps(original)
    def stop(self: Any) -> None:
        process = self._process
        if process is not None and process._popen is not None:
            # One that died is never waited for; to set the event it would be, for ever: it was waiting for it, too.
            threading.Thread(target=self._stop_event_mp.set, daemon=True).start()
            self._stop_event_mp = threading.Event()
            deadline = time.monotonic() + STOP_GRACE_S
            while process.is_alive() and time.monotonic() < deadline:
                for each in (self.rollout_buffer, self.metrics_queue):
                    _drain(each)
                process.join(0.05)
            if process.is_alive():
                process.terminate()
        original(self)

    worker.stop = stop


def end_together(ended: type[BaseException]) -> None:
    """Has several processes see the end of their batches at once when the first one's wait for rollouts raises `ended`.

    The others wait for a batch from it and for nothing else: it must tell them, as accelerate's loader does at its end.
    """
    dataset = existing(imported(TRAINER), "RolloutQueueDataset")
    original = existing(dataset, "__iter__")

    @functools.wraps(original)
    def rollouts(self: Any) -> Iterator[Any]:
        try:
            yield from original(self)
        except ended:
            return

    dataset.__iter__ = rollouts


def bound_rollouts_ahead(trainer: Any) -> None:
    """Makes `queue_maxsize` bound the rollouts that wait for training (TRL 1.14 to 1.16).

    TRL lets 16 more groups wait to be scored, whatever it is: they only grow stale. With a small queue, so many groups
    wait as the queue holds.
    """
    worker = trainer.rollout_worker
    if worker is not None:
        groups = max(1, trainer.args.queue_maxsize // trainer.args.num_generations)
        takes(existing(worker, "_loop_cls"), "score_queue_maxsize")
        existing(worker, "_loop_kwargs")["score_queue_maxsize"] = min(TRL_SCORE_QUEUE, groups)


def score_side_by_side() -> None:
    """Scores several groups at a time where a reward waits for others to answer; TRL (1.14 to 1.16) takes one by one.

    A server that takes a second for a group would let two steps of the recipe `sanity` through in half a minute,
    however many requests it can bear.
    """
    loop = existing(imported(WORKER), "_AsyncRolloutLoop")
    original = existing(loop, "_score_loop")

    @functools.wraps(original)
    async def _score_loop(self: Any, stop_event: Any) -> None:
        waits = any(getattr(function, "waits", False) for function in self.reward_funcs)
        await asyncio.gather(*(original(self, stop_event) for _ in range(GROUPS_SCORED_AT_ONCE if waits else 1)))

    loop._score_loop = _score_loop


def tell_own_errors() -> None:
    """Makes an error of the rollout process the trainer's own, which TRL tells amid two tracebacks, or not at all; and
    sees at once that the process was killed, which TRL takes for 300 s of silence.

    The process has printed the traceback by itself.
    """
    worker = existing(imported(WORKER), "AsyncRolloutWorker")
    original = existing(worker, "check_health")

    @functools.wraps(original)
    def check_health(self: Any, stale_after_s: float) -> None:
        try:
            original(self, stale_after_s)
        except RuntimeError as error:
            if not existing(self, "_failed_event").is_set():
                raise  # it is silent
            told = str(error.__cause__) if error.__cause__ else _told_late(self)
            kind, _, words = " ".join(told.partition("\nTraceback (most recent")[0].split()).partition(": ")
            for ours in (ConfigError, RunFailed):
                if kind == ours.__name__:
                    raise ours(words) from None
            raise RunFailed(f"the rollout process failed: {f'{kind}: {words}'.rstrip(': ')}") from None
        if (process := existing(self, "_process")) is not None and not process.is_alive():
            raise RunFailed(f"the rollout process ended with status {process.exitcode}")

    worker.check_health = check_health


def _told_late(worker: Any) -> str:
    """What the rollout process says of its failure. The event that it failed may arrive first: a thread of that process
    writes to the queue, and TRL looks into it but once."""
    try:
        kind, words, _ = existing(worker, "_exception_info_queue").get(timeout=TOLD_WITHIN_S)
    except queue.Empty:
        return "its own words are in the log of the trainer"
    return f"{kind}: {words}"


def _drain(messages: Any) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            messages.get_nowait()
