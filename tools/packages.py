"""The third-party packages that travel in asyncgrpo.pyz: downloads their wheels and packs what a run needs of them.

Usage: python tools/packages.py        looks up the wheels of requirements/bundle.txt and writes their hashes into it

Every supported interpreter gets its own compiled modules; what is the same for all of them is packed once.
"""

import hashlib
import io
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "bundle.txt"
CACHE = ROOT / "build"

TAGS = ("cp311", "cp312", "cp313")
MACHINE = "linux-x86_64"
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (34, 28, 17, 5)) + tuple(
    f"manylinux{year}_x86_64" for year in (2014, 2010, 1)
)
MOTO_KEPT = frozenset(
    {"cloudwatch", "core", "events", "iam", "moto_api", "moto_server", "s3", "s3bucket_path", "sts", "utilities"}
)
"""What moto's S3 server imports (found by importing it); the 180 other services stay out."""
BOTOCORE_KEPT = frozenset({"s3", "sts"})
UNUSED_SUFFIXES = frozenset({".pyi", ".pyx", ".pxd", ".pxi", ".c", ".h", ".typed"})
UNUSED_FOLDERS = frozenset({"test", "tests", "SelfTest"})
LICENCE = re.compile(r"(licen[cs]e|notice|authors|copying)", re.IGNORECASE)
"""Kept because we pass the packages on. Of the rest of a wheel's metadata only name and version are read."""
LZMA_PRESET = 3
"""Measured on this set: preset 6 takes 2.3 times as long and saves 11 %."""

Files = dict[str, bytes]


def pack(files: Files) -> bytes:
    """Return a .tar.xz of `files` (path: content) that depends on nothing else: no times, no owners, sorted."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        # Files alike side by side: compiled modules last, so that the compressor meets text among text.
        for path in sorted(files, key=lambda path: (path.endswith(".so"), path)):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(files[path]), 0o644
            archive.addfile(entry, io.BytesIO(files[path]))
    return lzma.compress(raw.getvalue(), preset=LZMA_PRESET)


def without_symbols(module: bytes) -> bytes:
    """Return a 64-bit little-endian ELF file cut after what the loader maps: no debug sections, no section table.

    The wheels' debug information is nine tenths of them (uvloop: 16.1 of 17.9 MB). `strip` would do the same but is
    not on every machine, and its output differs from release to release. Layout: elf(5), Elf64_Ehdr and Elf64_Phdr.
    """
    if module[:6] != b"\x7fELF\x02\x01":
        return module
    (table,) = struct.unpack_from("<Q", module, 32)
    entry_bytes, entries = struct.unpack_from("<HH", module, 54)
    end = table + entry_bytes * entries
    for number in range(entries):
        entry = table + number * entry_bytes
        (offset,) = struct.unpack_from("<Q", module, entry + 8)
        (size,) = struct.unpack_from("<Q", module, entry + 32)
        end = max(end, offset + size)
    cut = bytearray(module[:end])
    struct.pack_into("<Q", cut, 40, 0)
    struct.pack_into("<HHH", cut, 58, 0, 0, 0)
    return bytes(cut)


def is_needed(path: str) -> bool:
    """Return whether a wheel's file is of use at run time."""
    parts = path.split("/")
    if path.endswith("/") or UNUSED_FOLDERS & set(parts) or Path(path).suffix in UNUSED_SUFFIXES:
        return False
    if parts[0] == "moto":
        return len(parts) == 2 or parts[1] in MOTO_KEPT
    if path.startswith("botocore/data/"):
        return len(parts) == 3 or parts[2] in BOTOCORE_KEPT
    if parts[0].endswith(".dist-info"):  # name and version for importlib.metadata; licences because we pass them on
        return parts[1] == "METADATA" or bool(
            re.match(r"(licen[cs]e|notice|authors|copying)", parts[-1], re.IGNORECASE)
        )
    return not parts[0].endswith(".data")


def read_wheel(wheel: Path) -> Files:
    """Return the needed files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        files = {path: archive.read(path) for path in archive.namelist() if is_needed(path)}
    for path, content in files.items():
        if path.endswith(".dist-info/METADATA"):
            files[path] = content.partition(b"\n\n")[0] + b"\n"  # without the long description
        elif path.endswith(".so"):
            files[path] = without_symbols(content)
    return files


def download(directory: Path, tag: str) -> list[Path]:
    """Download the locked wheels for interpreter `tag`, such as "cp312", into `directory`; return their paths."""
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={tag[2]}.{tag[3:]}"]
    options += [f"--abi={abi}" for abi in (tag, "abi3", "none")] + [f"--platform={name}" for name in PLATFORMS]
    subprocess.run([*pip, *options, f"--requirement={LOCK}", f"--dest={directory}"], check=True, stdout=sys.stderr)
    return sorted(directory.glob("*.whl"))


def split(by_tag: dict[str, Files]) -> dict[str, Files]:
    """Return {"any": what is the same for every tag, "<tag>-<machine>": the rest of each}."""
    first, *others = by_tag.values()
    shared = {path: content for path, content in first.items() if all(other.get(path) == content for other in others)}
    rest = {
        f"{tag}-{MACHINE}": {path: content for path, content in files.items() if path not in shared}
        for tag, files in by_tag.items()
    }
    return {"any": shared, **rest}


def packed() -> dict[str, bytes]:
    """Return {"packages-any.tar.xz": ..., "packages-cp311-linux-x86_64.tar.xz": ..., ...}; made once per lock file."""
    key = hashlib.sha256(LOCK.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:16]
    done = CACHE / f"packages-{key}"
    if not done.is_dir():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            partial = Path(temporary) / "packed"
            partial.mkdir()
            with ThreadPoolExecutor() as pool:  # one waits for the network and for lzma, which lets other threads run
                found = pool.map(lambda tag: installed(Path(temporary) / tag, tag), TAGS)
                groups = split(dict(zip(TAGS, found, strict=True)))
                for group, content in zip(groups, pool.map(pack, groups.values()), strict=True):
                    (partial / f"packages-{group}.tar.xz").write_bytes(content)
            partial.rename(done)
    return {path.name: path.read_bytes() for path in sorted(done.iterdir())}


def installed(directory: Path, tag: str) -> Files:
    """Download what interpreter `tag` needs and return it as one folder of packages would hold it."""
    files: Files = {}
    for wheel in download(directory, tag):
        files |= read_wheel(wheel)
    return files


def lock() -> None:
    """Rewrite requirements/bundle.txt with the hashes of the wheels that its versions have for every tag."""
    text = LOCK.read_text()
    comment = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    pins = sorted(set(re.findall(r"^([\w.-]+==[\w.]+)", text, re.MULTILINE)))
    LOCK.write_text("\n".join(pins) + "\n")
    hashes: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for tag in TAGS:
            for wheel in download(Path(temporary) / tag, tag):
                name = re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()
                hashes.setdefault(name, set()).add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    lines = [
        " \\\n    ".join([pin, *(f"--hash=sha256:{h}" for h in sorted(hashes[pin.split("==")[0]]))]) for pin in pins
    ]
    LOCK.write_text(comment + "\n".join(lines) + "\n")


if __name__ == "__main__":
    lock()
