"""Small virtual environments in front of the tests' own."""

import sysconfig
import venv
from pathlib import Path


def environment(folder: Path, **claimed: str) -> Path:
    """Makes an environment that sees all packages of this one, and packages that claim a version: their metadata and
    nothing else. Returns its interpreter."""
    venv.EnvBuilder(symlinks=True).create(folder)
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    (own / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name, version in claimed.items():
        (own / name).mkdir()
        (own / name / "__init__.py").write_text("")
        metadata = own / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder / "bin" / "python"
