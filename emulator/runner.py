"""Runs Jobs: a place for each, its process, time-out, attempts, volumes and exposed ports, until its end."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from urllib3.exceptions import HTTPError

from emulator import job_environment, ports
from emulator.gateway import Gateway, Route
from emulator.job_environment import IMAGES, Image, Places
from emulator.job_log import STARTED, JobLog
from emulator.jobs_state import BadRequest, Expose, Job, JobSpec, JobTable, Owner, Stage, now, timestamp
from emulator.live_mount import LiveMount
from emulator.network import Member, Network
from emulator.processes import CannotStart, JobProcess
from emulator.slots import Slots
from emulator.volumes import NoSuchVolume, Volumes
from jobs.errors import AsyncgrpoError

log = logging.getLogger(__name__)

MOUNT_POLL_S = 0.5
"""How often a mount looks at its bucket; a fifth of its lag."""
GRACE_S = 10.0
"""Between SIGTERM and SIGKILL. Shorter than a cluster's usual 30 s: what relies on more must fail here."""

KILLED = 128 + signal.SIGKILL
"""Exit code of a Job that was killed, as a shell tells it."""

Outcome = tuple[Stage, str | None]
"""How a Job ended: its last stage and the message that goes with it."""


@dataclass(eq=False)
class Running:
    """What belongs to one Job while it lives, and its log after that."""

    job: Job
    log: JobLog
    member: Member | None = None
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    process: JobProcess | None = None
    killed: bool = False
    """Whether SIGKILL ended its last process: what its mounts had not uploaded by then is lost."""
    routes: dict[int, Route] = field(default_factory=dict)
    binds: dict[int, int] = field(default_factory=dict)
    """Exposed port -> local port that the Job is asked to bind instead, if it has no ports of its own."""
    task: asyncio.Task[None] | None = None


class Runner:
    """All Jobs of one emulator, in one event loop.

    `report` tells the reaper of a new process group (True) and of one that has ended (False).
    """

    def __init__(
        self,
        root: Path,
        logs: Path,
        gateway: Gateway,
        volumes: Volumes,
        slots: Slots,
        mark: str,
        report: Callable[[int, bool], None],
        images: Mapping[str, Image] = IMAGES,
        grace_s: float = GRACE_S,
    ) -> None:
        self.table = JobTable()
        self.root, self.logs = root, logs
        self.gateway, self.volumes, self.slots = gateway, volumes, slots
        self.mark, self.report, self.images, self.grace_s = mark, report, images, grace_s
        self.network = Network()
        self._running: dict[str, Running] = {}
        self._freed = asyncio.Event()

    async def submit(self, owner: Owner, initiator: Owner, spec: JobSpec, initiator_type: str = "user") -> Job:
        """Accept a Job and begin to schedule it. Raises BadRequest for what can never run on this machine."""
        image = job_environment.find_image(spec.image, self.images)
        if image is None:
            raise BadRequest(f"image {spec.image!r} has no stand-in here: one of {', '.join(self.images)}")
        networked = bool(spec.network or spec.expose.ports)
        lacking = await asyncio.to_thread(self.network.missing, self.root) if networked else None
        if spec.network and lacking:
            raise BadRequest(
                f'"network": this machine cannot keep groups apart ({lacking}): they take Linux with user namespaces,'
                " /etc/hosts and seccomp notifications. Expose ports and use their URLs"
            )
        if reason := self.slots.impossible(spec.flavor):
            raise BadRequest(f'"flavor": {reason}')
        job = self.table.create(owner, initiator, spec, initiator_type)
        member = self.network.member(owner, job.id, spec, self.root / job.id) if networked and not lacking else None
        running = Running(job, JobLog(self.logs / f"{job.id}.log"), member)
        self._running[job.id] = running
        await self.expose(job, spec.expose)
        running.task = asyncio.create_task(self._live(running, image), name=f"job-{job.id}")
        return job

    def log(self, job: Job) -> JobLog:
        """The Job's log, while it lives and afterwards."""
        return self._running[job.id].log

    def pids(self, job: Job) -> list[int]:
        """The Job's living processes."""
        process = self._running[job.id].process
        return process.pids() if process else []

    def cancel(self, job: Job) -> None:
        """Begin to end a Job: SIGTERM, then SIGKILL after `grace_s`. It is CANCELED at once, and over a bit later."""
        if not job.stage.final:
            job.finish(Stage.CANCELED, "Job canceled")
            self._running[job.id].cancelled.set()
            self._look_again()

    def _look_again(self) -> None:
        """Let the waiting Jobs see whether there is a place, or whether they are cancelled."""
        self._freed.set()
        self._freed = asyncio.Event()

    def send(self, job: Job, signum: int) -> None:
        """Send a signal to the Job as a fault; see `JobProcess.send`."""
        if process := self._running[job.id].process:
            process.send(signum)

    async def expose(self, job: Job, expose: Expose) -> None:
        """Open and close the Job's ports so that exactly `expose` is open."""
        running = self._running[job.id]
        for port, route in list(running.routes.items()):
            if port not in expose.ports:
                self.gateway.close_route(running.routes.pop(port))
            else:
                route.public = port in expose.public
        for port in expose.ports:
            if port not in running.routes:
                if running.member is None:
                    running.binds.setdefault(port, ports.free_port(self._bound()))
                running.routes[port] = await self.gateway.open(
                    job.id, port, port in expose.public, self._locator(running, port)
                )
        job.reexpose(expose)
        job.expose_urls = tuple(running.routes[port].url for port in expose.ports)

    def _bound(self) -> set[int]:
        return {port for running in self._running.values() for port in running.binds.values()}

    def _locator(self, running: Running, port: int) -> Callable[[bool], asyncio.Future[str | None]]:
        elsewhere = False

        async def locate(refused: bool) -> str | None:
            nonlocal elsewhere
            if running.process is None:
                return None
            if running.member is not None:
                elsewhere ^= refused  # it may listen on loopback only
                own = running.member.own
                return f"{own.private if elsewhere else own.shared}:{port}"
            # The Job was asked to bind another port (see job_environment). If it did not, it may have bound this one.
            if refused:
                elsewhere = not elsewhere and await asyncio.to_thread(
                    ports.listens, await asyncio.to_thread(running.process.pids), port
                )
                if not elsewhere:
                    return None
            return f"{ports.LOOPBACK}:{port if elsewhere else running.binds[port]}"

        return lambda refused: asyncio.ensure_future(locate(refused))

    async def _live(self, running: Running, image: Image) -> None:
        job = running.job
        try:
            if (devices := await self._place(running)) is not None:
                job.finish(*await self._mounted(running, image, devices))
        except (CannotStart, NoSuchVolume, AsyncgrpoError, HTTPError) as error:
            job.finish(Stage.ERROR, f"Job failed to start: {error}")
        except asyncio.CancelledError:
            job.finish(Stage.CANCELED, "the emulator ended")
            raise
        except Exception as error:
            job.finish(Stage.ERROR, f"the emulator failed: {error!r}")
            raise
        finally:
            self.slots.release(job.id)
            running.log.close()
            self._look_again()

    async def _place(self, running: Running) -> tuple[str, ...] | None:
        """Wait for a place; None if the Job is cancelled before there is one."""
        job = running.job
        while not job.stage.final:
            devices = self.slots.take(job.id, job.spec.flavor)
            if devices is not None:
                return devices
            job.message = "Waiting for hardware"
            await self._freed.wait()
        return None

    async def _mounted(self, running: Running, image: Image, devices: tuple[str, ...]) -> Outcome:
        """Run it between filling and emptying its volumes; what it wrote is in the bucket when it has ended well."""
        job, spec = running.job, running.job.spec
        places = Places(self.root / job.id)
        await asyncio.to_thread(places.make, image)
        mounts = {volume.mount_path: str(self.volumes.place(job.id, volume)) for volume in spec.volumes}
        live: list[LiveMount] = []
        following = asyncio.create_task(self._follow(live), name=f"mounts-{job.id}")
        try:
            for seed, volume in enumerate(spec.volumes):
                if mount := await asyncio.to_thread(self.volumes.mount, job.id, volume, seed):
                    live.append(mount)
            binds = {port: f"{ports.LOOPBACK}:{local}" for port, local in running.binds.items()}
            if running.member:
                binds = {port: f"0.0.0.0:{port}" for port in running.routes}
            environment = job_environment.environment(spec, job.id, image, places, mounts, binds, devices, self.mark)
            command = job_environment.command(spec, image, mounts, binds)
            if running.member:
                environment |= running.member.environment()
                self.network.join(running.member)
            return await self._attempts(running, command, environment, places)
        finally:
            if running.member:
                self.network.leave(running.member)
            following.cancel()
            await asyncio.wait([following])  # a step under way is finished before the last one
            for mount in live if not running.killed else ():
                await asyncio.to_thread(mount.flush)
            await asyncio.to_thread(self.volumes.remove, job.id)
            await asyncio.to_thread(shutil.rmtree, places.root, True)

    async def _follow(self, live: list[LiveMount]) -> None:
        """Let the Job's mounts follow their buckets until cancelled."""
        while True:
            await asyncio.sleep(MOUNT_POLL_S)
            for mount in live:
                step = asyncio.ensure_future(asyncio.to_thread(mount.step))
                try:
                    await asyncio.shield(step)
                except asyncio.CancelledError:
                    await asyncio.wait([step])
                    raise
                except (AsyncgrpoError, OSError, HTTPError) as error:  # away, throttled or in motion: it lags more
                    log.info("mount %s: %s", mount.directory, error)

    async def _attempts(
        self, running: Running, command: list[str], environment: Mapping[str, str], places: Places
    ) -> Outcome:
        """Start the command until it succeeds, is cancelled or late, or has no attempt left."""
        job = running.job
        deadline: float | None = None
        while True:
            running.log.write(f"{STARTED} at {timestamp(now())} =====")
            process = JobProcess.start(command, environment, places.work, job.id, running.log, running.member)
            self.report(process.group, True)
            running.process = process
            job.start()
            deadline = deadline or asyncio.get_running_loop().time() + job.spec.timeout_s
            code = await self._until_end(running, process, deadline)
            if code is None:
                return Stage.ERROR, "Job timeout"
            if code == 0 or job.stage.final:
                return Stage.COMPLETED, None
            if job.attempt >= job.spec.attempts:
                return Stage.ERROR, f"Job failed with exit code: {code}. Reason: Error"
            job.attempt += 1

    async def _until_end(self, running: Running, process: JobProcess, deadline: float) -> int | None:
        """The exit code, or None if the Job was late; one that is late or cancelled is ended here."""
        ended = asyncio.ensure_future(process.wait())
        cancelled = asyncio.ensure_future(running.cancelled.wait())
        try:
            await asyncio.wait(
                (ended, cancelled),
                timeout=max(0.0, deadline - asyncio.get_running_loop().time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            late = not ended.done() and not cancelled.done()
            if not ended.done():
                await process.stop(self.grace_s)
            code = await ended
            running.killed = code == KILLED
            return None if late else code
        finally:
            cancelled.cancel()
            if not ended.done():
                process.send(signal.SIGKILL)
            running.process = None
            self.report(process.group, False)

    async def close(self) -> None:
        """Cancel every Job and wait until all have ended."""
        for running in self._running.values():
            self.cancel(running.job)
        tasks = [running.task for running in self._running.values() if running.task]
        await asyncio.gather(*tasks, return_exceptions=True)
