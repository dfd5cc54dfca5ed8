"""What a Job's process sees: its command, environment and paths, computed from the specification. No processes here.

A Job's image is not run; a table maps it to a Python interpreter of this machine. Its environment is made from nothing,
so that whatever works here does not work by virtue of something the host happened to have.

Two things a container gives and a local process cannot have everywhere are made by agreement:

- *Mount paths.* A volume asked for at `/data` is a directory of the Job. Every mention of that path in the command,
  arguments and environment is rewritten to it: `/data/x`, `--out=/data`, `bash -c 'ls /data'`, but not `s3://a/data`.
- *Ports.* Two Jobs may both expose port 8000. Where the machine allows it, each has all ports for itself (see
  `emulator.own_ports`), and nothing is replaced. Elsewhere each has a local port for it, by which the number is
  replaced where a command or variable says it: `--port 8000`, `http.server 8000`, `0.0.0.0:8000`, `PORT=8000`, but not
  `--max-len 8000` or `other.host:8000`. A program may read `ASYNCGRPO_BIND_8000` ("host:port") instead. One that
  listens on 8000 without saying so anywhere is found all the same, if it is the first (see `emulator.ports`).
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path

from emulator.jobs_state import JobSpec
from emulator.reaper import MARK
from jobs.errors import ConfigError

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of the official Debian images."""
PYTHONS = ("python", "python3")


@dataclass(frozen=True)
class Image:
    """What stands in for a container image: an interpreter and variables the image would set."""

    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)


IMAGES: dict[str, Image] = {"*": Image()}
"""Pattern of an image's name -> what stands in for it; the first that matches counts. Everything that runs here needs
this program's own packages (vLLM, TRL), so one interpreter serves all that `--image` does not name."""


def image_table(entries: Iterable[str], environment: Mapping[str, str]) -> dict[str, Image]:
    """The table that a user's entries "PATTERN=PYTHON" make, before the one for all other images.

    `environment` is what every image sets.

    Raises:
        ConfigError: an entry is none, or names no program that can be run.
    """
    images: dict[str, Image] = {}
    for entry in entries:
        pattern, _, named = entry.partition("=")
        if not pattern or not named:
            raise ConfigError(f"--image {entry!r}: expected PATTERN=PYTHON, such as 'python:*=venv/bin/python'.")
        python = Path(named).absolute()  # links are kept: a virtual environment is found from where its link lies
        if not python.is_file():
            raise ConfigError(f"--image {entry!r}: there is no file {python}. Give the path of a Python interpreter.")
        if not os.access(python, os.X_OK):
            raise ConfigError(f"--image {entry!r}: {python} cannot be run. Give the path of a Python interpreter.")
        images.setdefault(pattern, Image(str(python), environment))
    for pattern, image in IMAGES.items():
        images.setdefault(pattern, replace(image, environment=environment))
    return images


def find_image(name: str, images: Mapping[str, Image]) -> Image | None:
    """The stand-in for an image, by the first pattern that matches its name, or None."""
    return next((image for pattern, image in images.items() if fnmatch(name, pattern)), None)


def rewrite(text: str, mounts: Mapping[str, str]) -> str:
    """Replace each mount path in `text`, where it stands as a whole path or leads one, by its local directory."""
    for mount, local in sorted(mounts.items(), key=lambda pair: -len(pair[0])):
        text = re.sub(rf"(?<![\w./-]){re.escape(mount)}(?![\w.-])", local.replace("\\", r"\\"), text)
    return text


def rebind(words: str, binds: Mapping[int, str]) -> str:
    """Replace each exposed port in `words` by the Job's local one, where it may be a port of its own.

    `words` is a text, or a command line whose words are joined by NUL.
    """
    for port, bind in binds.items():
        local = bind.rpartition(":")[2]

        def replaced(match: re.Match[str], local: str = local) -> str:
            elsewhere = match["host"] is not None and match["host"] not in OWN_HOSTS
            other = (
                match["option"] is not None and "port" not in match["option"] and not match["option"].startswith("-p")
            )
            return match[0] if elsewhere or other else f"{match[0].removesuffix(match['port'])}{local}"

        words = re.sub(rf"{_OPTION}{_HOST}(?<![\w.-])(?P<port>{port})(?![\w.-])", replaced, words)
    return words


OWN_HOSTS = ("", "0.0.0.0", "127.0.0.1", "localhost", "*", "]")
"""Hosts, before a colon and a port, by which a Job means itself; the last ends an IPv6 address."""
_OPTION = r"(?P<option>(?<![\w-])--?[\w-]+[=\s\0])?"
_HOST = r"(?:(?P<host>[\w.\]*-]*):)?"


@dataclass(frozen=True)
class Places:
    """The directories of one Job, all below `root` and gone with it."""

    root: Path

    @property
    def work(self) -> Path:
        """Where the command starts."""
        return self.root / "work"

    @property
    def home(self) -> Path:
        """HOME: caches and configuration of the Job, empty at the start."""
        return self.root / "home"

    @property
    def tmp(self) -> Path:
        """TMPDIR."""
        return self.root / "tmp"

    @property
    def bin(self) -> Path:
        """First on PATH: `python` is the image's interpreter."""
        return self.root / "bin"

    def make(self, image: Image) -> None:
        """Create them. `python` is a script rather than a link: a virtual environment is found from the real path."""
        for directory in (self.work, self.home, self.tmp, self.bin):
            directory.mkdir(parents=True)
        for name in PYTHONS:
            script = self.bin / name
            script.write_text(f'#!/bin/sh\nexec {shlex.quote(image.python)} "$@"\n')
            script.chmod(0o755)


def command(spec: JobSpec, image: Image, mounts: Mapping[str, str], binds: Mapping[int, str]) -> list[str]:
    """The command line to start: `python` is the image's interpreter, mount paths and exposed ports are local."""
    line = rebind("\0".join((*spec.command, *spec.arguments)), binds)
    words = [rewrite(word, mounts) for word in line.split("\0")]
    return [image.python if re.fullmatch(r"python(3(\.\d+)?)?", words[0]) else words[0], *words[1:]]


def _variable(name: str, value: str, binds: Mapping[int, str]) -> str:
    """A variable's value with local ports: a number alone is a port only if the variable's name says so."""
    return rebind(value, binds) if "PORT" in name.upper() or not value.isdecimal() else value


def environment(
    spec: JobSpec,
    job_id: str,
    image: Image,
    places: Places,
    mounts: Mapping[str, str],
    binds: Mapping[int, str],
    devices: tuple[str, ...],
    mark: str,
) -> dict[str, str]:
    """The whole environment of the Job's process. Nothing comes from the emulator's own.

    `binds` maps an exposed port to the "host:port" to bind instead; `devices` are the CUDA devices the Job holds.
    The variables JOB_ID, ACCELERATOR, CPU_CORES and MEMORY are the Hub's own; a Job cannot replace them.
    """
    flavor = spec.flavor
    variables = {
        "PATH": f"{places.bin}:{Path(image.python).parent}:{SYSTEM_PATH}",
        "LANG": "C.UTF-8",
        "HOME": str(places.home),
        "TMPDIR": str(places.tmp),
        "PWD": str(places.work),
        "PYTHONUNBUFFERED": "1",  # lines reach the log when they are printed, as from a container's runtime
        **image.environment,
        **{name: _variable(name, rewrite(value, mounts), binds) for name, value in spec.environment.items()},
        **spec.secrets,
        "JOB_ID": job_id,
        "ACCELERATOR": flavor.name if flavor.accelerator else "",
        "CPU_CORES": str(flavor.cpus),
        "MEMORY": f"{flavor.memory_gb}Gi",
        # A GPU Job on a machine without GPUs, and a CPU Job anywhere, see none.
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        MARK: mark,
    }
    variables |= {f"ASYNCGRPO_BIND_{port}": bind for port, bind in binds.items()}
    return variables
