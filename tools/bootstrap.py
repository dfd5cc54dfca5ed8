"""The `__main__` of asyncgrpo.pyz: unpacks the program into a cache at its first start, then runs it from there.

Children, spawned processes and vLLM cannot import from inside a zip, and compiled modules cannot load from one, so the
program runs from a folder. The folder's name is the digest of its content, it appears whole (renamed into place) or
not at all, and it is used only if this user alone can write to it. Only the standard library is at hand here, and
the text must parse under any Python 3, to be able to say that it is too old.
"""

import os
import stat
import sys
from zipimport import zipimporter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

LOADER: zipimporter = globals()["__loader__"]
SHA256: "dict[str, str]" = {"what the archive holds": "its SHA-256; filled in by make_pyz.py"}
MINIMUM = (3, 11)
TAG = "cp%d%d" % sys.version_info[:2]


def cache_roots(environ: "Mapping[str, str]") -> "list[str]":
    """Return the folders to try, best first; the last one is for machines whose home cannot be written."""
    roots = []
    if environ.get("ASYNCGRPO_CACHE"):
        roots.append(os.path.join(environ["ASYNCGRPO_CACHE"], "program"))
    if environ.get("XDG_CACHE_HOME"):
        roots.append(os.path.join(environ["XDG_CACHE_HOME"], "asyncgrpo", "program"))
    else:
        home = os.path.expanduser("~")
        if os.path.isabs(home):
            caches = os.path.join("Library", "Caches") if sys.platform == "darwin" else ".cache"
            roots.append(os.path.join(home, caches, "asyncgrpo", "program"))
    temporary = environ.get("TMPDIR") or "/tmp"
    roots.append(os.path.join(temporary, "asyncgrpo-program-%d" % os.geteuid()))
    return [os.path.abspath(root) for root in roots]


def is_ours(folder: str) -> bool:
    """Return whether `folder` is a real folder of this user that nobody else can write to."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def entry(name: str) -> bytes:
    """Return an entry of the archive, checked: the file may be damaged, or replaced by a newer one at this moment."""
    import hashlib

    try:
        content = LOADER.get_data(os.path.join(LOADER.archive, name))
    except (ImportError, OSError):
        content = b""
    if hashlib.sha256(content).hexdigest() != SHA256[name]:
        sys.exit("asyncgrpo: %s is damaged or was just replaced: start it again." % LOADER.archive)
    return content


def unpack(root: str, name: str, wanted: "list[str]", link: "tuple[str, str] | None" = None) -> str:
    """Return the folder root/name, made from the archive's `wanted` .tar.xz entries unless it is there already.

    One process makes it, under a lock, while the others that start meanwhile wait. `link` is a symbolic link to add:
    (name, target). Raises OSError where `root` cannot be used.
    """
    folder = os.path.join(root, name)
    if is_ours(root) and is_ours(folder):
        return folder
    import fcntl
    import io
    import shutil
    import subprocess
    import tarfile
    import tempfile

    os.makedirs(root, mode=0o700, exist_ok=True)
    if not is_ours(root):
        raise OSError("%s is not this user's alone" % root)
    with open(os.path.join(root, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in os.listdir(root):
            if left.startswith("partial-"):  # of a process that was killed: nobody else is here while we hold the lock
                shutil.rmtree(os.path.join(root, left))
        if os.path.lexists(folder):
            if not is_ours(folder):
                raise OSError("%s is not this user's alone" % folder)
            return folder
        partial = tempfile.mkdtemp(prefix="partial-", dir=root)
        try:
            for payload in map(entry, wanted):
                with tarfile.open(fileobj=io.BytesIO(payload), mode="r:xz") as archive:
                    # Python 3.11.3 and older have no filters; later ones warn where none is chosen.
                    archive.extraction_filter = getattr(tarfile, "data_filter", None)
                    archive.extractall(partial)
            # Not left to the first imports: Python writes no bytecode under PYTHONDONTWRITEBYTECODE. Its name for
            # the source is corrected when it is imported, and the source never changes, so neither is checked.
            options = ["-q", "-j0", "--invalidation-mode=unchecked-hash"]
            subprocess.run([sys.executable, "-I", "-m", "compileall"] + options + [partial], stdout=sys.stderr)
            if link:
                os.symlink(link[1], os.path.join(partial, link[0]))
            os.rename(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder


def program() -> str:
    """Return the folder of the unpacked program, unpacked now if need be."""
    # For a machine or an interpreter that the archive has no compiled modules for, most packages work without.
    compiled = "packages-%s-%s-%s.tar.xz" % (TAG, sys.platform, os.uname().machine)
    wanted = [name for name in ("packages-any.tar.xz", compiled) if name in SHA256]
    packages = "-".join(["packages", TAG] + [SHA256[name][:12] for name in wanted])
    app = "app-%s-%s" % (SHA256["app.tar.xz"][:12], packages)  # it holds a link to them
    problems = []
    for root in cache_roots(os.environ):
        try:
            unpack(root, packages, wanted)
            return unpack(root, app, ["app.tar.xz"], ("bundled", os.path.join("..", packages)))
        except OSError as error:
            problems.append("%s: %s" % (root, error))
    sys.exit("asyncgrpo: found no folder to unpack into; set ASYNCGRPO_CACHE to one.\n  " + "\n  ".join(problems))


if sys.version_info < MINIMUM:
    sys.exit("asyncgrpo: needs Python %d.%d or newer; %s is %s." % (MINIMUM + (sys.executable, sys.version.split()[0])))

folder = program()
sys.path[:] = [folder] + [path for path in sys.path if path != LOADER.archive]
# What spawns a process looks here for the main module: it has to find the unpacked one.
__file__ = os.path.join(folder, "asyncgrpo.py")
__spec__ = None  # type: ignore[assignment]

from asyncgrpo import main  # noqa: E402

main(prog_name="asyncgrpo")
