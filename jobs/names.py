"""Names: the run, what TRL calls an adapter version, and what that version is called on the wire.

TRL counts `trl-policy-v1`, `-v2`, ... anew in each process. On the wire a version is `<run>.<attempt>.v<N>`, so that a
restarted or resumed trainer never meets an old adapter under a new name, and several runs can share a replica.
"""

import re
from dataclasses import dataclass

from jobs.errors import ConfigError

POLICY = "trl-policy"
"""The name TRL gives its adapter (`AsyncGRPOTrainer._lora_name`, TRL 1.14-1.16)."""

_RUN = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_WIRE = re.compile(r"([a-z0-9][a-z0-9-]{0,62})\.([1-9][0-9]{0,8})\.v([1-9][0-9]{0,8})")
_POLICY = re.compile(re.escape(POLICY) + r"-v([1-9][0-9]{0,8})")


@dataclass(frozen=True, order=True)
class WireName:
    """A version's name on the wire, taken apart."""

    run: str
    attempt: int
    version: int

    def __str__(self) -> str:
        return wire_name(self.run, self.attempt, self.version)


def wire_name(run: str, attempt: int, version: int) -> str:
    """`<run>.<attempt>.v<version>`."""
    return f"{run}.{attempt}.v{version}"


def parse_wire(name: str) -> WireName | None:
    """The parts of a wire name, or None if `name` is none."""
    match = _WIRE.fullmatch(name)
    return WireName(match[1], int(match[2]), int(match[3])) if match else None


def policy_name(version: int) -> str:
    """What TRL calls this version."""
    return f"{POLICY}-v{version}"


def parse_policy(name: str) -> int | None:
    """The version in TRL's name for it, or None if `name` is none."""
    match = _POLICY.fullmatch(name)
    return int(match[1]) if match else None


def check_run_name(name: str) -> str:
    """Returns `name` if it can be a run's name: it becomes part of bucket keys, model names and Job labels.

    Raises:
        ConfigError: with the allowed characters and length.
    """
    if not _RUN.fullmatch(name):
        raise ConfigError(
            f"run = {name!r}: a run's name has 1 to 63 characters of a-z, 0-9 and '-', and starts with a letter or a "
            "digit, since it becomes part of bucket keys, model names and Job labels. Choose another with --run."
        )
    return name
