"""Make asyncgrpo.pyz: one file that runs on Python 3.11 to 3.13 with nothing installed.

Usage: python tools/make_pyz.py [FILE]        dist/asyncgrpo.pyz by default

Made twice from the same sources it is the same file, byte for byte: no times, no owners, no order of a file system.
"""

import hashlib
import io
import os
import re
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


def make(target: Path) -> None:
    """Write the archive to `target`, whole or not at all, and not when it would stay the same: it may be in use."""
    entries = {"app.tar.xz": pack(app_files()), **packed()}
    sha256 = {name: hashlib.sha256(content).hexdigest() for name, content in entries.items()}
    bootstrap = (ROOT / "tools" / "bootstrap.py").read_text()
    bootstrap, filled = re.subn(r"(?m)^(SHA256: .* = ).*$", lambda line: f"{line[1]}{sha256}", bootstrap)
    assert filled == 1
    made = io.BytesIO(SHEBANG)
    made.seek(0, io.SEEK_END)
    with zipfile.ZipFile(made, "a") as archive:
        for name, content in {"__main__.py": bootstrap.encode(), **entries}.items():
            entry = zipfile.ZipInfo(name, TIME)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    if target.is_file() and target.read_bytes() == made.getvalue():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.write_bytes(made.getvalue())
    partial.chmod(0o755)
    partial.replace(target)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist" / "asyncgrpo.pyz")
