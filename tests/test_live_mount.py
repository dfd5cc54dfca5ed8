import random
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator import live_mount
from emulator.live_mount import Arrivals, Lag, LiveMount
from jobs.bucket import Bucket, BucketSettings
from jobs.errors import BucketError, NotFound

PATHS = st.sampled_from(["a", "b", "d/c"])


def test_each_change_waits_for_its_own_time():
    delays = iter([3.0, 1.0, 2.0, 1.0])
    arrivals = Arrivals(lambda is_new: next(delays))
    assert arrivals.now({"a": "1"}, 0.0) == {}
    assert arrivals.now({"a": "1", "b": "1"}, 1.0) == {}
    assert arrivals.now({"a": "1", "b": "1"}, 2.0) == {"b": "1"}  # written later, seen first
    assert arrivals.now({"a": "2", "b": "1"}, 2.5) == {}  # overwritten before it was seen: waits anew
    assert arrivals.now({"a": "2", "b": "1"}, 4.5) == {"a": "2"}
    assert arrivals.now({"b": "1"}, 5.0) == {}
    assert arrivals.now({"b": "1"}, 6.0) == {"a": None}
    assert arrivals.shown == {"b": "1"}


@given(st.lists(st.dictionaries(PATHS, st.sampled_from("123")), max_size=10), st.integers(0, 99))
def test_in_the_end_it_shows_what_there_is(listings, seed):
    draw = random.Random(seed)
    arrivals = Arrivals(lambda is_new: draw.uniform(0, 3))
    shown = {}
    for at, listing in enumerate([*listings, *[listings[-1] if listings else {}] * 2]):
        at = at if at < len(listings) else at + 10
        for path, etag in arrivals.now(listing, float(at)).items():
            if etag is None:
                del shown[path]
            else:
                shown[path] = etag
        assert shown == arrivals.shown
    assert shown == (listings[-1] if listings else {})


def test_a_name_that_was_missing_stays_so_for_a_while_longer():
    asked = []
    arrivals = Arrivals(lambda is_new: asked.append(is_new) or 1.0)
    arrivals.now({"a": "1"}, 0.0)
    arrivals.now({"a": "1"}, 1.0)
    arrivals.now({"a": "2"}, 1.0)
    arrivals.now({}, 2.0)
    assert asked == [True, False, False]


@given(st.integers(0, 99))
def test_delays_keep_their_bounds(seed):
    draw = random.Random(seed)
    assert 0.5 <= Lag(2.5, 30).draw(draw, False) <= 4.5
    assert 0.5 <= Lag(2.5, 30).draw(draw, True) <= 34.5


@pytest.fixture
def settings(moto_bucket):
    return replace(BucketSettings.from_env(moto_bucket.environ), url=f"s3://{moto_bucket.name}/run")


def content(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_what_one_writes_the_other_sees(settings, tmp_path):
    Bucket(settings).put("there/before.txt", b"old")
    one = LiveMount(settings, tmp_path / "one", writable=True, lag=Lag(0, 0))
    two = LiveMount(settings, tmp_path / "two", writable=False, lag=Lag(0, 0))
    assert one.fill() == two.fill() == 1
    (one.directory / "v1").mkdir()
    (one.directory / "v1" / "x").write_bytes(b"12")
    one.step()
    two.step()
    assert "v1/x" not in content(two.directory)  # it may still be being written
    one.step()
    two.step()
    assert content(two.directory) == {"there/before.txt": b"old", "v1/x": b"12"}
    Bucket(settings).put("there/before.txt", b"new")
    (one.directory / "v1" / "x").unlink()
    for _ in range(2):
        one.step()
        two.step()
    assert content(one.directory) == content(two.directory) == {"there/before.txt": b"new"}
    assert not (two.directory / "v1").exists()  # the bucket has no empty directories


def test_a_writer_does_not_get_its_own_file_back_over_a_newer_one(settings, tmp_path):
    mount = LiveMount(settings, tmp_path / "m", writable=True, lag=Lag(0, 0))
    mount.fill()
    (mount.directory / "x").write_bytes(b"first")
    mount.step()
    mount.step()
    (mount.directory / "x").write_bytes(b"second")
    mount.step()
    assert content(mount.directory) == {"x": b"second"}
    mount.flush()
    assert Bucket(settings).get("x") == b"second"


def test_read_only_is_never_written_back(settings, tmp_path):
    mount = LiveMount(settings, tmp_path / "m", writable=False, lag=Lag(0, 0))
    mount.fill()
    (mount.directory / "x").write_bytes(b"lost")
    mount.step()
    mount.step()
    mount.flush()
    assert Bucket(settings).list("") == []


def test_what_vanishes_before_it_is_read_is_not_uploaded(settings, tmp_path, monkeypatch):
    mount = LiveMount(settings, tmp_path / "m", writable=True, lag=Lag(0, 0))
    mount.fill()
    monkeypatch.setattr(live_mount, "snapshot", lambda directory: {"gone": (1, 1)})
    mount.step()
    mount.step()
    mount.flush()
    assert Bucket(settings).list("") == []


def test_what_changes_while_it_is_copied_is_uploaded_when_it_is_finished(settings, tmp_path, monkeypatch):
    mount = LiveMount(settings, tmp_path / "m", writable=True, lag=Lag(0, 0))
    mount.fill()
    (mount.directory / "x").write_bytes(b"half")
    mount.step()
    copy = live_mount.shutil.copyfile

    def meanwhile(source, target):
        copy(source, target)
        source.write_bytes(b"half and half")

    with monkeypatch.context() as writing:
        writing.setattr(live_mount.shutil, "copyfile", meanwhile)
        mount.step()
    assert Bucket(settings).list("") == []
    mount.step()
    mount.step()
    assert Bucket(settings).get("x") == b"half and half"


def test_a_file_that_could_not_be_read_comes_later(settings, tmp_path, monkeypatch):
    mount = LiveMount(settings, tmp_path / "m", writable=False, lag=Lag(0, 0))
    mount.fill()
    Bucket(settings).put("x", b"1")
    with monkeypatch.context() as away:
        away.setattr(mount, "_show", lambda path: (_ for _ in ()).throw(BucketError("away")))
        with pytest.raises(BucketError):
            mount.step()
    mount.step()
    assert content(mount.directory) == {"x": b"1"}


def test_files_that_cannot_be_read_hold_back_no_others(settings, tmp_path, monkeypatch):
    mount = LiveMount(settings, tmp_path / "m", writable=False, lag=Lag(0, 0))
    mount.fill()
    for name in "abcdefgh":
        Bucket(settings).put(name, b"1")
    listed = mount._list()
    Bucket(settings).delete(list("aceg"))
    monkeypatch.setattr(mount, "_list", lambda: listed)  # they were deleted just after the listing
    with pytest.raises(NotFound):
        mount.step()
    assert content(mount.directory) == dict.fromkeys("bdfh", b"1")


def test_a_renamed_directory_comes_in_pieces(settings, tmp_path):
    """The Hub's bucket knows no rename: what another machine meets is any mixture of both names' whole files."""
    one = LiveMount(settings, tmp_path / "one", writable=True, lag=Lag(0, 0))
    one.fill()
    for name in ("config", "tensors", "manifest"):
        (one.directory / "new").mkdir(exist_ok=True)
        (one.directory / "new" / name).write_bytes(name.encode() * 100)
    two = LiveMount(settings, tmp_path / "two", writable=False, lag=Lag(5, 10), seed=3, clock=count().__next__)
    one.flush()
    two.fill()
    (one.directory / "new").rename(one.directory / "v1")
    one.flush()
    seen = set()
    whole = {
        f"{folder}/{name}": name.encode() * 100
        for folder in ("new", "v1")
        for name in ("config", "tensors", "manifest")
    }
    for _ in range(20):  # of the longest lag, 1.8 * 5 + 10
        shown = content(two.directory)
        assert shown.items() <= whole.items()
        seen.add(frozenset(shown))
        two.step()
    assert content(two.directory).keys() == {path for path in whole if path.startswith("v1")}
    assert len(seen) > 3


def test_lag_shows_old_and_new_together(settings, tmp_path):
    bucket = Bucket(settings)
    mount = LiveMount(settings, tmp_path / "m", writable=False, lag=Lag(1e6))
    mount.fill()
    for name in ("config", "tensors", "manifest"):
        bucket.put(name, b"x")
    mount.step()
    mount.step()
    assert content(mount.directory) == {}
