"""Adapters on a replica's own disk: fetched by what their manifest says, or not at all.

An adapter's files stay for as long as its name can be asked for, since vLLM reads them again whenever it has evicted
the adapter, and its engine ends when they are gone by then (measured, vLLM 0.31). All engines of a Job share one store:
the weights go when the last engine has unloaded them; the manifest stays, and with it what the name stands for.
"""

import fcntl
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from jobs.errors import AsyncgrpoError, BucketError, ConfigError, NotFound
from jobs.manifest import Manifest, manifest_key
from jobs.names import parse_wire

log = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
WAIT_S = 5.0
"""How long a fetch waits for what is not visible yet, before whoever asked is told to ask again. Twice the lag of the
Hub's bucket (2.5 s)."""
POLL_S = 0.1
UNUSED_S = 60.0
"""How long weights are kept after the last engine unloaded them: an engine may still hold a request that was cancelled
just before, which takes it milliseconds to notice."""

T = TypeVar("T")


class AdapterNotVisible(AsyncgrpoError):
    """The adapter cannot be read now, but may be later: the bucket or the mount lags, throttles or does not answer."""


class AdapterRejected(AsyncgrpoError):
    """The adapter can never be right under this name: forged, damaged, or other than what the name stands for."""


class Source(Protocol):
    """Where adapters are published: a `Bucket`, or a directory that shows one."""

    def get(self, key: str) -> bytes:
        """Returns an object's bytes; raises BucketError."""

    def get_file(self, key: str, path: Path) -> None:
        """Writes an object's bytes to `path`; raises BucketError."""


class Mount:
    """A bucket mounted as a directory. What it shows may lag behind, be cut short, or come in another order."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, key: str) -> bytes:
        """The file's bytes, as far as the mount shows them.

        Raises:
            NotFound: it shows no such file.
            BucketError: the mount does not answer.
        """
        try:
            return (self.root / key).read_bytes()
        except FileNotFoundError as error:
            raise NotFound(key) from error
        except OSError as error:
            raise BucketError(f"get {key}: the mount at {self.root} failed: {error.strerror}") from error

    def get_file(self, key: str, path: Path) -> None:
        """Writes those bytes to `path`."""
        path.write_bytes(self.get(key))


@dataclass(frozen=True)
class Stored:
    """An adapter on this machine: `directory` holds the files of `manifest` and no others, all of them if it is
    `whole`."""

    directory: Path
    manifest: Manifest

    @property
    def whole(self) -> bool:
        """Whether its weights are there: they go when nobody uses them."""
        return all((self.directory / name).exists() for name in self.manifest.files)


class AdapterStore:
    """The adapters of one replica, below `root`. Thread-safe, and safe between processes that share `root`.

    `key` is the run's key, under which manifests are signed. `wait_s` bounds how long one call waits for what is not
    visible yet.
    """

    def __init__(self, root: Path, source: Source, key: str, wait_s: float = WAIT_S) -> None:
        self.root = root
        self.source = source
        self.wait_s = wait_s
        self._key = key
        self._using: dict[str, int] = {}
        self._unused_since: dict[str, float] = {}
        self._lock = threading.Lock()
        root.mkdir(parents=True, exist_ok=True)

    def fetch(self, wire: str, key: str) -> Stored:
        """Brings the adapter called `wire`, whose manifest is the bucket's object `key`, to this machine.

        An adapter that is here already is not read again; its manifest is, so that a name that came to mean something
        else is noticed. If the bucket is away then, the adapter that is here still is what the name stands for.

        Raises:
            AdapterNotVisible: not now; the same call may succeed later.
            AdapterRejected: never.
        """
        name = parse_wire(wire)
        if name is None:
            raise AdapterRejected(f"lora_name = {wire!r}: expected <run>.<attempt>.v<version>.")
        if key != manifest_key(name.run, name.attempt, name.version):
            raise AdapterRejected(f"lora_path = 'manifest:{key}' is not where the manifest of {wire} lies.")
        deadline = time.monotonic() + self.wait_s
        while True:
            try:
                return self._fetch(wire, key)
            except AdapterNotVisible as error:
                held = self.held(wire)
                if held is not None and held.whole:
                    log.warning("%s: using the copy that is here, for %s", wire, error)
                    return held
                if time.monotonic() + POLL_S > deadline:
                    raise
            time.sleep(POLL_S)

    def held(self, wire: str) -> Stored | None:
        """What `wire` stands for if it ever was on this machine, without asking anybody."""
        directory = self.root / wire
        try:
            return Stored(directory, Manifest.from_json((directory / MANIFEST_FILE).read_bytes()))
        except FileNotFoundError:
            return None

    def use(self, wire: str) -> None:
        """This engine may read the adapter's files from now on: they stay. To be called before `fetch`."""
        with self._lock:
            self._unused_since.pop(wire, None)
            if wire not in self._using:
                self._using[wire] = self._open(f".{wire}.used", fcntl.LOCK_SH)

    def release(self, wire: str, now: float) -> None:
        """This engine unloads the adapter; `now` is in s. Deletes the weights of what no engine of this replica has
        used for UNUSED_S: so long each keeps its lock. To be called before others learn of it, who may load it again.
        """
        with self._lock:
            if wire in self._using:
                self._unused_since.setdefault(wire, now)
            for each in [each for each, since in self._unused_since.items() if now - since >= UNUSED_S]:
                del self._unused_since[each]
                os.close(self._using.pop(each))
                self._delete(each)

    def _delete(self, wire: str) -> None:
        try:
            file = self._open(f".{wire}.used", fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another engine has it, and will delete it
            return
        try:
            for path in (self.root / wire).iterdir():
                if path.name != MANIFEST_FILE:
                    path.unlink()
        except FileNotFoundError:  # it never came
            pass
        finally:
            os.close(file)

    def _open(self, name: str, lock: int) -> int:
        """Takes a lock among threads and processes, for flock(2) belongs to the opened file: it is held until the
        descriptor is closed or the process ends, however it does. `.used` is shared by the engines that use an adapter.
        """
        file = os.open(self.root / name, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, lock)
        except BaseException:
            os.close(file)
            raise
        return file

    def _fetch(self, wire: str, key: str) -> Stored:
        manifest = self._manifest(wire, key)
        with self._locked(wire):
            held = self.held(wire)
            if held is not None and held.manifest.digest != manifest.digest:
                raise AdapterRejected(
                    f"{wire} stands for digest {held.manifest.digest[:12]} on this replica for ever, and its manifest "
                    f"now says {manifest.digest[:12]}. Publish other weights under another version."
                )
            return held if held is not None and held.whole else self._download(wire, key, manifest)

    def _manifest(self, wire: str, key: str) -> Manifest:
        data = self._visible(lambda: self.source.get(key))
        try:
            manifest = Manifest.from_json(data)
        except ConfigError as error:
            raise self._differs(f"{wire}: {error}") from error
        if not manifest.verify_signature(self._key):
            raise AdapterRejected(f"{wire}: its manifest is not signed with this run's key.")
        if manifest.wire_name != wire:
            raise AdapterRejected(f"{wire}: its manifest is that of {manifest.wire_name}.")
        return manifest

    def _download(self, wire: str, key: str, manifest: Manifest) -> Stored:
        prefix = key.rpartition("/")[0]
        staging = Path(tempfile.mkdtemp(prefix=f".{wire}.", dir=self.root))
        try:
            for name in manifest.files:
                self._visible(lambda name=name: self.source.get_file(f"{prefix}/{name}", staging / name))  # type: ignore[misc]
            try:
                manifest.verify_files(staging)
            except ConfigError as error:
                raise self._differs(str(error)) from error
            directory = self.root / wire
            if directory.exists():  # with the manifest that weights are fetched for again
                for name in manifest.files:
                    (staging / name).rename(directory / name)
            else:
                (staging / MANIFEST_FILE).write_bytes(manifest.to_json())
                staging.rename(directory)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return Stored(self.root / wire, manifest)

    def _visible(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except BucketError as error:
            raise AdapterNotVisible(str(error)) from error

    def _differs(self, message: str) -> AsyncgrpoError:
        """A mount shows files before all of their bytes are there; a bucket's object is whole or absent."""
        return AdapterNotVisible(message) if isinstance(self.source, Mount) else AdapterRejected(message)

    @contextmanager
    def _locked(self, wire: str) -> Iterator[None]:
        """One fetch of a name at a time."""
        file = self._open(f".{wire}.lock", fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(file)
