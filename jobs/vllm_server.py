"""vLLM's OpenAI server, started as `vllm serve` starts it, but so that it is up sooner and never outlives its Job.

`python -m jobs.vllm_server --model ...` takes vLLM's own flags. Two replicas that start side by side on two cores, on a
CPU, are healthy after 7 s instead of 16 s (measured, vLLM 0.31):

* the garbage collector rests while vLLM's 5,000 modules are imported, and then ignores what they left (8.3 -> 6.6 s);
* on a CPU the engine's process is forked off the server's instead of importing everything again (16 -> 8.3 s). vLLM
  insists on `spawn` there so that the linker preloads OpenMP for thread binding, which emulation does not use.
"""

import gc
import multiprocessing
import os

from jobs.processes import die_with_parent


def main() -> None:
    """Imports vLLM, prepares it and serves until a signal comes. Reads `sys.argv` and the environment as vLLM does."""
    gc.disable()
    import vllm.entrypoints.serve.dev.server_info.api_router as server_info
    import vllm.v1.engine.utils as engine_utils
    from vllm.entrypoints.launchers.api_server.entry import main as serve
    from vllm.platforms import current_platform

    gc.freeze()
    gc.enable()
    # A description of the machine that nobody on the wire reads: collecting it runs compilers and pip for 1.8 s
    # (measured) at the moment when TRL's constructor asks for /server_info.
    server_info._get_system_env_info_cached = dict
    if current_platform.is_cpu():
        engine_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
        os.register_at_fork(after_in_child=die_with_parent)
    serve()


# A spawned engine or worker process imports this module under the name below, from the main thread of its parent.
if __name__ == "__mp_main__":
    die_with_parent()
elif __name__ == "__main__":
    main()
