"""Volumes through FUSE: real mounts, and on them what the Hub's mount was seen to do."""

import errno
import mmap
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from huggingface_hub import HfApi, Volume

from emulator import fuse
from emulator.fuse import FuseServer
from emulator.fuse_server import Listings
from emulator.live_mount import Lag, LiveMount
from emulator.serve import Emulator
from jobs.bucket import Bucket, BucketSettings
from tests.test_live_mount import content

EVER = 1e6


needs_fuse = pytest.mark.skipif(fuse.absent() is not None, reason=f"no FUSE here: {fuse.absent()}")


def eventually(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def mounted_at(directory):
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [kind for _, where, kind, *_ in mounts if where == str(directory)]


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def serving(tmp_path):
    """Starts servers; their mirrors and what they show are two directories of one volume."""
    servers = []

    def start(name="m", kind="rw", **lag):
        server = FuseServer(tmp_path / name / "mirrors", tmp_path / name / "shown", Lag(0, **lag))
        server.start()
        server.wait()
        servers.append(server)
        mirror = server.source / kind / "job" / "volume"
        mirror.mkdir(parents=True)
        return mirror, server.target / kind / "job" / "volume"

    yield start
    for server in servers:
        server.stop()
        assert mounted_at(server.target) == []


def test_a_listing_is_kept_for_its_time_and_knows_what_was_made_here():
    now = 0.0
    listings = Listings(10.0, lambda: now)
    there = {"a"}
    assert listings.names("/d", lambda: there) == ["a"]
    there |= {"b"}
    listings.made("/d/own")
    listings.made("/other/x")
    now = 9.9
    assert listings.names("/d", lambda: there) == ["a", "own"]
    listings.removed("/d/own")
    listings.removed("/d/a")
    assert listings.names("/d", lambda: there) == []
    assert listings.names("/d2/e", lambda: ["1"]) == ["1"]
    listings.removed("/d")  # renamed, say
    assert listings.names("/d", lambda: there) == ["a", "b"]
    assert listings.names("/d2/e", lambda: ["2"]) == ["1"]
    now = 20.0
    assert listings.names("/d2/e", lambda: ["2"]) == ["2"]


@needs_fuse
def test_only_names_that_were_looked_up_stay_missing(serving):
    mirror, shown = serving(missing_s=EVER, listing_s=0)
    assert not (shown / "asked").exists()
    assert not (shown / "v1" / "file").exists()  # which asks for v1 alone
    (mirror / "v1").mkdir()
    for name in ("asked", "other", "v1/file"):
        (mirror / name).write_bytes(b"here")
    assert (shown / "other").read_bytes() == b"here"
    assert not (shown / "asked").exists() and not (shown / "v1").exists()
    assert "asked" in names(shown)  # a listing shows what cannot be opened yet
    (shown / "own").write_bytes(b"1")
    assert (shown / "own").read_bytes() == b"1"


@needs_fuse
def test_a_missing_name_is_found_when_its_time_is_over(serving):
    mirror, shown = serving(missing_s=0.2)
    assert not (shown / "asked").exists()
    (mirror / "asked").write_bytes(b"here")
    eventually((shown / "asked").exists)


@needs_fuse
def test_listings_are_older_than_what_opens(serving):
    mirror, shown = serving(missing_s=0, listing_s=EVER)
    (mirror / "gone").write_bytes(b"")
    assert names(shown) == ["gone"]
    (mirror / "new").write_bytes(b"new")
    (mirror / "gone").unlink()
    (shown / "own").write_bytes(b"own")
    assert names(shown) == ["gone", "own"]
    assert (shown / "new").read_bytes() == b"new"
    with pytest.raises(FileNotFoundError):
        (shown / "gone").read_bytes()


@needs_fuse
def test_a_listing_is_read_anew_when_its_time_is_over(serving):
    mirror, shown = serving(listing_s=0.2)
    assert names(shown) == []
    (mirror / "new").write_bytes(b"new")
    eventually(lambda: names(shown) == ["new"])


@needs_fuse
def test_a_file_is_whole_while_it_is_replaced(serving):
    mirror, shown = serving()
    size = 3 << 20
    (mirror / "file").write_bytes(b"a" * size)
    with (shown / "file").open("rb", buffering=0) as old:
        assert old.read(10) == b"a" * 10
        (mirror.parent / "part").write_bytes(b"b" * size)
        (mirror.parent / "part").replace(mirror / "file")
        assert (shown / "file").read_bytes() == b"b" * size
        with (shown / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert mapped[-1:] == b"b"
        assert set(b"".join(iter(lambda: old.read(1 << 20), b""))) == {ord("a")}


@needs_fuse
def test_programs_can_work_in_it(serving):
    mirror, shown = serving()
    program = Path(sys.executable).resolve()
    shutil.copy2(program, shown / "copy")
    assert (mirror / "copy").read_bytes() == program.read_bytes()
    commands = "mkdir a; echo 1 > a/x; echo 2 >> a/x; touch a/x; mv a b; cp -p b/x y; rm -r b; truncate -s 3 y"
    subprocess.run(["/bin/sh", "-ec", commands], cwd=shown, check=True)
    assert content(mirror).keys() == {"copy", "y"} and (mirror / "y").read_bytes() == b"1\n2"
    assert shutil.disk_usage(shown).total == shutil.disk_usage(mirror).total
    with pytest.raises(OSError):
        (shown / "link").symlink_to("y")


@needs_fuse
def test_what_is_read_only_refuses_every_change(serving):
    mirror, shown = serving(kind="ro")
    (mirror / "x").write_bytes(b"1")
    changes = [
        lambda: (shown / "new").write_bytes(b""),
        lambda: (shown / "x").write_bytes(b""),
        lambda: os.truncate(shown / "x", 0),
        lambda: (shown / "x").unlink(),
        lambda: (shown / "x").rename(shown / "y"),
        lambda: (shown / "d").mkdir(),
        lambda: shown.rmdir(),
    ]
    for change in changes:
        with pytest.raises(OSError) as refused:
            change()
        assert refused.value.errno == errno.EROFS
    assert content(mirror) == {"x": b"1"} == content(shown)


@pytest.fixture
def settings(moto_bucket):
    return replace(BucketSettings.from_env(moto_bucket.environ), url=f"s3://{moto_bucket.name}/run")


@needs_fuse
def test_an_upload_waits_for_the_last_close_and_fsync_does_not_hasten_it(serving, settings):
    mirror, shown = serving()
    mount = LiveMount(settings, mirror, writable=True, lag=Lag(0, 0))
    mount.fill()
    bucket = Bucket(settings)
    with (shown / "x").open("wb", buffering=0) as first, (shown / "x").open("ab", buffering=0) as second:
        first.write(b"half")
        os.fsync(first.fileno())
        for _ in range(3):
            mount.step()
        first.close()
        for _ in range(3):
            mount.step()
        assert bucket.list("") == []
        second.write(b" and half")

    def uploaded():  # the kernel tells of a close a moment after it
        mount.step()
        return bucket.list("") == ["x"]

    eventually(uploaded)
    assert bucket.get("x") == b"half and half"
    with (shown / "x").open("r+b", buffering=0) as file:
        file.write(b"HALF")
        for _ in range(3):
            mount.step()
        assert bucket.get("x") == b"half and half"  # neither half written nor taken for removed
        mount.flush()  # the Job is over, whatever it had open
    assert bucket.get("x") == b"HALF and half"


@needs_fuse
def test_a_removed_file_is_gone_here_at_once_and_elsewhere_later(serving, settings):
    bucket = Bucket(settings)
    bucket.put("d/x", b"1")
    sides = []
    for name in ("one", "two"):
        mirror, shown = serving(name, listing_s=0)
        mount = LiveMount(settings, mirror, writable=True, lag=Lag(0, 0))
        mount.fill()
        sides.append((mount, shown))
    (one, here), (two, there) = sides
    (here / "d" / "x").unlink()
    assert content(here) == {}
    two.step()
    assert bucket.list("") == ["d/x"] and content(there) == {"d/x": b"1"}  # queued
    one.step()
    assert bucket.list("") == [] and content(there) == {"d/x": b"1"}
    two.step()
    assert names(there) == []  # a directory that is empty vanishes with its last file


@needs_fuse
def test_a_renamed_directory_comes_in_pieces(serving, settings):
    """Whole files in any mixture: the bucket knows no rename."""
    mirror, here = serving("one")
    one = LiveMount(settings, mirror, writable=True, lag=Lag(0, 0))
    one.fill()
    parts = ("config", "tensors", "manifest")
    (here / "new").mkdir()
    for name in parts:
        (here / "new" / name).write_bytes(name.encode() * 100)
    one.flush()
    mirror, there = serving("two", missing_s=0, listing_s=0)
    two = LiveMount(settings, mirror, writable=False, lag=Lag(5, 0), seed=3, clock=count().__next__)
    two.fill()
    (here / "new").rename(here / "v1")
    assert names(here) == ["v1"] and names(here / "v1") == sorted(parts)
    one.flush()
    whole = {f"{folder}/{name}": name.encode() * 100 for folder in ("new", "v1") for name in parts}
    seen = set()

    def arrived():
        shown = content(there)
        assert shown.items() <= whole.items()
        seen.add(frozenset(shown))
        two.step()
        return shown.keys() == {f"v1/{name}" for name in parts}

    eventually(arrived)
    assert len(seen) > 2


@needs_fuse
def test_a_mount_whose_process_was_killed_is_taken_away_all_the_same(tmp_path):
    server = FuseServer(tmp_path / "mirrors", tmp_path / "shown", Lag())
    server.start()
    server.wait()
    assert mounted_at(server.target) == ["fuse"]
    server.process.kill()
    server.process.wait()
    with pytest.raises(OSError) as dead:
        names(server.target)
    assert dead.value.errno == errno.ENOTCONN
    server.stop()
    assert mounted_at(server.target) == [] and names(server.target) == []


@needs_fuse
def test_a_mount_in_use_is_taken_away_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(fuse, "STOP_S", 0.1)
    server = FuseServer(tmp_path / "mirrors", tmp_path / "shown", Lag())
    server.start()
    server.wait()
    (server.source / "x").write_bytes(b"1")
    file = os.open(server.target / "x", os.O_RDONLY)
    server.stop()
    assert mounted_at(server.target) == []
    with pytest.raises(OSError):
        os.close(file)


@needs_fuse
def test_a_server_that_ends_before_it_listens_is_no_mount(tmp_path, monkeypatch):
    monkeypatch.setattr(fuse.sys, "executable", "/bin/false")
    server = FuseServer(tmp_path / "mirrors", tmp_path / "shown", Lag())
    server.start()
    with pytest.raises(fuse.NoFuse, match="the process ended with status 1"):
        server.wait()


@needs_fuse
def test_a_server_that_never_listens_is_no_mount(tmp_path, monkeypatch):
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(fuse.sys, "executable", str(hanging))
    monkeypatch.setattr(fuse, "START_S", 0.2)
    server = FuseServer(tmp_path / "mirrors", tmp_path / "shown", Lag())
    server.start()
    with pytest.raises(fuse.NoFuse, match="nothing was mounted within 0 s"):
        server.wait()
    assert server.process.poll() is not None


READ = ["/bin/sh", "-c", "cat /data/x; stat -f -c %T /data; echo answer > /data/y"]


def volume_of(emulator):
    Bucket(emulator.bucket).put("x", b"from the bucket\n")
    api = HfApi(endpoint=emulator.endpoint, token=emulator.token)
    volume = Volume(type="bucket", source="local/asyncgrpo", mount_path="/data")
    job = api.run_job(image="x", command=READ, volumes=[volume], namespace="local")
    said = [line.strip() for line in api.fetch_job_logs(job_id=job.id, namespace="local", follow=True)]
    eventually(lambda: api.inspect_job(job_id=job.id, namespace="local").status.stage == "COMPLETED")
    assert Bucket(emulator.bucket).get("y") == b"answer\n"
    return said[-2:]


@needs_fuse
def test_a_jobs_volume_is_a_mount():
    with Emulator() as emulator:
        assert emulator.mounts == "FUSE"
        assert volume_of(emulator) == ["from the bucket", "fuseblk"]
        assert mounted_at(emulator.root / "mounts") == ["fuse"]
        eventually(lambda: not list((emulator.root / "mirrors" / "rw").iterdir()))
        assert emulator.orphans() == []
    assert mounted_at(emulator.root / "mounts") == [] and not emulator.root.exists()


def test_without_fuse_it_is_a_mirror_that_says_so(monkeypatch):
    monkeypatch.setattr(fuse, "DEVICE", Path("/dev/no-fuse"))
    with Emulator() as emulator:
        assert emulator.mounts == "mirrors: no /dev/no-fuse for this user"
        said = volume_of(emulator)
        assert said[0] == "from the bucket" and said[1] != "fuseblk"


@needs_fuse
def test_where_mounting_fails_it_is_a_mirror_too(monkeypatch):
    monkeypatch.setenv("FUSE_LIBRARY_PATH", "/no/libfuse3.so")
    with Emulator() as emulator:
        assert emulator.mounts.startswith("mirrors: /no/libfuse3.so: cannot open")
        assert volume_of(emulator)[0] == "from the bucket"
