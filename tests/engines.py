"""Engines for tests: the simulated one and a real vLLM on the CPU, each as a process of its own."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from jobs.bucket import Bucket
from jobs.bundle import app_dir
from jobs.http import KEY_HEADER
from jobs.manifest import adapter_prefix, build
from jobs.names import parse_wire
from jobs.replica import CPU_ENVIRONMENT

KEY = "5e" * 32
"""The run's key in tests."""
SHARED_FLAGS = (
    *("--max-model-len", "256", "--max-num-seqs", "64", "--enable-lora", "--max-lora-rank", "8"),
    *("--max-loras", "6", "--max-cpu-loras", "8"),
)
READY_S = 120.0
"""Longest start of a real vLLM on a machine that is busy with other tests."""


@dataclass(frozen=True)
class Engine:
    """A running engine. `log` is the file with all that it wrote."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def post(self, path: str, json: Any = None, **kwargs: Any) -> requests.Response:
        return self.call("POST", path, json=json, **kwargs)

    def get(self, path: str, **kwargs: Any) -> requests.Response:
        return self.call("GET", path, **kwargs)

    def call(self, method: str, path: str, timeout: float = 60, **kwargs: Any) -> requests.Response:
        kwargs.setdefault("headers", {KEY_HEADER: KEY})
        return requests.request(method, self.url + path, timeout=timeout, **kwargs)


@contextmanager
def running(command: list[str], environ: Mapping[str, str], port: int, log: Path) -> Iterator[Engine]:
    """Runs an engine until the block ends; it is healthy when the block starts."""
    environ = {**os.environ, "PYTHONPATH": str(app_dir()), **environ}
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environ, stdout=file, stderr=file, start_new_session=True)
    try:
        _wait(port, process, log)
        yield Engine(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def sim_command(port: int, *flags: str, model: str = "tiny") -> list[str]:
    """The simulated engine: no time passes for tokens and loads unless `flags` say so."""
    command = [
        sys.executable,
        "-m",
        "emulator.sim_engine",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--model",
        model,
    ]
    return [*command, "--served-model-name", "tiny", "--dtype", "float32", *SHARED_FLAGS, *flags]


def _wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    request = urllib.request.Request(f"http://127.0.0.1:{port}/health", headers={KEY_HEADER: KEY})
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(request, timeout=2).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"engine did not start: {log.read_text()[-4000:]}")


def vllm_command(port: int, model: str, *flags: str) -> list[str]:
    """A real vLLM on the CPU with the same flags that the recipes of the tiny models give it."""
    return [
        *(sys.executable, "-m", "jobs.vllm_server", "--model", model, "--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", "tiny", "--dtype", "float32", "--kv-cache-memory-bytes", "33554432"),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enforce-eager"),
        *SHARED_FLAGS,
        *flags,
    ]


def engine_environ(adapters: Path, bucket: Mapping[str, str]) -> dict[str, str]:
    """What the middleware and both engines read: the run's key, the store's directory, the bucket, open endpoints."""
    return {
        **CPU_ENVIRONMENT,
        **bucket,
        "HF_HUB_OFFLINE": "1",
        "ASYNCGRPO_KEY": KEY,
        "ASYNCGRPO_ADAPTERS": str(adapters),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def publish(bucket: Bucket, directory: Path, wire: str, key: str = KEY) -> str:
    """Publishes an adapter as the proxy does; what a load's `lora_path` says to name it."""
    name = parse_wire(wire)
    assert name is not None
    manifest = build(directory, name, "tiny").sign(key)
    prefix = adapter_prefix(name.run, name.attempt, name.version)
    for file in manifest.files:
        bucket.put_file(f"{prefix}/{file}", directory / file)
    bucket.put(f"{prefix}/manifest.json", manifest.to_json())
    return f"manifest:{prefix}/manifest.json"
