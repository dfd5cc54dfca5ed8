"""Whose address a call means, and what a program sees that shares its ports with nobody."""

import errno
import platform
import socket
import subprocess
import sys
from ipaddress import IPv4Address, ip_address
from pathlib import Path

import pytest

from emulator import member
from emulator.member import CALLS, filter_code
from emulator.network import Member
from emulator.own_ports import Bound, Own, of_this_machine, parse

OWN, OTHER = Own("127.64.7.1", "127.128.7.1"), Own("127.64.7.2", "127.128.7.2")


@pytest.mark.parametrize(
    ("data", "meant"),
    [
        (b"\x02\x00\x1f\x40\x7f\x00\x00\x01", ("127.0.0.1", 8000)),
        (b"\x02\x00\x00\x50\x00\x00\x00\x00" + bytes(8), ("0.0.0.0", 80)),
        (b"\x0a\x00\x1f\x40" + bytes(4) + bytes(16) + bytes(4), ("0.0.0.0", 8000)),
        (b"\x0a\x00\x1f\x40" + bytes(4) + bytes(15) + b"\x01" + bytes(4), ("127.0.0.1", 8000)),
        (b"\x0a\x00\x1f\x40" + bytes(4) + bytes(10) + b"\xff\xff\x0a\x00\x00\x07" + bytes(4), ("10.0.0.7", 8000)),
        (b"\x0a\x00\x1f\x40" + bytes(4) + b"\x20\x01" + bytes(14) + bytes(4), ("2001::", 8000)),
        (b"\x01\x00/tmp/socket", None),
        (b"\x02\x00\x1f", None),
        (b"", None),
    ],
)
def test_addresses_of_calls(data, meant):
    assert parse(data) == (meant and (ip_address(meant[0]), meant[1]))


def test_what_is_bound_to_all_interfaces_is_the_peers_and_the_rest_is_the_jobs_own():
    this = (ip_address("192.0.2.2"), ip_address("2001:db8::2"))
    bound = Bound(OWN, {8000: OWN.shared, 8001: OWN.private}, this.__contains__)
    assert bound.to_bind(IPv4Address("0.0.0.0"), 8000) == OWN.shared
    assert bound.to_bind(IPv4Address("127.0.0.1"), 8000) == OWN.private
    assert bound.to_bind(IPv4Address("10.0.0.7"), 8000) is None
    assert bound.to_bind(IPv4Address("127.0.0.1"), 0) is None
    assert bound.to_connect(IPv4Address("127.0.0.1"), 8000) == OWN.shared
    assert bound.to_connect(IPv4Address("0.0.0.0"), 8001) == OWN.private
    assert bound.to_connect(IPv4Address("127.0.0.1"), 8002) is None  # the Hub's, say
    assert bound.to_connect(IPv4Address("10.0.0.7"), 8000) is None
    assert bound.to_bind(this[0], 8000) == OWN.shared
    assert bound.to_bind(this[0], 0) is None
    assert [bound.to_connect(address, 8000) for address in this] == [OWN.shared] * 2
    assert [bound.to_connect(address, 8002) for address in this] == [None] * 2


def test_addresses_of_this_machine():
    """What is set aside for documentation (RFC 5737, RFC 3849) may all be this machine's but for one end of it."""
    assert of_this_machine(ip_address(machines_address()))
    others = (OTHER.shared, "127.0.0.1", "198.51.100.254", "2001:db8:ffff::fffe", "224.0.0.1")
    assert not any(of_this_machine(ip_address(other)) for other in others)


def machines_address():
    """By which others would reach this machine; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("198.51.100.254", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return asking.getsockname()[0]


@pytest.mark.parametrize("machine", CALLS)
def test_the_filter_asks_about_two_calls_of_its_architecture_alone(machine):
    calls = CALLS[machine]

    def run(architecture, number):
        at, loaded, steps = 0, 0, filter_code(calls)
        while True:
            code, yes, no, value = member.STEP.unpack_from(steps, member.STEP.size * at)
            at += 1
            if code == 0x20:
                loaded = {0: number, 4: architecture}[value]
            elif code == 0x15:
                at += yes if loaded == value else no
            else:
                return value

    asked, allowed = 0x7FC00000, 0x7FFF0000
    assert [run(calls.architecture, n) for n in (calls.bind, calls.connect)] == [asked, asked]
    assert {run(calls.architecture, n) for n in range(460) if n not in (calls.bind, calls.connect)} == {allowed}
    assert run(calls.architecture + 1, calls.bind) == allowed


@pytest.fixture
def inside(tmp_path, groups):
    """Run code as a member with an address and a hosts file of its own."""
    started = []

    def inside(code, own=OWN):
        place = Member(str(len(started)), "it", (), own, tmp_path / f"hosts{len(started)}")
        place.hosts.write_text("127.0.0.1 localhost\n")
        with place.entrance([sys.executable, "-c", code]) as (command, descriptor):
            started.append(subprocess.Popen(command, pass_fds=[descriptor], stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield inside
    for each in started:
        each.kill()
        each.communicate()


SERVER = """
import socket, sys
server = socket.create_server((%r, %d))
print(*server.getsockname(), flush=True)
while True:
    with server.accept()[0] as connection:
        connection.sendall(%r)
"""


def told(address):
    with socket.create_connection(address, timeout=10) as connection:
        return connection.recv(100)


def test_two_programs_listen_on_one_port_and_neither_knows(inside, free_port):
    for own, words in ((OWN, b"one"), (OTHER, b"two")):
        assert inside(SERVER % ("", free_port, words), own).stdout.readline().split() == [own.shared, str(free_port)]
    assert [told((own.shared, free_port)) for own in (OWN, OTHER)] == [b"one", b"two"]
    with pytest.raises(ConnectionRefusedError):  # they are not this machine's
        told(("127.0.0.1", free_port))


def test_what_listens_on_loopback_is_no_peers_business(inside, free_port):
    assert inside(SERVER % ("127.0.0.1", free_port, b"own")).stdout.readline().split()[0] == OWN.private
    with pytest.raises(ConnectionRefusedError):
        told((OWN.shared, free_port))


TALKS_TO_ITSELF = """
import asyncio, socket, threading
async def main():
    async def answer(reader, writer):
        writer.write(b"me")
        writer.close()
    async with await asyncio.start_server(answer, %(host)r, %(port)d) as server:
        for name in ("127.0.0.1", "localhost", "::ffff:127.0.0.1", "::1"):
            reader, writer = await asyncio.open_connection(name, %(port)d)
            print((await reader.read()).decode(), end=" ")
            writer.close()
asyncio.run(main())
for port in (%(port)d, 0):
    server = socket.create_server(("127.0.0.1", port))
    own = "127.0.0.1", server.getsockname()[1]
    client = threading.Thread(target=lambda: print(socket.create_connection(own).recv(9).decode(), end=" "))
    client.start()
    with server.accept()[0] as connection:
        connection.sendall(b"waited")
    client.join()
"""


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_a_program_reaches_itself_by_every_name(inside, free_port, host):
    assert inside(TALKS_TO_ITSELF % {"host": host, "port": free_port}).stdout.read() == "me me me me waited waited "


BY_THE_MACHINES_ADDRESS = """
import socket
server = socket.create_server((%(host)r, %(port)d), family=%(family)d, dualstack_ipv6=%(family)d == socket.AF_INET6)
print(*server.getsockname()[:2], flush=True)
client = socket.create_connection((%(address)r, %(port)d), timeout=10)
with server.accept()[0] as connection:
    connection.sendall(b"me")
print(client.recv(9).decode())
"""


@pytest.mark.parametrize(("host", "family"), [("", socket.AF_INET), ("::", socket.AF_INET6), (None, socket.AF_INET)])
def test_a_program_reaches_itself_by_the_machines_address(inside, free_port, host, family):
    """As torch.distributed's processes do: vLLM's engine waited for itself for ever."""
    address = machines_address()
    code = BY_THE_MACHINES_ADDRESS % {
        "host": address if host is None else host,
        "port": free_port,
        "family": family,
        "address": address,
    }
    told = inside(code).stdout.read().split()
    assert [told[0].removeprefix("::ffff:"), *told[1:]] == [OWN.shared, str(free_port), "me"]


CHILD_OF_A_THREAD = """
import socket, subprocess, sys, threading
code = "import socket; print(socket.create_server(('', %(port)d)).getsockname()[0], flush=True)"
def work():
    subprocess.run([sys.executable, "-c", code], check=True)
    print(socket.create_server(("", %(port)d)).getsockname()[0], flush=True)
thread = threading.Thread(target=work)
thread.start()
thread.join()
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
    datagrams.bind(("0.0.0.0", 0))
    print(datagrams.getsockname()[0])
with socket.socket(socket.AF_UNIX) as unix, socket.socket(socket.AF_UNIX) as client:
    unix.bind("\\0asyncgrpo-test-" + %(name)r)
    unix.listen()
    client.connect(unix.getsockname())
try:
    socket.create_server(("203.0.113.1", 0))
except OSError as error:
    print(error.errno)
"""


def test_threads_children_and_what_is_left_to_the_kernel(inside, tmp_path, free_port):
    told = inside(CHILD_OF_A_THREAD % {"name": tmp_path.name, "port": free_port}).stdout.read().split()
    assert told == [OWN.shared, OWN.shared, "0.0.0.0", str(errno.EADDRNOTAVAIL)]


WRONG = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
address = b"\\x02\\x00" + (%d).to_bytes(2, "big") + bytes(12)
stream, unix, ipv6 = socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_INET6)
for descriptor, pointer, length in (
    (os.pipe()[0], address, 16),
    (999, address, 16),
    (stream.fileno(), ctypes.c_void_p(1), 16),
    (stream.fileno(), ctypes.c_void_p(-1), 16),
    (stream.fileno(), address, 3),
    (unix.fileno(), address, 16),
    (ipv6.fileno(), address, 16),
    (stream.fileno(), address, 16),
):
    print(ctypes.get_errno() if libc.bind(descriptor, pointer, length) else 0)
"""


def test_calls_that_are_wrong_get_the_kernels_answers(inside, free_port):
    """And the next one is answered as ever."""
    expected = [errno.ENOTSOCK, errno.EBADF, errno.EFAULT, errno.EFAULT, *[errno.EINVAL] * 3, 0]
    assert list(map(int, inside(WRONG % free_port).stdout.read().split())) == expected


INTERRUPTED = """
import signal, socket
signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, False)
signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
for _ in range(300):
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", %d))
print("bound")
"""


KERNEL = tuple(map(int, platform.release().split("-")[0].split(".")[:2]))


@pytest.mark.skipif(KERNEL < (6, 17), reason="an older kernel may begin a call anew that was just answered")
def test_a_signal_binds_nothing_twice(inside, free_port):
    assert inside(INTERRUPTED % free_port).stdout.read() == "bound\n"


FROM_A_PORT = """
import socket
with socket.socket() as client:
    client.settimeout(0.0)
    client.bind(("", 0))
    try:
        client.connect(("203.0.113.1", 9))
    except OSError as error:
        print(error.errno)
"""


def test_who_binds_before_connecting_to_the_outside_is_not_held_back(inside):
    ours = subprocess.run([sys.executable, "-c", FROM_A_PORT], stdout=subprocess.PIPE, text=True, check=True)
    assert inside(FROM_A_PORT).stdout.read() == ours.stdout  # it is on its way, or there is no network
    assert ours.stdout.strip() != str(errno.EINVAL)


def test_a_port_that_is_taken_is_taken(inside, free_port):
    code = f"import socket; a = socket.create_server(('', {free_port})); socket.socket().bind(('', {free_port}))"
    running = inside(f"try:\n    exec({code!r})\nexcept OSError as error:\n    print(error.errno)")
    assert running.stdout.read().split() == [str(errno.EADDRINUSE)]


def test_the_rest_of_the_machine_is_where_it_was(inside):
    with socket.create_server(("127.0.0.1", 0)) as hub:
        running = inside(f"import socket; socket.create_connection({hub.getsockname()!r}).sendall(b'asked')")
        with hub.accept()[0] as connection:
            assert connection.recv(9) == b"asked"
        assert running.wait(10) == 0


def test_what_the_machine_does_not_allow_is_said(tmp_path):
    ours, handed = socket.socketpair()
    with ours, handed:
        command = [sys.executable, "-I", "-S", str(Path(member.__file__)), str(handed.fileno()), str(tmp_path / "none")]
        done = subprocess.run(
            [*command, "/bin/true"], pass_fds=[handed.fileno()], capture_output=True, text=True, timeout=20
        )
    assert done.returncode == 1
    assert done.stderr.startswith("network group: ") and "Traceback" not in done.stderr
