"""asyncgrpo.pyz on interpreters that have nothing installed, and jobs.bundle in a checkout."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import bundle

ROOT = Path(__file__).resolve().parent.parent
LIMIT_BYTES = 30_000_000
HELP_LIMIT_S = 0.5
TIMEOUT_S = 60
MAKE_TIMEOUT_S = 600
"""Downloads and packs the third-party packages where ./build.sh build has not done so before."""

COMPILED = """
import jobs
import multidict._multidict, yarl._quoting_c, frozenlist._frozenlist, propcache._helpers_c, aiohttp._http_parser
import httptools.parser.parser, uvloop.loop, yaml._yaml, markupsafe._speedups, _cffi_backend
import Crypto.Cipher.AES, cryptography.hazmat.bindings._rust, argon2
"""
S3 = """
import jobs, io
from minio import Minio
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
client = Minio(f"{host}:{port}", "key", "secret", secure=False, region="us-east-1")
client.make_bucket("bucket")
client.put_object("bucket", "a key", io.BytesIO(b"content"), 7)
print([each.object_name for each in client.list_objects("bucket")], client.get_object("bucket", "a key").read())
server.stop()
"""


def make(root: Path, target: Path) -> None:
    subprocess.run([sys.executable, root / "tools" / "make_pyz.py", target], check=True, timeout=MAKE_TIMEOUT_S)


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive, at a path with spaces and away from the sources."""
    target = tmp_path_factory.mktemp("a folder with spaces") / "asyncgrpo.pyz"
    make(ROOT, target)
    return target


def interpreters(minor: int) -> Iterator[Path]:
    """The machine's interpreters of Python 3.`minor`, whether they work or not."""
    if sys.version_info.minor == minor:
        yield Path(sys.executable)
    if found := shutil.which(f"python3.{minor}"):
        yield Path(found)
    yield from sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3"))


class Machine:
    """A bare Python 3.`minor`: nothing installed, nothing in the environment, a home that cannot be written."""

    def __init__(self, folder: Path, minor: int) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        for each in interpreters(minor):
            made = subprocess.run(
                [each, "-m", "venv", "--without-pip", folder / "venv"], capture_output=True, timeout=TIMEOUT_S
            )
            if made.returncode == 0:
                break
        else:
            pytest.skip(f"no Python 3.{minor} here")
        (folder / "home").write_text("a file, so that nothing can be made below it even by root")
        (folder / "tmp").mkdir()
        self.environ = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
        self.environ["PYTHONWARNINGS"] = "error"

    def start(self, *args: str | Path, **environ: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [self.python, *args],
            env={**self.environ, **environ},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str | Path, **environ: str) -> str:
        """Run the interpreter with `args` and return what it printed; it must succeed and say nothing on stderr."""
        process = self.start(*args, **environ)
        out, err = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, err) == (0, "")
        return out

    @property
    def program(self) -> Path:
        """The folder of the unpacked program."""
        (found,) = (self.folder / "tmp").glob("asyncgrpo-program-*/app-*")
        return found


@pytest.fixture(scope="module", params=[11, 12, 13])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pyz: Path) -> Machine:
    """A bare interpreter on which the archive was started once."""
    bare = Machine(tmp_path_factory.mktemp("machine"), request.param)
    assert bare.run(pyz, "--version") == "asyncgrpo, version 0.1.0\n"
    return bare


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A bare interpreter of the oldest supported version, on which nothing was started."""
    return Machine(tmp_path_factory.mktemp("oldest"), 11)


def test_small_enough(pyz: Path) -> None:
    assert pyz.stat().st_size <= LIMIT_BYTES


def test_same_sources_give_the_same_file(pyz: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    for folder in ("jobs", "emulator", "tools", "requirements", "build"):
        shutil.copytree(
            ROOT / folder, copy / folder, copy_function=shutil.copyfile, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copyfile(ROOT / "asyncgrpo.py", copy / "asyncgrpo.py")
    (copy / "asyncgrpo.py").chmod(0o600)
    make(copy, copy / "second.pyz")
    assert (copy / "second.pyz").read_bytes() == pyz.read_bytes()


def test_help_starts_fast(machine: Machine, pyz: Path) -> None:
    times_s = []
    for _ in range(5):
        began_s = time.monotonic()
        assert "Usage: asyncgrpo" in machine.run(pyz, "--help")
        times_s.append(time.monotonic() - began_s)
    assert min(times_s) <= HELP_LIMIT_S


def test_isolated_mode_and_packaged_data(machine: Machine, pyz: Path) -> None:
    assert "[trainer]" in machine.run("-I", pyz, "recipes", "digit")


def test_compiled_packages_load(machine: Machine) -> None:
    machine.run("-c", COMPILED, PYTHONPATH=str(machine.program))


def test_the_emulator_s_bucket_works(machine: Machine) -> None:
    process = machine.start("-c", S3, PYTHONPATH=str(machine.program))
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert out == "['a key'] b'content'\n", err


def test_program_starts_itself_again(machine: Machine) -> None:
    code = "import subprocess; from jobs import bundle; subprocess.run(bundle.command('--version'), check=True)"
    assert machine.run("-c", code, PYTHONPATH=str(machine.program)) == "asyncgrpo, version 0.1.0\n"


def test_packages_of_the_environment_win(machine: Machine) -> None:
    code = "import jobs, six; print(six.__file__)"
    assert machine.run("-c", code, PYTHONPATH=str(machine.program)).startswith(str(machine.program / "bundled"))
    (installed,) = (machine.folder / "venv" / "lib").glob("python3.*/site-packages")
    (installed / "six.py").write_text("")
    try:
        assert machine.run("-c", code, PYTHONPATH=str(machine.program)).strip() == str(installed / "six.py")
    finally:
        (installed / "six.py").unlink()


def test_every_command_explains_itself(machine: Machine, pyz: Path) -> None:
    from asyncgrpo import main

    for name in main.commands:
        assert f"Usage: asyncgrpo {name}" in machine.run(pyz, name, "--help")


def test_twenty_first_starts_at_once(oldest: Machine, pyz: Path, tmp_path: Path) -> None:
    cache = tmp_path / "program"
    cache.mkdir(mode=0o700)
    (cache / "partial-killed").mkdir()
    starts = [oldest.start(pyz, "--version", ASYNCGRPO_CACHE=str(tmp_path)) for _ in range(20)]
    assert {(*start.communicate(timeout=TIMEOUT_S), start.returncode) for start in starts} == {
        ("asyncgrpo, version 0.1.0\n", "", 0)
    }
    assert sorted(each.name.partition("-")[0] for each in cache.iterdir()) == ["app", "lock", "packages"]
    assert {each.stat().st_mode & 0o077 for each in cache.iterdir() if each.is_dir()} == {0}


def test_a_folder_that_others_can_write_is_not_used(oldest: Machine, pyz: Path, tmp_path: Path) -> None:
    cache = tmp_path / "program"
    cache.mkdir()
    cache.chmod(0o777)
    (tmp_path / "home").mkdir()
    assert "asyncgrpo" in oldest.run(pyz, "--version", ASYNCGRPO_CACHE=str(tmp_path), HOME=str(tmp_path / "home"))
    assert not list(cache.iterdir())
    assert list((tmp_path / "home").glob(".cache/asyncgrpo/program/app-*"))


def test_no_folder_at_all_is_said(oldest: Machine, pyz: Path) -> None:
    start = oldest.start(pyz, "--version", TMPDIR=str(oldest.folder / "home"))
    out, err = start.communicate(timeout=TIMEOUT_S)
    assert (start.returncode, out) == (1, "")
    assert "set ASYNCGRPO_CACHE" in err


def test_a_damaged_archive_is_said(oldest: Machine, pyz: Path, tmp_path: Path) -> None:
    content = bytearray(pyz.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "damaged.pyz").write_bytes(content)
    start = oldest.start(tmp_path / "damaged.pyz", "--version", ASYNCGRPO_CACHE=str(tmp_path))
    out, err = start.communicate(timeout=TIMEOUT_S)
    assert (start.returncode, out) == (1, "")
    assert "is damaged or was just replaced" in err
    assert [each.name for each in (tmp_path / "program").iterdir()] == ["lock"]


@pytest.mark.parametrize("minor", [8, 9, 10])
def test_an_older_python_is_refused(pyz: Path, tmp_path: Path, minor: int) -> None:
    old = Machine(tmp_path, minor)
    start = old.start(pyz)
    assert "needs Python 3.11 or newer" in start.communicate(timeout=TIMEOUT_S)[1]
    assert start.returncode == 1


def test_a_checkout_has_nothing_to_activate() -> None:
    before = list(sys.path)
    bundle.activate()
    assert sys.path == before
    assert bundle.app_dir() == ROOT
    assert bundle.archive() is None
    assert bundle.command("role", "proxy") == [sys.executable, str(ROOT / "asyncgrpo.py"), "role", "proxy"]


def test_wheels_are_reduced_to_what_runs() -> None:
    from packages import is_needed, pack, split

    assert is_needed("moto/s3/models.py") and not is_needed("moto/ec2/models.py")
    assert is_needed("botocore/data/s3/2006-03-01/service-2.json.gz") and not is_needed(
        "botocore/data/ec2/service-2.json"
    )
    assert is_needed("six-1.17.0.dist-info/licenses/LICENSE") and not is_needed("six-1.17.0.dist-info/RECORD")
    assert not is_needed("Crypto/SelfTest/__init__.py")
    parts = split({"cp311": {"a.py": b"1", "c.so": b"11"}, "cp312": {"a.py": b"1", "c.so": b"12"}})
    assert parts == {
        "any": {"a.py": b"1"},
        "cp311-linux-x86_64": {"c.so": b"11"},
        "cp312-linux-x86_64": {"c.so": b"12"},
    }
    assert pack({"a": b"1", "b": b"2"}) == pack({"b": b"2", "a": b"1"})


def test_bundled_versions_are_those_that_were_run() -> None:
    """What the archive carries is what the CPU environment, and so every other test, has."""

    def pins(name: str) -> set[str]:
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        return {
            re.sub(r"[-_.]+(?=.*==)", "-", line.removesuffix(" \\").lower()) for line in lines if re.match(r"\w", line)
        }

    assert len(pins("bundle.txt")) > 50
    assert pins("bundle.txt") <= pins("cpu.txt")
