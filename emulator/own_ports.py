"""Gives a Job every port for itself on a machine that it shares: `bind` and `connect` are answered here (Linux).

Such a Job has two addresses of the loopback network. What it binds to all interfaces, or to this machine's address, is
bound to the one that gateway and peers know, what it binds to 127.0.0.1 to the other; when it connects to itself, by
whichever of the machine's addresses, it gets what it bound. So two Jobs may both listen on 8000, and neither knows.
Everything else is left to the kernel as it was asked: addresses that are not the Job's own (the Hub, the bucket, the
Internet), ports that the kernel is to choose, datagrams, Unix sockets.

The kernel hands over each call (seccomp_unotify(2)); the socket is fetched from the process (pidfd_getfd(2)), bound or
connected in its place, and the result is the call's. This keeps Jobs apart, it does not lock them in.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from emulator.member import CALLS

# linux/seccomp.h: struct seccomp_notif up to the call's arguments, its whole size, struct seccomp_notif_resp, ioctls.
_NOTICE = struct.Struct("=QII iIQ 6Q")
_ANSWER = struct.Struct("=QqiI")
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_PIDFD_GETFD = 438  # asm-generic/unistd.h: one number everywhere
SOCKADDR_BYTES = 28
"""sizeof(struct sockaddr_in6), the longest that is looked at."""

Address = IPv4Address | IPv6Address
ANY, SELF = IPv4Address("0.0.0.0"), IPv4Address("127.0.0.1")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Own:
    """A Job's own addresses: `shared` is known to its peers, `private` stands for its loopback interface."""

    shared: str
    private: str


def parse(data: bytes) -> tuple[Address, int] | None:
    """Address and port of a `sockaddr`; None for a family that has none. IPv6's own addresses count as IPv4's."""
    family = _family(data)
    if family == socket.AF_INET and len(data) >= 8:
        return IPv4Address(data[4:8]), int.from_bytes(data[2:4], "big")
    if family == socket.AF_INET6 and len(data) >= 24:
        address = IPv6Address(data[8:24])
        same = {IPv6Address("::"): ANY, IPv6Address("::1"): SELF}.get(address, address.ipv4_mapped or address)
        return same, int.from_bytes(data[2:4], "big")
    return None


def of_this_machine(address: Address) -> bool:
    """Whether a network interface has it, the loopback's apart: what goes there is sent from there. Nothing is sent."""
    if address.is_loopback:
        return False
    with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((str(address), 9))
        except OSError:  # no way leads there
            return False
        return bool(asking.getsockname()[0] == str(address))


def _family(data: bytes) -> int:
    return int.from_bytes(data[:2], sys.byteorder)


@dataclass
class Bound:
    """Which addresses a Job means. Pure but for `of_this_machine`."""

    own: Own
    ports: dict[int, str] = field(default_factory=dict)
    """Port -> the own address it was bound to last."""
    of_this_machine: Callable[[Address], bool] = of_this_machine

    def to_bind(self, address: Address, port: int) -> str | None:
        """The address to bind instead, or None for the one that was asked for.

        A port that the kernel chooses (0) is nobody else's: neither the Hub's, to which the Job connects, nor that of
        another Job. And its socket may be one that connects to the outside, which it could not from an own address.
        """
        if not port:
            return None
        if address == ANY or (address.version == 4 and self.of_this_machine(address)):
            return self.own.shared
        return self.own.private if address == SELF else None

    def to_connect(self, address: Address, port: int) -> str | None:
        """The address to connect to instead, or None for the one that was asked for.

        Programs also reach themselves by the machine's address: so do the processes of torch.distributed, that of
        vLLM's engine among them.
        """
        bound = self.ports.get(port)
        return bound if bound and (address in (ANY, SELF) or self.of_this_machine(address)) else None


class OwnPorts:
    """Answers one Job's calls, in a thread, until its last process has ended. `handed` is where the listener comes."""

    def __init__(self, own: Own, handed: socket.socket) -> None:
        self._bound = Bound(own)
        self._handed = handed
        threading.Thread(target=self._serve, name=f"ports of {own.shared}", daemon=True).start()

    def _serve(self) -> None:
        with self._handed:
            _, listeners, _, _ = socket.recv_fds(self._handed, 16, 1, socket.MSG_CMSG_CLOEXEC)
        if not listeners:  # the Job's first process ended before: the machine does not allow it
            return
        (listener,) = listeners
        try:
            waiting = select.poll()
            waiting.register(listener, select.POLLIN)
            while waiting.poll()[0][1] & select.POLLIN:
                self._answer(listener)
        finally:
            os.close(listener)  # whoever still waits for an answer gets ENOSYS

    def _answer(self, listener: int) -> None:
        notice = bytearray(_NOTICE.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, notice)
        except OSError:  # the process was killed meanwhile
            return
        number, thread, _, call, _, _, descriptor, pointer, length, *_ = _NOTICE.unpack(notice)
        binds = call == CALLS[platform.machine()].bind
        taken = None
        try:
            asked = _memory(thread, pointer, min(length, SOCKADDR_BYTES))
            if target := parse(asked):
                address, port = target
                instead = (self._bound.to_bind if binds else self._bound.to_connect)(address, port)
                taken = _take(thread, descriptor) if instead else None
        except (OSError, OverflowError):  # it ended, nobody may look into it, or there is nothing: the kernel knows
            pass
        if taken and (taken.type != socket.SOCK_STREAM or taken.family != _family(asked)):
            taken.close()
            taken = None
        if taken is None or instead is None:
            _send(listener, number, 0, _CONTINUE)
        elif binds:
            with taken:
                _send(listener, number, self._bind(taken, instead, port))
        else:  # its own server may be slow to accept, and may have to bind or connect first
            threading.Thread(target=_connect, args=(listener, number, taken, instead, port), daemon=True).start()

    def _bind(self, taken: socket.socket, address: str, port: int) -> int:
        try:
            if taken.family == socket.AF_INET6 and taken.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
                # There is one such address for all Jobs. Whoever binds both families is reached by the other one.
                taken.bind(("::1", 0))
                return 0
            taken.bind(_of(taken, address, port))
        except OSError as error:
            return error.errno or errno.EIO
        self._bound.ports[taken.getsockname()[1]] = address
        return 0


def _connect(listener: int, number: int, taken: socket.socket, address: str, port: int) -> None:
    with taken:
        try:
            taken.connect(_of(taken, address, port))
            error = 0
        except OSError as failed:  # EINPROGRESS, too, if the socket does not wait
            error = failed.errno or errno.EIO
        _send(listener, number, error)


def _of(taken: socket.socket, address: str, port: int) -> tuple[str, int]:
    return (f"::ffff:{address}" if taken.family == socket.AF_INET6 else address, port)


def _memory(thread: int, pointer: int, length: int) -> bytes:
    with Path(f"/proc/{thread}/mem").open("rb", buffering=0) as memory:
        memory.seek(pointer)
        return memory.read(length)


def _take(thread: int, descriptor: int) -> socket.socket:
    """The socket of another process."""
    status = Path(f"/proc/{thread}/status").read_text()
    process = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Tgid:"))
    pidfd = os.pidfd_open(process)
    try:
        copy = _libc.syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
    finally:
        os.close(pidfd)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    try:
        return socket.socket(fileno=copy)  # waits or not, as it did
    except OSError:  # it is none
        os.close(copy)
        raise


def _send(listener: int, number: int, error: int, flags: int = 0) -> None:
    with contextlib.suppress(OSError):  # the process was killed meanwhile, or the listener is closed
        fcntl.ioctl(listener, _SEND, _ANSWER.pack(number, 0, -error, flags))
