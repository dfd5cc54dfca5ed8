"""`role trainer`: the supervisor of a trainer Job.

It claims the attempt, holds the socket on which TRL finds its "vLLM server", keeps the proxy running behind it, starts
the training child (`jobs.train`), and tells the bucket how the run goes. The training child may be killed at any
moment: nothing of it outlives the supervisor, and all that a new attempt needs is in the bucket.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs import attempts, bundle, checkpoints, folders, lease, model_card, model_fetch, processes
from jobs.bucket import SHOWN_S, Bucket
from jobs.counters import Counters
from jobs.errors import AsyncgrpoError, BucketError, NotFound, RunFailed
from jobs.leader import StandIn
from jobs.manifest import CONFIG_FILE
from jobs.progress import Progress, metrics_key, progress_key
from jobs.spec import RunSpec, final_prefix
from jobs.summary import summarize, summary_key

log = logging.getLogger(__name__)

POLL_S = 0.25
STATUS_S = 1.0
"""How often the proxy's status is read and progress is written to the bucket."""
GRACE_S = 30.0
"""What the training child gets after SIGTERM to save a checkpoint and leave."""
HUNG_S = 30.0
"""A proxy that answered before and is silent for this long is killed and started again: nothing on its event loop takes
more than a second."""
PROXY_STARTS_PER_MINUTE = 20
"""A proxy that dies more often than this is broken, not unlucky."""
TAIL_LINES = 30


def run(environ: Mapping[str, str]) -> int:
    """Runs one attempt of the run to its end.

    Returns 0 when training finished, 143 when SIGTERM ended it after a checkpoint.

    Raises:
        RunFailed: training, the proxy or every replica failed; says why in their own words. Or the run is over, or a
            newer attempt has begun.
    """
    bucket = Bucket.from_env(environ)
    name = environ["ASYNCGRPO_RUN"]
    spec = RunSpec.read(bucket, name, SHOWN_S)
    # Whatever starts the roles may start them again after `stop`; only who launches makes a run go on.
    if lease.ended(bucket, name, SHOWN_S):
        raise RunFailed(
            f"run {name} is over, or was stopped. To go on with it, launch it again: asyncgrpo launch RECIPE "
            f"--run {name} --resume, with --no-jobs on machines of your own."
        )
    supervisor = Supervisor(bucket, spec, attempts.claim(bucket, name), environ, Path.cwd())
    return supervisor.run()


class Supervisor:
    """One attempt: its two children, and what the bucket is told of them."""

    def __init__(self, bucket: Bucket, spec: RunSpec, attempt: int, environ: Mapping[str, str], work_dir: Path) -> None:
        self.bucket = attempts.Voice(bucket, spec.run, attempt)
        self.spec, self.attempt = spec, attempt
        self.environ = dict(environ)
        self.work_dir = work_dir / f"attempt-{attempt}"
        self.output_dir = self.work_dir / "output"
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self.metrics_file = self.output_dir / "metrics.jsonl"
        self.progress = Progress(spec.run, attempt, int(spec.recipe.settings.get("max_steps", 0)), time.time())
        if attempt > 1:
            self.progress.resume(_last_progress(bucket, spec.run))
        self.uploads = Uploads(self.bucket)
        self.news = Uploads(self.bucket)  # progress does not wait for a checkpoint, which may take longer than a lease
        self._listener = _listen()
        self._proxy: subprocess.Popen[bytes] | None = None
        self._proxy_starts: list[float] = []
        self._proxy_seen: float | None = None
        self._counters_file = self.work_dir / "counters"
        self._training: subprocess.Popen[bytes] | None = None
        self._term, self._over = threading.Event(), threading.Event()
        self._stopped = False
        self._lines_read = 0
        self._saved: set[str] = set()
        self._last_lines: deque[str] = deque(maxlen=TAIL_LINES)

    def run(self) -> int:
        """See `run` of this module."""
        signal.signal(signal.SIGTERM, lambda *_: self._term.set())
        keeping = (self._keep_lease, self.spec.recipe.jobs.lease_s, self._over)
        threading.Thread(target=lease.keep_on, args=keeping, name="lease", daemon=True).start()
        self._start_proxy()
        self.news.start()
        self.uploads.start()
        stand_in = StandIn.from_env(self.bucket, self.spec, "trainer", self.environ)
        if stand_in is not None:
            stand_in.start()
        try:
            self._training = self._start_training()
            status = self._watch()
        except BaseException as error:
            self.progress.state, self.progress.reason = "failed", str(error) or type(error).__name__
            raise
        finally:
            processes.end([child for child in (self._training, self._proxy) if child], grace_s=5.0)
            self._listener.close()
            self._finish()
            if stand_in is not None:
                over = self.progress.state in ("done", "failed") and not self.bucket.superseded
                stand_in.close(over)
        self._go_on()
        return status

    def _watch(self) -> int:
        assert self._training is not None
        next_status = 0.0
        kill_at: float | None = None
        while True:
            self._go_on()
            now = time.monotonic()
            ended = self._training.poll()
            if ended is None and self._proxy is not None and self._proxy.poll() is not None:
                self._restart_proxy(now)
            if now >= next_status or ended is not None:
                next_status = now + STATUS_S
                self._report()
            if ended is not None:
                return self._ended(ended)
            if fatal := self.progress.proxy.get("fatal"):
                raise RunFailed(f"no replica can serve the adapter: {fatal}")
            if self._term.is_set() and kill_at is None:
                log.info("%s: saving a checkpoint and leaving", "the run was stopped" if self._stopped else "SIGTERM")
                self._training.terminate()
                kill_at = now + GRACE_S
            if kill_at is not None and now >= kill_at:
                self._training.kill()
            self._term.wait(POLL_S) if not self._term.is_set() else time.sleep(POLL_S)

    def _go_on(self) -> None:
        if self.bucket.superseded:
            raise attempts.Superseded(self.spec.run, self.attempt)

    def _keep_lease(self) -> None:
        if not lease.keep(self.bucket, self.spec.run):
            self._stopped = True
            self._term.set()
        if self._training is None:  # fetching what that needs may take longer than a lease, too
            self._tell()

    def _ended(self, status: int) -> int:
        if status == 0 and not self._term.is_set():
            self.progress.state = "done"
            return 0
        if self._term.is_set():
            self.progress.state, self.progress.reason = "preempted", "stopped" if self._stopped else "ended by SIGTERM"
            return 143
        self._reader.join(5.0)
        words = "".join(self._last_lines)
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        raise RunFailed(f"the training process ended with {how}. Its last lines:\n{words}")

    def _report(self) -> None:
        self._read_metrics()
        if status := self._proxy_status():
            self.progress.see(status)
            self._proxy_seen = time.monotonic()
        elif self._proxy and self._proxy_seen and time.monotonic() - self._proxy_seen >= HUNG_S:
            log.warning("the proxy has been silent for %g s: killing it", HUNG_S)
            self._proxy.kill()
        self._tell()

    def _tell(self) -> None:
        self.progress.updated_at = time.time()
        self.news.put(progress_key(self.spec.run), json.dumps(self.progress.to_dict()).encode())

    def _read_metrics(self) -> None:
        lines = self._metrics().splitlines()
        for line in lines[self._lines_read :]:
            row = json.loads(line)
            self.progress.add(row)
            if row.get("event") == "saved" and row["path"] not in self._saved:
                self._saved.add(row["path"])
                path = Path(row["path"])
                self.uploads.call(f"checkpoint {path.name}", lambda p=path: self._save(p))
        self._lines_read = len(lines)

    def _metrics(self) -> bytes:
        """What the training child has written so far, whole lines only."""
        try:
            lines, newline, _ = self.metrics_file.read_bytes().rpartition(b"\n")
        except FileNotFoundError:
            return b""
        return lines + newline

    def _save(self, checkpoint: Path) -> None:
        """Uploads a checkpoint, and before it the metrics of the steps that a later attempt will not do again."""
        self.bucket.put(metrics_key(self.spec.run, self.attempt), self._metrics())
        checkpoints.upload(self.bucket, self.spec.run, checkpoint)

    def _proxy_status(self) -> dict[str, Any] | None:
        host, port = self._listener.getsockname()
        try:
            with urllib.request.urlopen(f"http://{host}:{port}/asyncgrpo/status", timeout=2.0) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (OSError, ValueError, urllib.error.URLError):
            return None

    def _start_proxy(self) -> None:
        self._proxy_starts.append(time.monotonic())
        self._proxy_seen = None
        self._counters_file.unlink(missing_ok=True)
        descriptor = self._listener.fileno()
        self._proxy = subprocess.Popen(
            bundle.command("role", "proxy", "--fd", str(descriptor)),
            env={**self.environ, **self._child_environment(), "ASYNCGRPO_COUNTERS": str(self._counters_file)},
            cwd=self.work_dir,
            pass_fds=[descriptor],
        )

    def _restart_proxy(self, now: float) -> None:
        assert self._proxy is not None
        recent = [start for start in self._proxy_starts if now - start < 60]
        if len(recent) >= PROXY_STARTS_PER_MINUTE:
            raise RunFailed(
                f"the proxy ended {len(recent)} times within a minute, last with status {self._proxy.returncode}"
            )
        log.warning("the proxy ended with status %s: starting it again on its socket", self._proxy.returncode)
        self.progress.proxy_ended(Counters.read(self._counters_file))
        self._start_proxy()

    def _start_training(self) -> subprocess.Popen[bytes]:
        model_dir = model_fetch.obtain(self.spec.model, self.bucket, self.environ)
        environment = model_fetch.hub_environment({**self.environ, **self._child_environment()})
        environment["ASYNCGRPO_MODEL_DIR"] = str(model_dir)
        found = checkpoints.find_latest(self.bucket, self.spec.run) if self.attempt > 1 else None
        if found is not None:
            for step, why in found.skipped.items():
                log.warning("checkpoint-%d is passed over: %s", step, why)
            log.info("attempt %d goes on from checkpoint-%d", self.attempt, found.step)
            resumed = checkpoints.fetch(self.bucket, self.spec.run, found.step, self.output_dir)
            self._saved.add(str(resumed))
            environment["ASYNCGRPO_RESUME"] = str(resumed)
        elif self.attempt > 1:
            log.info("attempt %d starts anew: no checkpoint was saved before", self.attempt)
        spec_file = self.work_dir / "spec.json"
        spec_file.write_bytes(self.spec.to_json())
        environment["ASYNCGRPO_SPEC_FILE"] = str(spec_file)
        training = subprocess.Popen(
            [sys.executable, "-m", "jobs.train"],
            env=environment,
            cwd=self.work_dir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._copy_output, args=(training,), name="training output", daemon=True)
        self._reader.start()
        return training

    def _copy_output(self, training: subprocess.Popen[bytes]) -> None:
        """Passes the training child's output on to the Job's log, and keeps its last lines for the error message."""
        assert training.stdout is not None
        for line in training.stdout:
            self._last_lines.append(line.decode(errors="replace"))
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()

    def _child_environment(self) -> dict[str, str]:
        host, port = self._listener.getsockname()
        return {
            "PYTHONPATH": str(bundle.app_dir()),
            "ASYNCGRPO_ATTEMPT": str(self.attempt),
            "ASYNCGRPO_OUTPUT_DIR": str(self.output_dir),
            "ASYNCGRPO_SERVER_URL": f"http://{host}:{port}",
            "ASYNCGRPO_PARENT": str(os.getpid()),
        }

    def _finish(self) -> None:
        """Leaves in the bucket all that is worth keeping; a bucket that is away must not hide why the run ended."""
        self._read_metrics()
        self.uploads.close(60.0)
        self.news.close(60.0)
        self._over.set()
        run = self.spec.run
        try:
            self.bucket.put(metrics_key(run, self.attempt), self._metrics())
            self.progress.updated_at = time.time()
            summary = summarize(self.spec, self.progress.to_dict(), self._all_rows())
            if (self.output_dir / "final" / CONFIG_FILE).is_file():
                model_card.write(self.output_dir / "final", self.spec, summary)
                folders.send(self.bucket, final_prefix(run), self.output_dir / "final")
            self.bucket.put(summary_key(run), json.dumps(summary).encode())
            self.bucket.put(progress_key(run), json.dumps(self.progress.to_dict()).encode())
            if self.progress.state in ("done", "failed"):
                lease.end(self.bucket, run)
        except (BucketError, attempts.Superseded) as error:
            log.error("the end of the run could not be written to the bucket: %s", error)

    def _all_rows(self) -> list[dict[str, Any]]:
        """Metrics of all attempts by step; where attempts overlap, the later one counts."""
        rows: dict[int, dict[str, Any]] = {}
        prefix = f"runs/{self.spec.run}/metrics/"
        numbers = sorted(int(key.removeprefix(prefix).removesuffix(".jsonl")) for key in self.bucket.list(prefix))
        files = [self.bucket.get(metrics_key(self.spec.run, each)) for each in numbers if each < self.attempt]
        for file in [*files, self._metrics()]:  # the bucket may show this attempt's late
            try:
                read = [json.loads(line) for line in file.splitlines()]
                rows |= {row["step"]: row for row in read if isinstance(row.get("step"), int) and "event" not in row}
            except (ValueError, AttributeError) as error:  # a summary without them is better than none
                log.error("the metrics of an attempt cannot be read: %s", error)
        return [rows[step] for step in sorted(rows)]


class Uploads:
    """Writes to the bucket in a thread of its own, in order; of several writes that wait for one key, only the last is
    sent."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._waiting: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def put(self, key: str, data: bytes) -> None:
        """Writes an object soon."""
        self.call(key, lambda: self._bucket.put(key, data))

    def call(self, name: str, action: Any) -> None:
        """Does `action` soon; a later one of the same name replaces it."""
        with self._changed:
            self._waiting[name] = action
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Waits until everything is written."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                name = next(iter(self._waiting))
                action = self._waiting.pop(name)
            try:
                action()
            except Exception as error:  # whatever it is, the next writes count as much
                known = isinstance(error, AsyncgrpoError | OSError)
                log.error("%s was not written to the bucket: %s", name, error, exc_info=not known)


def _last_progress(bucket: Bucket, run: str) -> dict[str, Any]:
    """What the last attempt told; nothing if it ended before it could."""
    try:
        return bucket.get_json(progress_key(run))
    except NotFound:
        return {}


def _listen() -> socket.socket:
    """A loopback socket that outlives any proxy behind it, so that a restart is only a pause for its clients."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    listener.listen(4096)
    listener.set_inheritable(True)
    return listener
