"""Make asyncgrpo.pyz: one file that runs on Python 3.11 to 3.13 with nothing installed.

Usage: python tools/make_pyz.py [FILE]        dist/asyncgrpo.pyz by default

Made twice from the same sources it is the same file, byte for byte: no times, no owners, no order of a file system.
"""

import hashlib
import os
import sys
import zipfile
from pathlib import Path

from packages import ROOT, Files, pack, packed

TIME = (2020, 1, 1, 0, 0, 0)
SHEBANG = b"#!/usr/bin/env python3\n"


def app_files() -> Files:
    """Return the program's own files: code and data of asyncgrpo.py, jobs/ and emulator/."""
    paths = [ROOT / "asyncgrpo.py"]
    for package in ("jobs", "emulator"):
        paths += [path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in paths}


def digest(payloads: dict[str, bytes]) -> str:
    """Return 16 hex digits that stand for the names and contents of `payloads`."""
    total = hashlib.sha256()
    for name, content in sorted(payloads.items()):
        total.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return total.hexdigest()[:16]


def make(target: Path) -> None:
    """Write the archive to `target`, whole or not at all."""
    packages, app = packed(), {"app.tar.xz": pack(app_files())}
    bootstrap = (ROOT / "tools" / "bootstrap.py").read_text()
    bootstrap = bootstrap.replace("@APP_DIGEST@", digest(app)).replace("@PACKAGES_DIGEST@", digest(packages))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    with partial.open("wb") as file:
        file.write(SHEBANG)
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in {"__main__.py": bootstrap.encode(), **app, **packages}.items():
                entry = zipfile.ZipInfo(name, TIME)
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, content)
    partial.chmod(0o755)
    partial.replace(target)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist" / "asyncgrpo.pyz")
