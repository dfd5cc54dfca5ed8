"""Everything that TRL needs to be told to run here: each workaround is one function with its reason.

Written for the versions that `jobs.versions` names, whose asynchronous GRPO lives in `trl.experimental.async_grpo`.
`apply` does all that a recipe's run needs, in order. Nothing here imports TRL, torch or vLLM before it is called.
"""

import contextlib
import functools
import importlib.machinery
import logging
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

from jobs import packages, rollout_patches, versions
from jobs.bundle import app_dir
from jobs.errors import ConfigError
from jobs.trl_targets import CLIENT, TRAINER, existing, imported, replace, takes

log = logging.getLogger(__name__)

KERNEL = "kernels-community/flash-attn3"
HEALTH_POLL_S = 0.25
"""TRL looks every 2 s whether the server is up; on average a second of the start would be spent waiting for it."""
RETRY_DEADLINE_S = 300.0
"""How long a call to the proxy is tried again on broken connections: many times what a restart of the proxy takes."""
RETRY_PAUSE_S = 0.2


def apply(on_cpu: bool, stopping: Callable[[], bool]) -> None:
    """Imports TRL's asynchronous GRPO and makes it fit for a trainer beside the proxy.

    `on_cpu` says that there is no GPU to train on. `stopping` says that the process has been asked to end.

    Raises:
        ConfigError: this version of TRL is not supported, or lacks what is to be patched.
    """
    trl = versions.check_trl(packages.installed("trl"))
    with without_vllm():
        imported("trl.experimental.async_grpo")
    use_local_attention(on_cpu)
    if on_cpu and trl.asks_for_peak_flops:
        no_peak_flops()
    if on_cpu and trl.kernel_by_name:
        sdpa_instead_of_kernel()
    if on_cpu and trl.triton_only:
        log_probabilities_in_torch()
    poll_health_often()
    survive_proxy_restarts(stopping)
    refuse_merged_sync()
    rollout_patches.own_rollout_process(fork=on_cpu)
    rollout_patches.stop_at_once()
    rollout_patches.tell_own_errors()
    no_model_cards()


@contextlib.contextmanager
def without_vllm() -> Iterator[None]:
    """While TRL is imported, stands in for the parts of vLLM that it imports for its NCCL sync.

    That sync is never used here, TRL insists on the imports all the same, and importing vLLM takes the trainer 1.7 s of
    CPU (measured) where it is installed and is impossible where it is not. TRL 1.14 to 1.16 look only at the package's
    spec and version. What is put into sys.modules is taken out again, so that vLLM can be imported later.
    """
    if "vllm" in sys.modules:
        yield
        return
    attributes: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.30.0"},  # read where no distribution is installed; within the range of all three
        "vllm.utils": {},
        "vllm.utils.network_utils": {"get_ip": _no_nccl, "get_open_port": _no_nccl},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": _no_nccl},
        "vllm.distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer": _no_nccl},
        "vllm.distributed.weight_transfer.nccl_engine": {
            "NCCLTrainerSendWeightsArgs": _no_nccl,
            "NCCLWeightTransferEngine": _no_nccl,
        },
    }
    for name, values in attributes.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__dict__.update(values)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in attributes:
            sys.modules.pop(name, None)


def _no_nccl(*_: Any, **__: Any) -> Any:
    raise ConfigError("merged weights would go over NCCL, which does not reach the replicas; train a LoRA adapter.")


def use_local_attention(on_cpu: bool) -> None:
    """Where the Hub's FlashAttention-3 cannot be had, lets `kernels` find the stand-in in jobs/kernels for it.

    On a CPU that is always so; with a GPU, when the Hub does not give it. `kernels` 0.13 reads LOCAL_KERNELS at its
    first use.

    Raises:
        ConfigError: the program lies at a path that LOCAL_KERNELS cannot express.
    """
    if KERNEL in os.environ.get("LOCAL_KERNELS", ""):
        return
    if not on_cpu:
        from kernels import get_kernel

        try:
            get_kernel(KERNEL, version=1)
            return
        except Exception as error:  # no network, no such build, not on this mirror: kernels has no common error
            log.warning("%s cannot be had from the Hub (%s); using torch's varlen attention", KERNEL, error)
    path = str(app_dir() / "jobs" / "kernels" / "flash_attn3")
    if ":" in path:
        raise ConfigError(f"the program lies at {path!r}: LOCAL_KERNELS allows no ':'. Set ASYNCGRPO_CACHE elsewhere.")
    others = os.environ.get("LOCAL_KERNELS")
    os.environ["LOCAL_KERNELS"] = f"{KERNEL}={path}" + (f":{others}" if others else "")
    with contextlib.suppress(ImportError, AttributeError):  # it caches what it read, at least by value
        from kernels import utils

        utils._parse_local_kernel_overrides.cache_clear()


def sdpa_instead_of_kernel() -> None:
    """On a CPU, trains TRL 1.14 and 1.15 with transformers' own attention; 1.16 does not ask for the kernel like that.

    It names the kernel as transformers' attention implementation, and transformers fetches it only with a version of
    `kernels` that differs from release to release. Its sdpa keeps packed sequences apart by their position ids as well.
    """
    module = imported(TRAINER)
    original = existing(module, "create_model_from_path")

    @functools.wraps(original)
    def create_model_from_path(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("attn_implementation") == KERNEL:
            kwargs["attn_implementation"] = "sdpa"
        return original(*args, **kwargs)

    module.create_model_from_path = create_model_from_path


def no_peak_flops() -> None:
    """Without a GPU there is no peak to compare with; TRL 1.15 and 1.16 ask CUDA for the device's name."""
    module = imported(TRAINER)
    replace(module, "get_peak_flops_per_device", lambda *_: None)


def log_probabilities_in_torch() -> None:
    """On a CPU, takes log-probabilities from `jobs.logprobs`: TRL 1.15.0 has them from a Triton kernel alone."""
    from jobs.logprobs import LogProbabilities

    replace(imported("trl.trainer.utils"), "_ChunkedLogProbFunction", LogProbabilities)


def poll_health_often() -> None:
    """Shortens the pause between two looks at the server's /health (see HEALTH_POLL_S)."""
    client = existing(imported(CLIENT), "VLLMClient")
    original = existing(client, "wait_for_server_ready")
    takes(original, "poll_interval_s")

    @functools.wraps(original)
    def wait_for_server_ready(self: Any, poll_interval_s: float = HEALTH_POLL_S) -> None:
        original(self, poll_interval_s)

    client.wait_for_server_ready = wait_for_server_ready


def survive_proxy_restarts(stopping: Callable[[], bool]) -> None:
    """TRL treats a broken connection during a sync as fatal; the proxy may be restarted just then.

    Its calls are sent again: on our proxy a load, unload, pause or resume that is repeated has the same result.
    """
    module = imported(CLIENT)
    module.requests = PatientRequests(existing(module, "requests"), stopping)


class PatientRequests:
    """The `requests` module, whose `get` and `post` are sent again on a broken connection until a deadline."""

    def __init__(
        self, requests: Any, stopping: Callable[[], bool] = lambda: False, deadline_s: float = RETRY_DEADLINE_S
    ) -> None:
        self._requests, self._stopping, self._deadline_s = requests, stopping, deadline_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._requests, name)

    def get(self, url: str, **kwargs: Any) -> Any:
        """`requests.get`, patiently; raises its ConnectionError when the deadline has passed."""
        if url.endswith("/health"):  # TRL waits for this one itself, with a deadline of its own
            return self._requests.get(url, **kwargs)
        return self._patiently(self._requests.get, url, kwargs)

    def post(self, url: str, **kwargs: Any) -> Any:
        """`requests.post`, patiently; raises its ConnectionError when the deadline has passed."""
        return self._patiently(self._requests.post, url, kwargs)

    def _patiently(self, send: Callable[..., Any], url: str, kwargs: dict[str, Any]) -> Any:
        deadline = time.monotonic() + self._deadline_s
        while True:
            try:
                return send(url, **kwargs)
            except (self._requests.ConnectionError, self._requests.exceptions.ChunkedEncodingError) as error:
                if self._stopping() or time.monotonic() >= deadline:
                    raise
                log.warning("%s: %s; sending it again", url, type(error).__name__)
                time.sleep(RETRY_PAUSE_S)


def refuse_merged_sync() -> None:
    """Makes an error of TRL's fallback to syncing merged weights over NCCL, of which it only warns (TRL 1.14 to 1.16).

    It falls back when the server has no LoRA or several data-parallel ranks, and for adapters that vLLM cannot load.
    """
    module = imported(TRAINER)
    original = existing(module, "select_adapter_sync")
    validate = existing(module, "validate_lora_for_vllm_sync")

    @functools.wraps(original)
    def select_adapter_sync(server_info: dict[str, Any], model: Any, args: Any) -> bool:
        if server_info["lora_config"] is None:
            raise ConfigError("the replicas serve no LoRA: set replica.vllm.enable_lora = true.")
        if (ranks := server_info["parallel_config"]["data_parallel_size"]) > 1:
            raise ConfigError(f"replica.vllm.data_parallel_size = {ranks}: must be 1; set replica.engines instead.")
        try:
            validate(model)
        except ValueError as error:
            raise ConfigError(f"lora: vLLM cannot serve this adapter as it is. {error}") from error
        return bool(original(server_info, model, args))

    replace(module, "WeightTransferClient", _no_nccl)
    module.select_adapter_sync = select_adapter_sync


def no_model_cards() -> None:
    """PEFT writes a README beside each adapter: two thirds of the 16 ms (measured) that the save of a sync takes."""
    from peft import PeftModel

    replace(PeftModel, "create_or_update_model_card", lambda *_, **__: None)
