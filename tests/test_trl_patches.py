import importlib
import importlib.metadata
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import requests
import torch

from jobs import resume, rollout_patches, trl_patches
from jobs.bundle import app_dir
from jobs.errors import ConfigError

WAIT_S = 20.0


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    """The stand-in for FlashAttention-3, found as TRL finds it."""
    before = os.environ.get("LOCAL_KERNELS")
    trl_patches.use_local_attention(on_cpu=True)
    from kernels import get_kernel

    yield get_kernel(trl_patches.KERNEL, version=1)
    if before is None:
        del os.environ["LOCAL_KERNELS"]
    else:
        os.environ["LOCAL_KERNELS"] = before


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[tuple[int, int]], causal: bool, left: int
) -> torch.Tensor:
    """Attention query by query, segment by segment, straight from its definition."""
    out, at_q, at_k = torch.zeros_like(q), 0, 0
    for length_q, length_k in lengths:
        for i in range(length_q):
            last = i + length_k - length_q  # aligned bottom-right
            keys = range(max(0, last - left) if left >= 0 else 0, last + 1 if causal else length_k)
            for head in range(q.shape[1]):
                kv = head * k.shape[1] // q.shape[1]
                rows = torch.tensor([at_k + key for key in keys])
                weights = (k[rows, kv] @ q[at_q + i, head] / q.shape[2] ** 0.5).softmax(0)
                out[at_q + i, head] = weights @ v[rows, kv]
        at_q, at_k = at_q + length_q, at_k + length_k
    return out


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


ON_A_GPU = pytest.param(  # numbers of bfloat16 near 4 are 0.03 apart; on a CPU in bfloat16 the largest error is that
    "cuda", torch.bfloat16, 5e-2, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), [("cpu", torch.float32, 1e-5), ON_A_GPU])
@pytest.mark.parametrize(("causal", "left"), [(True, -1), (True, 2), (False, -1)])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_is_that_of_a_naive_reference(
    kernel: ModuleType, causal: bool, left: int, kv_heads: int, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    lengths = [(3, 3), (1, 4), (5, 9), (2, 2), (1, 1)]
    longest_q, longest_k = (max(column) for column in zip(*lengths, strict=True))
    inputs = [torch.randn(sum(q for q, _ in lengths), 4, 32)] + [
        torch.randn(sum(k for _, k in lengths), kv_heads, 32) for _ in range(2)
    ]
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    out = kernel.flash_attn_varlen_func(
        *(x.to(device, dtype) for x in ours),
        offsets([q for q, _ in lengths]).to(device),
        offsets([k for _, k in lengths]).to(device),
        longest_q,
        longest_k,
        causal=causal,
        window_size=(left, 0) if left >= 0 else (-1, -1),
    ).to("cpu", torch.float32)
    expected = reference(theirs[0], theirs[1], theirs[2], lengths, causal, left)
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=0)
    draw = torch.randn_like(expected)
    (out * draw).sum().backward()
    (expected * draw).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None and other.grad is not None
        torch.testing.assert_close(mine.grad, other.grad, atol=tolerance, rtol=0)


def test_attention_refuses_what_it_does_not_do(kernel: ModuleType) -> None:
    q = torch.randn(2, 1, 32)
    with pytest.raises(NotImplementedError, match="softcap"):
        kernel.flash_attn_varlen_func(q, q, q, offsets([2]), offsets([2]), 2, 2, softcap=30.0)


def test_the_kernel_comes_with_its_metadata() -> None:
    folder = app_dir() / "jobs" / "kernels" / "flash_attn3" / "build" / "torch-universal"
    assert json.loads((folder / "metadata.json").read_text()) == {
        "name": "flash-attn3",
        "version": 1,
        "python-depends": [],
    }


@pytest.mark.parametrize("version", ["1.13.0", "1.18.0"])
def test_another_version_of_trl_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(ConfigError, match=rf"trl {version} is not supported.*1\.14\.2, 1\.15\.0, 1\.16\.0"):
        trl_patches.apply(True, lambda: False)


# Each patch, and what it replaces or relies on; without it, it must say so before anything is trained.
PATCHES: list[tuple[Callable[[], None], str, str]] = [
    (trl_patches.no_peak_flops, "experimental.async_grpo.async_grpo_trainer", "get_peak_flops_per_device"),
    (trl_patches.sdpa_instead_of_kernel, "experimental.async_grpo.async_grpo_trainer", "create_model_from_path"),
    (trl_patches.log_probabilities_in_torch, "trainer.utils", "_ChunkedLogProbFunction"),
    (trl_patches.poll_health_often, "experimental.async_grpo.vllm_client", "VLLMClient"),
    (trl_patches.poll_health_often, "experimental.async_grpo.vllm_client:VLLMClient", "wait_for_server_ready"),
    (lambda: trl_patches.survive_proxy_restarts(bool), "experimental.async_grpo.vllm_client", "requests"),
    (trl_patches.refuse_merged_sync, "experimental.async_grpo.async_grpo_trainer", "select_adapter_sync"),
    (trl_patches.refuse_merged_sync, "experimental.async_grpo.async_grpo_trainer", "validate_lora_for_vllm_sync"),
    (trl_patches.refuse_merged_sync, "experimental.async_grpo.async_grpo_trainer", "WeightTransferClient"),
    (
        lambda: rollout_patches.own_rollout_process(fork=True),
        "experimental.async_grpo.async_rollout_worker:AsyncRolloutWorker",
        "start",
    ),
    (rollout_patches.stop_at_once, "experimental.async_grpo.async_rollout_worker:AsyncRolloutWorker", "stop"),
    (rollout_patches.stop_at_once, "experimental.async_grpo.async_rollout_worker", "AsyncRolloutWorker"),
    (
        lambda: rollout_patches.end_together(KeyboardInterrupt),
        "experimental.async_grpo.async_grpo_trainer",
        "RolloutQueueDataset",
    ),
    (resume.count_prompts, "experimental.async_grpo.async_grpo_trainer", "AsyncGRPOTrainer"),
    (resume.count_prompts, "experimental.async_grpo.async_rollout_worker:AsyncRolloutWorker", "start"),
    (resume.take_no_step_too_many, "experimental.async_grpo.async_grpo_trainer", "AsyncGRPOTrainer"),
    (resume.save_sharded_adapters, "experimental.async_grpo.async_grpo_trainer", "AsyncGRPOTrainer"),
]


@pytest.mark.parametrize(("patch", "owner", "name"), PATCHES, ids=[f"{owner}.{name}" for _, owner, name in PATCHES])
def test_a_patch_whose_target_is_gone_names_it_and_trls_version(
    trainer_module: Any, monkeypatch: pytest.MonkeyPatch, patch: Callable[[], None], owner: str, name: str
) -> None:
    module, _, inside = owner.partition(":")
    found = importlib.import_module(f"trl.{module}")
    monkeypatch.delattr(getattr(found, inside) if inside else found, name)
    version = importlib.metadata.version("trl")
    with pytest.raises(ConfigError, match=rf"trl {version}, as it is installed here, lacks \S*\.{name}, which"):
        patch()


def test_a_module_or_a_parameter_that_is_gone_is_named(trainer_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.experimental.async_grpo import vllm_client

    monkeypatch.setattr(vllm_client.VLLMClient, "wait_for_server_ready", lambda self: None)
    with pytest.raises(ConfigError, match="lacks the parameter poll_interval_s of"):
        trl_patches.poll_health_often()
    monkeypatch.setitem(sys.modules, "trl.experimental.async_grpo.vllm_client", None)
    with pytest.raises(ConfigError, match=r"lacks the module trl\.experimental\.async_grpo\.vllm_client"):
        trl_patches.poll_health_often()


class FlakyServer:
    """A raw HTTP server: `resets` connections are cut after the request, later ones get 200."""

    def __init__(self, resets: int) -> None:
        self.resets, self.seen = resets, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.recv(65536)
            self.seen += 1
            if self.seen > self.resets:
                client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
            client.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def flaky() -> Iterator[FlakyServer]:
    server = FlakyServer(resets=2)
    yield server
    server.close()


def test_a_sync_survives_resets(flaky: FlakyServer) -> None:
    patient = trl_patches.PatientRequests(requests)
    answer = patient.post(f"{flaky.url}/v1/load_lora_adapter", json={"lora_name": "trl-policy-v1"}, timeout=5)
    assert (answer.status_code, flaky.seen) == (200, 3)


def test_patience_has_an_end(flaky: FlakyServer) -> None:
    flaky.resets = 10**9
    begun = time.monotonic()
    with pytest.raises(requests.ConnectionError):
        trl_patches.PatientRequests(requests, deadline_s=0.5).post(f"{flaky.url}/pause", timeout=5)
    assert 0.5 <= time.monotonic() - begun < 5
    seen = flaky.seen
    with pytest.raises(requests.ConnectionError):
        trl_patches.PatientRequests(requests, stopping=lambda: True).post(f"{flaky.url}/pause", timeout=5)
    assert flaky.seen == seen + 1


def test_the_wait_for_health_is_left_to_trl(flaky: FlakyServer) -> None:
    with pytest.raises(requests.ConnectionError):
        trl_patches.PatientRequests(requests).get(f"{flaky.url}/health", timeout=5)
    assert flaky.seen == 1


@pytest.fixture(scope="module")
def trainer_module() -> Any:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    with trl_patches.without_vllm():
        from trl.experimental.async_grpo import async_grpo_trainer
    return async_grpo_trainer


def adapter(**config: Any) -> Any:
    from peft import LoraConfig

    lora = LoraConfig(**{"r": 8, "target_modules": ["q_proj"], **config})
    return SimpleNamespace(active_adapters=["default"], peft_config={"default": lora})


SERVER = {"lora_config": {"max_lora_rank": 8, "max_loras": 6}, "parallel_config": {"data_parallel_size": 1}}
ARGS = SimpleNamespace(max_staleness=4)


@pytest.mark.parametrize(
    ("server", "model", "words"),
    [
        ({**SERVER, "lora_config": None}, adapter(), "enable_lora"),
        ({**SERVER, "parallel_config": {"data_parallel_size": 2}}, adapter(), "data_parallel_size = 2"),
        (SERVER, adapter(modules_to_save=["lm_head"]), "modules_to_save"),
        (SERVER, adapter(use_dora=True), "DoRA"),
        (SERVER, adapter(bias="all"), "bias"),
        (SERVER, adapter(target_modules=["lm_head"]), "lm_head"),
        (SERVER, adapter(r=16), "rank 16"),
        ({**SERVER, "lora_config": {"max_lora_rank": 8, "max_loras": 5}}, adapter(), "max-loras 5"),
    ],
)
def test_a06_what_cannot_be_synced_as_an_adapter_is_an_error(
    trainer_module: Any, monkeypatch: pytest.MonkeyPatch, server: Any, model: Any, words: str
) -> None:
    monkeypatch.setattr(trainer_module, "select_adapter_sync", trainer_module.select_adapter_sync)
    monkeypatch.setattr(trainer_module, "WeightTransferClient", trainer_module.WeightTransferClient)
    trl_patches.refuse_merged_sync()
    with pytest.raises(ValueError, match=words):
        trainer_module.select_adapter_sync(server, model, ARGS)
    assert trainer_module.select_adapter_sync(SERVER, adapter(), ARGS) is True
    with pytest.raises(ConfigError, match="NCCL"):
        trainer_module.WeightTransferClient(vllm_client=None)
