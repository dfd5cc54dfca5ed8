"""Network groups: Jobs of one owner that reach each other on every port, by aliases that are known before they start.

Each member has a hosts file in which the group's names lead to its living members, as the Hub's DNS does, and ports of
its own (`emulator.own_ports`). A name is known from its member's place on a machine to its end, whether anything
listens there or not. A Job that exposes ports has ports of its own, too, without being in a group.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

from emulator import member
from emulator.jobs_state import JobSpec, Owner
from emulator.own_ports import Own, OwnPorts

SHARED, PRIVATE = IPv4Address("127.64.0.0"), IPv4Address("127.128.0.0")
"""Where the members' own addresses begin: the whole of 127.0.0.0/8 is this machine, and nobody else uses these."""
ADDRESSES = 1 << 22
NAME_DIGITS = 24
"""With what stands around them they leave 34 characters for an alias in a name's 63 (RFC 1035), as on the Hub."""
PROBE_S = 60.0
"""How long the probe may take on a machine that has much else to do; 0.05 s on a quiet one."""
PROBE = "import socket as s; b = s.socket(); b.bind(('', 8000)); print(b.getsockname()[0], s.gethostbyname('it'))"


@dataclass(frozen=True)
class Member:
    """A Job's place in the network.

    `name` resolves to all members of its group, `name-<alias>` to those that claim the alias; None: it is in no group.
    """

    job_id: str
    name: str | None
    aliases: tuple[str, ...]
    own: Own
    hosts: Path

    @property
    def prefix(self) -> str:
        """What an alias is appended to."""
        return f"{self.name}-"

    def environment(self) -> dict[str, str]:
        """The variables by which a Job finds its peers."""
        return {"HF_NETWORK_GROUP_HOSTNAME": self.name, "HF_NETWORK_GROUP_PREFIX": self.prefix} if self.name else {}

    def names(self) -> list[str]:
        """The names that lead to this member."""
        return [self.name, *(f"{self.prefix}{alias}" for alias in self.aliases)] if self.name else []

    @contextlib.contextmanager
    def entrance(self, command: Sequence[str]) -> Iterator[tuple[list[str], int]]:
        """The command that becomes `command` inside, and a descriptor that it inherits; to be started within."""
        ours, handed = socket.socketpair()
        with handed:
            OwnPorts(self.own, ours)
            yield [*_SHIM, str(handed.fileno()), str(self.hosts), *command], handed.fileno()


_SHIM = (sys.executable, "-I", "-S", str(Path(member.__file__)))


def group_name(owner: Owner, spec: JobSpec) -> str:
    """The name of a Job's group, which the owner's Jobs of one resource group share."""
    group = spec.network["group"] if spec.network else ""
    return f"g-{hashlib.sha256(repr((owner.name, spec.resource_group_id, group)).encode()).hexdigest()[:NAME_DIGITS]}"


def hosts_file(of: Member, members: Iterable[Member], host: str, machine: str) -> str:
    """What a member looks names up in: its own host name, the members of its group, and what this machine's file has.

    A name that several members have gets a line for each. The host name is the member's own, as a container's is, and
    leads to where its peers find it, unless it is the name of the loopback interface.
    """
    lines = []
    if host != "localhost":
        machine = "\n".join(_without(host, line) for line in machine.splitlines())
        lines.append(f"{of.own.shared} {host}")
    lines += [f"{each.own.shared} {' '.join(each.names())}" for each in members if of.name and each.name == of.name]
    return "\n".join([*lines, machine.rstrip("\n"), ""])


def _without(name: str, line: str) -> str:
    address, *names = line.partition("#")[0].split() or [""]
    return " ".join([address, *left]) if (left := [each for each in names if each != name]) else ""


class Network:
    """The groups of one emulator."""

    def __init__(self) -> None:
        self._members: list[Member] = []
        self._numbers = itertools.count(random.randrange(ADDRESSES))  # other emulators count from elsewhere
        self._host = socket.gethostname()
        self._missing: str | None = None
        self._probed = False
        self._probing = threading.Lock()

    def member(self, owner: Owner, job_id: str, spec: JobSpec, directory: Path) -> Member:
        """A Job's place, in the group that it asks for if it asks for one, with a hosts file in `directory`."""
        own, hosts = _addresses(next(self._numbers)), directory / "hosts"
        if spec.network is None:
            return Member(job_id, None, (), own, hosts)
        return Member(job_id, group_name(owner, spec), tuple(spec.network["aliases"]), own, hosts)

    def join(self, joining: Member) -> None:
        """Let its names lead to it. Its hosts file's directory is there by now."""
        self._members.append(joining)
        self._write([joining] if joining.name is None else self._group(joining))

    def leave(self, leaving: Member) -> None:
        """Let its names lead to it no more. It may have left already."""
        if leaving in self._members:
            self._members.remove(leaving)
            self._write([] if leaving.name is None else self._group(leaving))

    def _group(self, of: Member) -> list[Member]:
        return [each for each in self._members if each.name == of.name]

    def _write(self, members: list[Member]) -> None:
        machine = Path(member.HOSTS).read_text(errors="replace")
        for each in members:
            # In place: it is mounted. In one piece, and over all that was there, for somebody may be reading.
            each.hosts.touch()
            text = hosts_file(each, members, self._host, machine).encode()
            with each.hosts.open("r+b", buffering=0) as file:
                file.write(text.ljust(each.hosts.stat().st_size, b"\n"))
                file.truncate(len(text))

    def missing(self, directory: Path) -> str | None:
        """What this machine lacks for ports of a Job's own, or None: tried out, once, in a tenth of a second."""
        with self._probing:
            if not self._probed:
                self._missing = _probe(directory, _addresses(next(self._numbers)))
                self._probed = True
        return self._missing


def _addresses(number: int) -> Own:
    return Own(str(SHARED + number % ADDRESSES), str(PRIVATE + number % ADDRESSES))


def _probe(directory: Path, own: Own) -> str | None:
    """Start a process as a member's, and see whether it has an address and a name of its own."""
    probed = Member("probe", "it", (), own, directory / "hosts")
    probed.hosts.write_text(f"{own.shared} it\n")
    try:
        with probed.entrance([sys.executable, "-I", "-S", "-c", PROBE]) as (command, descriptor):
            done = subprocess.run(command, pass_fds=[descriptor], capture_output=True, text=True, timeout=PROBE_S)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        probed.hosts.unlink()
    if done.returncode or done.stdout.split() != [own.shared, own.shared]:
        return (done.stderr or done.stdout).strip().rpartition("\n")[2] or f"exit status {done.returncode}"
    return None
