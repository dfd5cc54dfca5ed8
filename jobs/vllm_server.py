"""vLLM's OpenAI server, started as `vllm serve` starts it, but so that it is up sooner and never outlives its Job.

`python -m jobs.vllm_server --model ...` takes vLLM's own flags. Two replicas that start side by side on two cores, on a
CPU, are healthy after 7 s instead of 16 s (measured, vLLM 0.31):

* the garbage collector rests while vLLM's 5,000 modules are imported, and then ignores what they left (8.3 -> 6.6 s);
* on a CPU the engine's process is forked off the server's instead of importing everything again (16 -> 8.3 s). vLLM
  insists on `spawn` there so that the linker preloads OpenMP for thread binding, which emulation does not use.
"""

import gc
import importlib
import multiprocessing
import os
import runpy
import sys

from jobs.processes import die_with_parent
from jobs.spec import VLLM_SERVER


def main() -> None:
    """Imports vLLM, prepares it and serves until a signal comes. Reads `sys.argv` and the environment as vLLM does."""
    gc.disable()
    importlib.import_module(VLLM_SERVER)
    platforms = importlib.import_module("vllm.platforms")
    if platforms.current_platform.is_cpu():
        _prepare_cpu()
    gc.freeze()
    gc.enable()
    del sys.modules[VLLM_SERVER]
    runpy.run_module(VLLM_SERVER, run_name="__main__")


def _prepare_cpu() -> None:
    engine_utils = importlib.import_module("vllm.v1.engine.utils")
    engine_utils.get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=die_with_parent)
    # A description of the machine that nobody on the wire reads: collecting it runs compilers and pip for 1.8 s
    # (measured) at the moment when TRL's constructor asks for /server_info.
    server_info = importlib.import_module("vllm.entrypoints.serve.dev.server_info.api_router")
    server_info._get_system_env_info_cached = dict  # type: ignore[attr-defined]


# A spawned engine or worker process imports this module under the name below, from the main thread of its parent.
if __name__ == "__mp_main__":
    die_with_parent()
elif __name__ == "__main__":
    main()
