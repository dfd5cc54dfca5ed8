"""Which versions of TRL and vLLM this program was written for, how they differ, and whether one is among them."""

import re
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from jobs.errors import ConfigError


@dataclass(frozen=True)
class Trl:
    """What of one version of TRL `jobs.trl_patches` has to know (read in its sources, each run by the matrix)."""

    kernel_by_name: bool
    """It names FlashAttention-3 as transformers' attention implementation; later ones ask `kernels` for it."""
    asks_for_peak_flops: bool
    """It asks CUDA for the device's name, to know its peak."""
    triton_only: bool
    """It computes log-probabilities in Triton alone; those before and after also have plain torch."""


TRL = {
    "1.14.2": Trl(kernel_by_name=True, asks_for_peak_flops=False, triton_only=False),
    "1.15.0": Trl(kernel_by_name=True, asks_for_peak_flops=True, triton_only=True),
    "1.16.0": Trl(kernel_by_name=False, asks_for_peak_flops=True, triton_only=False),
}
"""The versions that `./build.sh test-matrix` trains with. Their asynchronous GRPO is experimental: others may differ in
anything that is patched."""

VLLM_FIRST, VLLM_LAST = (0, 22), (0, 31)
"""The range that TRL 1.16.0 names. Run here: 0.24.0 on H200s, 0.31.0 on CPUs."""
VLLM_RANGE = f"{VLLM_FIRST[0]}.{VLLM_FIRST[1]} to {VLLM_LAST[0]}.{VLLM_LAST[1]}"

_VLLM_IMAGE = re.compile(r"(?:docker\.io/)?vllm/vllm-openai(?:-[\w-]+)?:v(?P<version>\d+\.\d+[\w.]*)")


def check_trl(version: str | None, where: str = "the trainer's environment") -> Trl:
    """What is known of TRL's version that was found `where`.

    Raises:
        ConfigError: it is missing, or another one than these; names it and them.
    """
    if version is None:
        raise ConfigError(f"{where}: TRL is missing. Install one of trl {', '.join(TRL)}.")
    if version not in TRL:
        raise ConfigError(f"{where}: trl {version} is not supported. Install one of {', '.join(TRL)}.")
    return TRL[version]


def check_vllm(version: str | None, where: str = "the replica's environment") -> None:
    """Whether replicas can run with vLLM's version that was found `where`.

    Raises:
        ConfigError: it is missing, or outside the range; names it and the range.
    """
    if version is None:
        raise ConfigError(f"{where}: vLLM is missing. Install vllm {VLLM_RANGE}.")
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or not VLLM_FIRST <= (int(found[1]), int(found[2])) <= VLLM_LAST:
        raise ConfigError(f"{where}: vllm {version} is not supported. Install one of {VLLM_RANGE}.")


def check_image(field: str, image: str) -> None:
    """Raises ConfigError for an official image of vLLM whose tag names a version out of range; others tell nothing."""
    if found := _VLLM_IMAGE.fullmatch(image):
        check_vllm(found["version"], f"{field} = {image!r}")


def check_packages(field: str, packages: list[str]) -> None:
    """Raises ConfigError for a list of packages, as for pip, that pins TRL to a version that is not supported."""
    if version := _pins(packages).get("trl"):
        check_trl(version, f"{field}: 'trl=={version}'")


def check_together(field: str, packages: list[str], other_field: str, others: list[str]) -> None:
    """Raises ConfigError for a package that two lists, which pip gets as one, pin to different versions."""
    pinned, others_pinned = _pins(packages), _pins(others)
    for name in sorted(pinned.keys() & others_pinned.keys()):
        if pinned[name] != others_pinned[name]:
            raise ConfigError(
                f"{field} have {name}=={pinned[name]}, and {other_field} has {name}=={others_pinned[name]}: pip "
                "installs both lists at once. Give them the same version."
            )


def _pins(packages: list[str]) -> dict[str, str]:
    """The version of each package that is pinned to one, by its normalized name; what is no requirement pip judges."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            wanted = Requirement(package)
        except InvalidRequirement:
            continue
        for each in wanted.specifier:
            if each.operator == "==" and not each.version.endswith(".*"):
                found[canonicalize_name(wanted.name)] = each.version
    return found
