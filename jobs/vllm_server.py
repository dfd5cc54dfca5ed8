"""vLLM's OpenAI server, started as `vllm serve` starts it, but so that it is up sooner and never outlives its Job.

`python -m jobs.vllm_server --model ...` takes vLLM's own flags. On a CPU the start costs 7 s of processor time instead
of 17.6 s (measured, vLLM 0.31):

* the engine's process is forked off the server's instead of importing everything again. vLLM insists on `spawn` on a
  CPU so that the linker preloads OpenMP for thread binding, which emulation does not use;
* the garbage collector rests while vLLM's 5,000 modules are imported, and then ignores what they left;
* where nothing is compiled, torch's compiler is not imported.
"""

import gc
import importlib
import multiprocessing
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from jobs.processes import die_with_parent
from jobs.spec import VLLM_SERVER

LOWERING = "torch._inductor.lowering"
"""The largest part of torch's compiler, which vLLM imports at once to patch a list in it (vllm/env_override.py)."""


def main() -> None:
    """Imports vLLM, prepares it and serves until a signal comes. Reads `sys.argv` and the environment as vLLM does."""
    gc.disable()
    with _without_compiler():
        importlib.import_module(VLLM_SERVER)
    platforms = importlib.import_module("vllm.platforms")
    if platforms.current_platform.is_cpu():
        _prepare_cpu()
    gc.freeze()
    gc.enable()
    del sys.modules[VLLM_SERVER]
    runpy.run_module(VLLM_SERVER, run_name="__main__")


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Where nothing is compiled, vLLM's patch of torch's compiler finds none, and does without, as it is written to."""
    if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        yield
        return
    sys.modules[LOWERING] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.modules.pop(LOWERING, None)


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
