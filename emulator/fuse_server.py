"""The volumes of an emulator's Jobs through FUSE, in a process of its own: `python -m emulator.fuse_server SETTINGS`.

It shows a directory of mirrors (see `live_mount`) at another place, with what a directory alone cannot do: a name that
was looked up and missing stays missing for a while, listings are older than what can be opened, a file is not uploaded
before it is closed, and what is read-only refuses writes. It prints a line once it is mounted, and ends when its
standard input does, which is when the emulator dies.

Paths are `/ro/<Job>/<volume>/...` or `/rw/<Job>/<volume>/...`.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from emulator import reaper
from jobs import bundle

READ_ONLY, WRITABLE = "ro", "rw"
"""First parts of paths."""
BEING_WRITTEN = stat.S_ISVTX
"""Mode bit of a file in the mirror that is open for writing: whoever uploads waits until it is gone."""
_STAT = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_blksize")
_TIMES = ("st_atime", "st_mtime", "st_ctime")
_STATVFS = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_namemax")


class Listings:
    """Directory listings that are up to `stale_s` old, but for what this mount itself made or removed."""

    def __init__(self, stale_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stale_s = stale_s
        self._clock = clock
        self._kept: dict[str, tuple[float, set[str]]] = {}

    def names(self, path: str, read: Callable[[], Iterable[str]]) -> list[str]:
        """The names in a directory, by `read` if there is no listing that is young enough."""
        now = self._clock()
        self._kept = {path: kept for path, kept in self._kept.items() if now - kept[0] < self._stale_s}
        if path not in self._kept:
            self._kept[path] = now, set(read())
        return sorted(self._kept[path][1])

    def made(self, path: str) -> None:
        """This mount made something at `path`."""
        directory, _, name = path.rpartition("/")
        if directory in self._kept:
            self._kept[directory][1].add(name)

    def removed(self, path: str) -> None:
        """This mount removed what was at `path`, and all below it."""
        directory, _, name = path.rpartition("/")
        if directory in self._kept:
            self._kept[directory][1].discard(name)
        self._kept = {kept: listing for kept, listing in self._kept.items() if not f"{kept}/".startswith(f"{path}/")}


class Filesystem:
    """What the kernel asks, answered from the directory `source`: mfusepy's operations, of one thread.

    A bucket keeps bytes: modes, owners and times that are set, links and extended attributes are not for it. Raises
    OSError, which becomes the asker's.
    """

    use_ns = True
    """Times are in nanoseconds."""

    def __init__(self, source: Path, listings: Listings, mounted: Callable[[], None]) -> None:
        self._source = source
        self._listings = listings
        self._mounted = mounted
        self._writers: Counter[int] = Counter()
        """Inode of a file -> how often it is open for writing."""

    def init(self, path: str) -> None:
        """The kernel has made the mount."""
        self._mounted()

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        """lstat(2), or fstat(2) of an open file."""
        found = self._at(path).lstat() if fh is None else os.fstat(fh)
        answer = {name: getattr(found, name) for name in _STAT}
        answer |= {name: getattr(found, f"{name}_ns") for name in _TIMES}
        answer["st_mode"] &= ~BEING_WRITTEN
        return answer

    def statfs(self, path: str) -> dict[str, int]:
        """statvfs(3)."""
        found = os.statvfs(self._at(path))
        return {name: getattr(found, name) for name in _STATVFS}

    def readdir(self, path: str, fh: int) -> list[str]:
        """A directory's names, perhaps of a while ago."""
        return [".", "..", *self._listings.names(path.rstrip("/"), lambda: self._inside(path))]

    def open(self, path: str, flags: int) -> int:
        """open(2) of a file that is there."""
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return os.open(self._at(path), flags)
        return self._writing(os.open(self._to_change(path), flags))

    def create(self, path: str, mode: int, flags: int) -> int:
        """open(2) of one that may not be there."""
        fh = self._writing(os.open(self._to_change(path), flags | os.O_CREAT, 0o644))
        self._listings.made(path)
        return fh

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """pread(2)."""
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        """pwrite(2)."""
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        """truncate(2) or ftruncate(2)."""
        os.truncate(self._to_change(path) if fh is None else fh, length)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        """Nothing: the upload waits for its turn all the same."""
        return 0

    def release(self, path: str, fh: int) -> int:
        """The last close(2): now the file may be uploaded."""
        found = os.fstat(fh)
        if self._writers[found.st_ino] > 1:
            self._writers[found.st_ino] -= 1
        elif self._writers.pop(found.st_ino, 0):
            os.fchmod(fh, stat.S_IMODE(found.st_mode) & ~BEING_WRITTEN)
        os.close(fh)
        return 0

    def unlink(self, path: str) -> int:
        """unlink(2)."""
        self._to_change(path).unlink()
        self._listings.removed(path)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        """mkdir(2). Only this mount knows of it while it is empty."""
        self._to_change(path).mkdir()
        self._listings.made(path)
        return 0

    def rmdir(self, path: str) -> int:
        """rmdir(2)."""
        self._to_change(path).rmdir()
        self._listings.removed(path)
        return 0

    def rename(self, old: str, new: str) -> int:
        """rename(2): at once here, and one file after the other in the bucket."""
        self._to_change(old).rename(self._to_change(new))
        self._listings.removed(old)
        self._listings.removed(new)
        self._listings.made(new)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        """Nothing."""
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        """Nothing."""
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        """Nothing."""
        return 0

    def _at(self, path: str) -> Path:
        return self._source / path[1:]

    def _to_change(self, path: str) -> Path:
        """Raises OSError for what is read-only."""
        if path.split("/")[1] != WRITABLE:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return self._at(path)

    def _inside(self, path: str) -> list[str]:
        return [entry.name for entry in self._at(path).iterdir()]

    def _writing(self, fh: int) -> int:
        found = os.fstat(fh)
        self._writers[found.st_ino] += 1
        os.fchmod(fh, stat.S_IMODE(found.st_mode) | BEING_WRITTEN)
        return fh


def main() -> None:
    """Serve until standard input ends. If that cannot be, the last line on standard error says why.

    The settings are JSON with "source", "target", "missing_s" and "listing_s".
    """
    settings = json.loads(sys.argv[1])
    bundle.activate()
    try:
        import mfusepy
    except OSError as error:  # no libfuse
        sys.exit(str(error))

    def unmount_at_the_end() -> None:
        sys.stdin.read()
        reaper.unmount(settings["target"])  # ends the loop below

    def mounted() -> None:
        print("mounted", flush=True)  # noqa: T201
        threading.Thread(target=unmount_at_the_end, daemon=True).start()

    try:
        mfusepy.FUSE(
            Filesystem(Path(settings["source"]), Listings(settings["listing_s"]), mounted),
            settings["target"],
            foreground=True,
            nothreads=True,
            fsname="asyncgrpo",
            # A name that was missing is the kernel's to remember. Nothing else is: every look sees what has come.
            negative_timeout=settings["missing_s"],
            entry_timeout=0.0,
            attr_timeout=0.0,
            auto_cache=True,
        )
    except RuntimeError:  # libfuse has said why
        sys.exit(1)


if __name__ == "__main__":
    main()
