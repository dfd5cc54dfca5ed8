"""Network groups: what members find by which name, with real clients, real processes and the real `hf` command."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import BadRequestError

from emulator import network, reaper
from emulator.jobs_state import Owner, parse_spec
from emulator.network import Member, Network, group_name, hosts_file
from emulator.own_ports import Own
from emulator.serve import Emulator
from jobs import bundle
from tests.test_hf_command import hf, start  # noqa: F401

IMAGE = "python:3.12"
USER = Owner("user", "1")


def spec(group="g", aliases=(), **fields):
    body = {"command": ["true"], "dockerImage": IMAGE, "network": {"group": group, "aliases": list(aliases)}}
    return parse_spec({**body, **fields})


def test_a_group_is_its_owners_and_its_resource_groups():
    names = {
        group_name(USER, spec()),
        group_name(Owner("other", "2"), spec()),
        group_name(USER, spec("h")),
        group_name(USER, spec(resourceGroupId="r")),
    }
    assert len(names) == 4
    assert group_name(USER, spec(aliases=["a"])) == group_name(USER, spec())


def test_the_longest_alias_is_a_name_that_resolvers_take():
    longest = "a" * 34
    joining = Network().member(USER, "job", spec("b" * 46, [longest]), Path())
    assert joining.names() == [joining.name, f"{joining.prefix}{longest}"]
    assert all(len(name.encode("idna")) <= 63 for name in joining.names())


def test_the_hosts_file_of_a_member():
    def member(name, *aliases, address):
        return Member(address, name, aliases, Own(address, "-"), Path())

    one, two, other = member("g", "a", "b", address="1"), member("g", "b", address="2"), member("h", "a", address="3")
    group = ["1 g g-a g-b", "2 g g-b"]
    machine = "127.0.0.1 localhost here\n# here\n\n127.0.1.1\there # here\n10.0.0.7 bucket\n"
    told = hosts_file(one, [one, two, other], "here", machine).splitlines()
    assert [line for line in told if line] == ["1 here", *group, "127.0.0.1 localhost", "10.0.0.7 bucket"]
    assert hosts_file(one, [one, two], "localhost", "127.0.0.1 localhost\n").splitlines() == [
        *group,
        "127.0.0.1 localhost",
    ]


def test_members_come_and_go(tmp_path):
    groups = Network()
    places = [groups.member(USER, name, spec("g", [name]), tmp_path / name) for name in "ab"]
    assert len({each.own for each in places}) == 2
    for each in places:
        each.hosts.parent.mkdir()
        groups.join(each)
    assert f"{places[0].prefix}b" in places[0].hosts.read_text()
    before = places[0].hosts.stat().st_ino
    groups.leave(places[1])
    groups.leave(places[1])
    assert f"{places[0].prefix}b" not in places[0].hosts.read_text()
    assert places[0].hosts.stat().st_ino == before  # it is mounted
    assert "localhost" in places[0].hosts.read_text()
    before = [each.hosts.read_text() for each in places]
    alone = groups.member(USER, "c", parse_spec({"command": ["true"], "dockerImage": IMAGE}), tmp_path)
    groups.join(alone)
    assert alone.environment() == {} and places[0].name not in alone.hosts.read_text()
    groups.leave(alone)
    assert [each.hosts.read_text() for each in places] == before


@pytest.fixture(scope="module")
def emulator(groups):
    with Emulator(grace_s=0.5) as emulator:
        yield emulator
        assert emulator.stop() == []


@pytest.fixture
def run(emulator):
    api = HfApi(endpoint=emulator.endpoint, token=emulator.token)
    started = []

    def run(*command, namespace="local", **options):
        job = api.run_job(image=IMAGE, command=list(command), namespace=namespace, **options)
        started.append((job.id, namespace))
        return job

    yield run
    for job, namespace in started:
        api.cancel_job(job_id=job, namespace=namespace)


def log(emulator, job, namespace="local"):
    """All that a Job prints, once it has ended."""
    api = HfApi(endpoint=emulator.endpoint, token=emulator.token)
    return "\n".join(api.fetch_job_logs(job_id=job.id, namespace=namespace, follow=True))


SERVER = """
import http.server, sys
class Says(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(sys.argv[1].encode())
http.server.HTTPServer((sys.argv[2], int(sys.argv[3])), Says).serve_forever()
"""
ASK = """
import os, socket, sys, time, urllib.request
prefix = os.environ["HF_NETWORK_GROUP_PREFIX"]
for name in sys.argv[1:]:
    while True:
        try:
            print(urllib.request.urlopen(f"http://{prefix}{name}", timeout=10).read().decode(), flush=True)
            break
        except OSError:  # not up yet, or not even known
            time.sleep(0.05)
"""
NAMES = """
import os, socket, sys
def addresses(name):
    try:
        return len({each[4][0] for each in socket.getaddrinfo(name, 80, proto=socket.IPPROTO_TCP)})
    except socket.gaierror:
        return 0
prefix = os.environ["HF_NETWORK_GROUP_PREFIX"]
server = socket.create_server((socket.gethostname(), 0))
assert addresses(socket.gethostname()) == 1 and server.getsockname()[0].startswith("127.")
assert socket.gethostname() == "localhost" or server.getsockname()[0] in {
    each[4][0] for each in socket.getaddrinfo(os.environ["HF_NETWORK_GROUP_HOSTNAME"], 80)
}
print(addresses(os.environ["HF_NETWORK_GROUP_HOSTNAME"]), *(addresses(prefix + name) for name in sys.argv[1:]))
"""
FOREVER = ("python", "-S", "-c", "import time; time.sleep(600)")


def serve(run, words, alias, host="0.0.0.0", port=8000, **options):
    command = ("python", "-c", SERVER, words, host, str(port))
    return run(*command, network_group="train", network_aliases=[alias], **options)


def test_members_reach_each_other_on_the_same_port_by_alias(emulator, run):
    serve(run, "first", "r-0")
    serve(run, "second", "r-1")
    serve(run, "any other port", "metrics", port=1101)
    asking = run("python", "-c", ASK, "r-0:8000", "r-1:8000", "metrics:1101", network_group="train")
    assert log(emulator, asking).split("\n") == ["first", "second", "any other port"]


def test_what_clients_see(emulator, run):
    job = run(*FOREVER, network_group="seen", network_aliases=["a", "b"])
    api = HfApi(endpoint=emulator.endpoint, token=emulator.token)
    info = api.inspect_job(job_id=job.id, namespace="local")
    assert (info.network.group, info.network.aliases) == ("seen", ["a", "b"])
    assert run(*FOREVER, network_group="seen").network.aliases == []
    assert run("true").network is None


def eventually(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return value


def test_who_is_known_to_whom(emulator, run):
    api = HfApi(endpoint=emulator.endpoint, token=emulator.token)

    def running(job, namespace="local"):
        wanted = {"job_id": job.id, "namespace": namespace, "stages": ["RUNNING"]}
        return api.wait_for_job(**wanted, poll_interval=0.02, timeout=10)

    def found(*names, group="known", **options):
        return log(emulator, run("python", "-c", NAMES, *names, network_group=group, **options), **options)

    one = running(run(*FOREVER, network_group="known", network_aliases=["worker", "first"]))
    running(run(*FOREVER, network_group="known", network_aliases=["worker"]))
    assert found("worker", "first", "nobody") == "3 2 1 0"  # the third member is who asks
    assert found("worker", group="other") == "1 0"
    assert found("worker", namespace="local-team") == "1 0"
    api.cancel_job(job_id=one.id, namespace="local")
    eventually(lambda: found("worker", "first") == "2 1 0")
    running(run(*FOREVER, network_group="known", network_aliases=["first"]))  # takes the place of the one that went
    assert found("worker", "first") == "3 1 1"


LISTENS = """
import socket, time
private, public = (socket.create_server((host, port)) for host, port in (("127.0.0.1", 8000), ("0.0.0.0", 8001)))
print("listening", flush=True)
time.sleep(600)
"""
CONNECT = """
import os, socket, sys
name, _, port = sys.argv[1].partition(":")
try:
    socket.create_connection((os.environ["HF_NETWORK_GROUP_PREFIX"] + name, int(port)), timeout=10)
    print("connected")
except OSError as error:
    print(error)
"""


def test_a_member_that_listens_on_loopback_is_not_reached(emulator, run):
    """As on the Hub, where such a server is a common mistake."""
    job = run("python", "-c", LISTENS, network_group="train", network_aliases=["private"])
    state = emulator.runner.table.get("local", job.id)
    eventually(lambda: "listening" in str(emulator.runner.log(state).read()))
    told = [log(emulator, run("python", "-c", CONNECT, f"private:{p}", network_group="train")) for p in (8000, 8001)]
    assert "refused" in told[0] and told[1] == "connected"


def test_a_member_may_expose_a_port_as_well(emulator, run):
    import requests

    job = serve(run, "through the gateway", "exposing", expose=[8000])
    bearer = {"Authorization": f"Bearer {emulator.token}"}

    def answered():
        answer = requests.get(job.status.expose_urls[0], headers=bearer, timeout=10)
        return answer if answer.status_code == 200 else None

    assert eventually(answered).text == "through the gateway"
    assert requests.get(job.status.expose_urls[0], timeout=10).status_code == 401


def test_the_hf_command(hf):  # noqa: F811
    server = ("--network-group", "cli", "--network-alias", "server", "--network-alias", "also")
    job = start(hf, *server, IMAGE, "--", "python", "-c", SERVER, "found by alias", "0.0.0.0", "8000")
    info = json.loads(hf("inspect", "--format", "json", job))[0]
    assert info["network"] == {"group": "cli", "aliases": ["server", "also"]}
    told = hf("run", "--network-group", "cli", IMAGE, "--", "python", "-c", ASK, "also:8000")
    assert "Joined network group 'cli'" in told and "found by alias" in told
    refused = hf("run", "--network-group", "No", IMAGE, "true", fails=True)
    assert "46 characters" in refused
    assert "requires" in hf("run", "--network-alias", "a", IMAGE, "true", fails=True)
    hf("cancel", job)


def test_a_machine_that_cannot_refuses_and_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(network, "_SHIM", ("/bin/sh", "-c", "echo network group: user namespaces: no >&2; exit 1"))
    with Emulator(grace_s=0.2) as emulator:
        api = HfApi(endpoint=emulator.endpoint, token=emulator.token)
        with pytest.raises(BadRequestError, match=r"cannot keep groups apart.*user namespaces: no.*Expose ports"):
            api.run_job(image=IMAGE, command=["true"], namespace="local", network_group="g")
        assert list(api.list_jobs(namespace="local")) == []
        assert api.run_job(image=IMAGE, command=["true"], namespace="local").network is None


HOST = '''
import ctypes, sys, time
if len(sys.argv) > 1:
    ctypes.CDLL(None).prctl(24, 21, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_SYS_ADMIN
    import os
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:-1]])
from huggingface_hub import HfApi
from emulator.serve import Emulator
emulator = Emulator(grace_s=5)
emulator.start()
api = HfApi(endpoint=emulator.endpoint, token=emulator.token)
code = """
import os, socket, time
server = socket.create_server(('', 8000))
print(server.getsockname()[0], os.readlink('/proc/self/ns/user'), flush=True)
time.sleep(600)
"""
job = api.run_job(image="x", command=["python", "-c", code], namespace="local", network_group="g")
first = next(iter(api.fetch_job_logs(job_id=job.id, namespace="local", follow=True)))
print(emulator.mark, emulator.root, first, flush=True)
time.sleep(600)
'''


@pytest.mark.parametrize("privileges", [(), ("none",)])
def test_without_privileges_too_and_killed_nothing_remains(emulator, privileges):
    """As root, if that is who runs the tests, and as somebody who may not mount: in a user namespace."""
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, *privileges],
        env={**os.environ, "PYTHONPATH": str(bundle.app_dir())},
        stdout=subprocess.PIPE,
        text=True,
    )
    with host.stdout:
        mark, root, address, users = host.stdout.readline().split()
    mine = users == str(Path("/proc/self/ns/user").readlink())
    assert mine == (not privileges and os.geteuid() == 0)
    socket.create_connection((address, 8000), timeout=5).close()
    host.send_signal(signal.SIGKILL)
    host.wait(timeout=10)
    eventually(lambda: not reaper.marked(mark) and not Path(root).exists())
    with socket.socket() as client:
        assert client.connect_ex((address, 8000)) != 0
