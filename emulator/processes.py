"""A Job as a local process group: started with exactly one environment, heard, waited for and ended as a whole."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from emulator.job_log import JobLog
from emulator.network import Member
from emulator.reaper import in_group, kill_group, marked

LAST_WORDS_S = 1.0
"""How long output is read after the Job's last process was killed; it is in the pipe by then."""
READ_BYTES = 64 << 10  # what a pipe holds on Linux, pipe(7)
SIGNAL_STATUS = 128
"""A process ended by signal N is reported with exit code 128 + N, as container runtimes do."""


class CannotStart(OSError):
    """The command does not exist or cannot be executed."""


class _Output:
    """Takes what the Job prints to its log.

    The pipe is read by hand: uvloop's pipe transport and Popen would both close the descriptor, and the second to do so
    may close one that belongs to somebody else by then.
    """

    def __init__(self, pipe: IO[bytes], log: JobLog) -> None:
        self.ended = asyncio.Event()
        self._pipe = pipe
        self._log = log
        self._loop = asyncio.get_running_loop()
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe.fileno(), self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._log.feed(data)
        else:
            self.close()

    def close(self) -> None:
        """Stop listening, at the pipe's end or before."""
        if not self._pipe.closed:
            self._loop.remove_reader(self._pipe.fileno())
            self._pipe.close()
            self.ended.set()


class JobProcess:
    """One running process group. Make it with `start`; `wait` must be awaited to its end exactly once."""

    def __init__(self, popen: subprocess.Popen[bytes], job_id: str, output: _Output) -> None:
        self.job_id = job_id
        self.group = popen.pid
        self._popen = popen
        self._output = output
        self._ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def watch() -> None:
            popen.wait()
            try:
                loop.call_soon_threadsafe(self._ended.set)
            except RuntimeError:  # the loop is closed: nobody is interested any more
                pass

        # A thread per process rather than a child watcher: those of asyncio and uvloop want the main thread's loop.
        threading.Thread(target=watch, name=f"job-{job_id}", daemon=True).start()

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        job_id: str,
        log: JobLog,
        member: Member | None = None,
    ) -> JobProcess:
        """Start a command in a session of its own, and as a member of a network group. Raises CannotStart."""
        try:
            words = resolve(command, environment["PATH"])
            if member is None:
                popen = _spawn(words, environment, directory)
            else:
                with member.entrance(words) as (entering, descriptor):
                    popen = _spawn(entering, environment, directory, descriptor)
        except (OSError, ValueError) as error:
            raise CannotStart(f"{command[0]}: {error.strerror if isinstance(error, OSError) else error}") from error
        if popen.stdout is None:
            raise AssertionError("Popen gives a pipe when asked for one")
        return cls(popen, job_id, _Output(popen.stdout, log))

    async def wait(self) -> int:
        """The exit code of the first process. The rest of the Job is killed then, as the end of a container does."""
        await self._ended.wait()
        await asyncio.to_thread(self._sweep)
        try:
            await asyncio.wait_for(self._output.ended.wait(), LAST_WORDS_S)
        except TimeoutError:  # somebody who left the Job and its environment still holds the pipe
            self._output.close()
        code = self._popen.returncode
        return SIGNAL_STATUS - code if code < 0 else code

    def _sweep(self, signum: int = signal.SIGKILL) -> None:
        kill_group(self.group, signum)
        for pid in marked(self.job_id, "JOB_ID"):  # also those that left the group
            try:
                os.kill(pid, signum)
            except OSError:
                continue

    def pids(self) -> list[int]:
        """The living processes of the Job: its group, and those that left it but kept the environment."""
        return sorted({*in_group(self.group), *marked(self.job_id, "JOB_ID")})

    def send(self, signum: int) -> None:
        """Send a signal as a container's runtime does: SIGTERM to the first process alone, others to all."""
        if self._ended.is_set():
            return
        if signum == signal.SIGTERM:
            self._popen.send_signal(signum)
        else:
            self._sweep(signum)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM to the first process; SIGKILL to all if it is still there after `grace_s`."""
        self.send(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._ended.wait(), grace_s)
        except TimeoutError:
            self.send(signal.SIGKILL)
            await self._ended.wait()


def _spawn(
    command: Sequence[str], environment: Mapping[str, str], directory: Path, *descriptors: int
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=dict(environment),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        start_new_session=True,
        pass_fds=descriptors,
    )


def resolve(command: Sequence[str], path: str) -> list[str]:
    """Find the program on the Job's own PATH: Popen would look on the emulator's."""
    program, *arguments = command
    if "/" not in program:
        for directory in path.split(":"):
            candidate = Path(directory) / program
            if candidate.is_file() and os.access(candidate, os.X_OK):
                return [str(candidate), *arguments]
        raise CannotStart(2, "executable file not found in $PATH", program)
    return [program, *arguments]
