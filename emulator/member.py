"""Becomes a Job's command inside a network group: with a hosts file of its own, and asking before it binds a port.

    python member.py <socket> <hosts file> <program> <argument>...

It takes a mount namespace, in which /etc/hosts is the given file, and a filter of system calls, whose listener it
sends over the inherited socket; then it becomes the program, with the process id it has. Who has the listener answers
every `bind` and `connect` of the program and its children (see `emulator.own_ports`). As root or as anybody: what takes
privileges is done in a user namespace where they lack. Standard library only: it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
import sys
from pathlib import Path
from typing import NamedTuple

HOSTS = "/etc/hosts"


class Calls(NamedTuple):
    """Numbers of the system calls that matter here, and of the architecture they belong to (linux/audit.h)."""

    architecture: int
    seccomp: int
    bind: int
    connect: int


CALLS = {"x86_64": Calls(0xC000003E, 317, 49, 42), "aarch64": Calls(0xC00000B7, 277, 200, 203)}
"""By machine: asm/unistd.h of each."""

# linux/sched.h, linux/mount.h, linux/prctl.h
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_BIND, _RECURSIVE, _SLAVE = 0x1000, 0x4000, 0x80000
_NO_NEW_PRIVILEGES = 38
# linux/seccomp.h. SPEC_ALLOW: the program is trusted as any other, and need not be slowed down.
_SET_FILTER, _SPEC_ALLOW, _NEW_LISTENER = 1, 4, 8
_WAIT_KILLABLE = 32
"""A signal does not begin a call anew that is being answered: it would bind twice. Since Linux 5.19."""
_ALLOW, _ASK = 0x7FFF0000, 0x7FC00000
# linux/bpf_common.h: load a word of the call's description, jump if equal, return. Number and architecture come first.
_LOAD, _JUMP_IF, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4
STEP = struct.Struct("=HBBI")
"""One step of a filter: what to do, how far to jump if so and if not, a number (struct sock_filter)."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


_libc = ctypes.CDLL(None, use_errno=True)


def _check(what: str, result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def take_mounts() -> None:
    """Moves this process into a mount namespace of its own, and into a user namespace if it may not otherwise."""
    user, group = os.geteuid(), os.getegid()
    if _libc.unshare(_NEW_MOUNTS) < 0:
        _check("user and mount namespaces", _libc.unshare(_NEW_MOUNTS | _NEW_USER))
        own = Path("/proc/self")
        (own / "setgroups").write_text("deny")  # or an ordinary user may not map groups: user_namespaces(7)
        (own / "uid_map").write_text(f"{user} {user} 1")
        (own / "gid_map").write_text(f"{group} {group} 1")
    # What the machine unmounts goes here, too; what is mounted here stays here.
    _check("mounts of its own", _libc.mount(b"none", b"/", None, _RECURSIVE | _SLAVE, None))


def filter_code(calls: Calls) -> bytes:
    """The filter as the kernel runs it: `bind` and `connect` are asked about, everything else is allowed."""
    steps = (
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_IF, 0, 3, calls.architecture),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_IF, 2, 0, calls.bind),
        (_JUMP_IF, 1, 0, calls.connect),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ASK),
    )
    return b"".join(STEP.pack(*step) for step in steps)


def take_filter(calls: Calls) -> int:
    """Filters this process's system calls from now on; returns the listener, a file descriptor."""
    code = filter_code(calls)
    program = _Program(len(code) // STEP.size, code)
    _check("no new privileges", _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    flags = _NEW_LISTENER | _SPEC_ALLOW
    listener = _libc.syscall(calls.seccomp, _SET_FILTER, flags | _WAIT_KILLABLE, ctypes.byref(program))
    if listener < 0 and ctypes.get_errno() == errno.EINVAL:
        listener = _libc.syscall(calls.seccomp, _SET_FILTER, flags, ctypes.byref(program))
    return _check("a filter of system calls", listener)


def main(control: int, hosts: str, command: list[str]) -> None:
    """Never returns; exits with status 1 and a message on stderr if the machine does not allow it."""
    calls = CALLS.get(platform.machine())
    if calls is None or sys.platform != "linux":
        sys.exit(f"network group: not on {sys.platform} on {platform.machine()}")
    try:
        take_mounts()
        _check(f"mounting {HOSTS}", _libc.mount(hosts.encode(), HOSTS.encode(), None, _BIND, None))
        with socket.socket(fileno=control) as connection:
            socket.send_fds(connection, [b"listener"], [take_filter(calls)])
        os.execv(command[0], command)
    except OSError as error:
        sys.exit(f"network group: {error.strerror or error}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
