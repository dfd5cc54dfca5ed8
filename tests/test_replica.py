import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from jobs import lease
from jobs.bucket import Bucket
from jobs.bundle import app_dir
from jobs.errors import RunFailed
from jobs.http import KEY_HEADER
from jobs.probe import gpus
from jobs.recipe import load, override
from jobs.replica import Place, Replica, arguments, engine_command, engine_environment, places
from jobs.spec import ModelRef, RunSpec, spec_key
from tests.conftest import MotoBucket, started
from tests.engines import KEY

SIM = "emulator.sim_engine"


def spec(*overrides: str, engine_module: str = SIM, **fields: Any) -> RunSpec:
    recipe = override(load("digit"), 'model.dtype="float32"', *overrides)
    values = {"run": "run", "engine": "sim", "model": ModelRef("hub", "org/model", "digit"), **fields}
    return RunSpec(recipe=recipe, engine_module=engine_module, **values)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"max_loras": 6}, ["--max-loras", "6"]),
        ({"enforce_eager": True}, ["--enforce-eager"]),
        ({"enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),
        ({"served_model_name": ["a", "b"]}, ["--served-model-name", "a", "b"]),
        ({"kv_cache_dtype": "fp8"}, ["--kv-cache-dtype", "fp8"]),
    ],
)
def test_flags_become_arguments(flags: dict[str, Any], expected: list[str]) -> None:
    assert arguments(flags) == expected


@pytest.mark.parametrize(
    ("engines", "environ", "devices", "parallel", "expected"),
    [
        (1, {}, [], 1, [Place(0, "0.0.0.0", 8000)]),
        (2, {}, [], 1, [Place(0, "0.0.0.0", 8000), Place(1, "0.0.0.0", 8001)]),
        (1, {"ASYNCGRPO_BIND_8000": "127.0.0.1:43210"}, [], 1, [Place(0, "127.0.0.1", 43210)]),
        (
            2,
            {"ASYNCGRPO_BIND_8001": "127.0.0.1:5"},
            ["0"],
            1,
            [Place(0, "0.0.0.0", 8000, ("0",)), Place(1, "127.0.0.1", 5, ("0",))],
        ),
        (
            3,
            {},
            ["4", "5"],
            1,
            [
                Place(0, "0.0.0.0", 8000, ("4",)),
                Place(1, "0.0.0.0", 8001, ("5",)),
                Place(2, "0.0.0.0", 8002, ("4",)),
            ],
        ),
        (
            2,
            {},
            ["0", "1", "2", "3"],
            2,
            [Place(0, "0.0.0.0", 8000, ("0", "1")), Place(1, "0.0.0.0", 8001, ("2", "3"))],
        ),
    ],
)
def test_engines_are_spread_over_gpus_and_ports(
    engines: int, environ: dict[str, str], devices: list[str], parallel: int, expected: list[Place]
) -> None:
    assert places(engines, environ, devices, parallel) == expected


@pytest.mark.parametrize(("visible", "expected"), [("", []), ("0", ["0"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])])
def test_visible_gpus(visible: str, expected: list[str]) -> None:
    assert gpus({"CUDA_VISIBLE_DEVICES": visible}) == expected


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_the_command_has_the_recipes_flags_and_a_replicas() -> None:
    command = engine_command(spec(), Place(0, "127.0.0.1", 81), "/models/x", replica=1)
    assert command[1:3] == ["-m", SIM]
    assert "--enable-lora" in command and "--enforce-eager" in command
    for flag, expected in {
        "--model": "/models/x",
        "--served-model-name": "digit",
        "--host": "127.0.0.1",
        "--port": "81",
        "--max-loras": "6",
        "--max-cpu-loras": "24",
        "--max-lora-rank": "8",
        "--dtype": "float32",
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--middleware": "jobs.middleware.ReplicaMiddleware",
        "--kv-cache-memory-bytes": "33554432",
    }.items():
        assert value(command, flag) == expected
    assert not any(KEY in word for word in command)


def test_flags_that_a_recipe_leaves_out_have_the_values_that_a_replica_needs() -> None:
    bare = spec("replica.vllm={}", "trainer.max_staleness=2")
    command = engine_command(bare, Place(0, "0.0.0.0", 8000), "m", replica=0)
    expected = {"--max-loras": "4", "--max-cpu-loras": "16", "--max-lora-rank": "8", "--dtype": "float32"}
    assert {flag: value(command, flag) for flag in expected} == expected


def test_vllms_own_server_is_started_by_ours() -> None:
    command = engine_command(
        spec(engine_module="vllm.entrypoints.openai.api_server", engine="vllm"), Place(0, "", 1), "m", replica=0
    )
    assert command[1:3] == ["-m", "jobs.vllm_server"]


def test_each_engine_has_a_seed_of_its_own() -> None:
    seeds = [
        value(engine_command(spec("replica.engines=3", seed=run), Place(engine, "", 1), "m", replica), "--seed")
        for run in range(2)
        for replica in range(4)
        for engine in range(3)
    ]
    assert len(set(seeds)) == len(seeds)


def test_the_environment_of_an_engine(tmp_path: Path) -> None:
    given = {"PATH": "/bin", "OMP_NUM_THREADS": "4", "ASYNCGRPO_KEY": KEY}
    cpu = engine_environment(given, spec(), Place(0, "", 1), 7, tmp_path)
    assert cpu["TORCHDYNAMO_DISABLE"] == "1" and cpu["OMP_NUM_THREADS"] == "4"
    assert cpu["ASYNCGRPO_REQUEST_SEEDS"] == "0"
    assert cpu["ASYNCGRPO_REPLICA"] == "7" and cpu["ASYNCGRPO_ADAPTERS"] == str(tmp_path)
    assert cpu["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == cpu["VLLM_SERVER_DEV_MODE"] == "1"
    assert int(cpu["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 15
    cached = engine_environment({**given, "ASYNCGRPO_CACHE": "/c"}, spec(), Place(0, "", 1), 7, tmp_path)
    assert cached["VLLM_CACHE_ROOT"] == "/c/vllm"
    assert "HF_HUB_OFFLINE" not in cpu
    gpu = engine_environment(given, spec(model=ModelRef("path", "/m", "m")), Place(1, "", 1, ("2", "3")), 0, tmp_path)
    assert gpu["CUDA_VISIBLE_DEVICES"] == "2,3" and "TORCHDYNAMO_DISABLE" not in gpu
    assert gpu["HF_HUB_OFFLINE"] == "1" and "VLLM_CACHE_ROOT" not in gpu
    shared = engine_environment({**given, "ASYNCGRPO_CACHE": "/c"}, spec(), Place(1, "", 1, ("2",)), 0, tmp_path)
    assert (shared["VLLM_CACHE_ROOT"], shared["TRITON_CACHE_DIR"]) == ("/c/vllm", "/c/triton")


@contextmanager
def replica(moto: MotoBucket, tmp_path: Path, ports: list[int], run: RunSpec) -> Iterator[subprocess.Popen[str]]:
    """A real replica Job's process with its engines, whose output is in `tmp_path`/log."""
    bucket = Bucket.from_env(moto.environ)
    bucket.put(spec_key("run"), run.to_json())
    lease.renew(bucket, "run")
    binds = {f"ASYNCGRPO_BIND_{8000 + i}": f"127.0.0.1:{port}" for i, port in enumerate(ports)}
    environ = {
        **os.environ,
        **moto.environ,
        **binds,
        "PYTHONPATH": str(app_dir()),
        "ASYNCGRPO_RUN": "run",
        "ASYNCGRPO_REPLICA": "0",
        "ASYNCGRPO_KEY": KEY,
        "ASYNCGRPO_CACHE": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    script = "import os, sys; from jobs import logs, replica; logs.to_stderr(); sys.exit(replica.run(os.environ))"
    with (tmp_path / "log").open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", script], env=environ, stdout=file, stderr=file, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_healthy(port: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if requests.get(f"http://127.0.0.1:{port}/health", headers={KEY_HEADER: KEY}, timeout=5).ok:
                return
        except requests.ConnectionError:
            time.sleep(0.05)
    pytest.fail(f"no engine on port {port}")


def wait_gone(children: set[int]) -> None:
    deadline = time.monotonic() + 10
    while children & set(started()):
        assert time.monotonic() < deadline, "engines outlived their replica"
        time.sleep(0.05)


def engines_of(process: subprocess.Popen[str]) -> set[int]:
    return {pid for pid, line in started().items() if SIM in line and pid != process.pid}


@pytest.fixture
def ports() -> list[int]:
    import socket

    listeners = [socket.socket() for _ in range(2)]
    for listener in listeners:
        listener.bind(("127.0.0.1", 0))
    found = [int(listener.getsockname()[1]) for listener in listeners]
    for listener in listeners:
        listener.close()
    return found


def test_engines_live_and_end_with_their_replica(moto_bucket: MotoBucket, tmp_path: Path, ports: list[int]) -> None:
    for how, status in ((signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)):
        with replica(moto_bucket, tmp_path, ports, spec("replica.engines=2")) as process:
            for port in ports:
                wait_healthy(port, process)
            described = requests.get(
                f"http://127.0.0.1:{ports[0]}/asyncgrpo/replica", headers={KEY_HEADER: KEY}, timeout=5
            ).json()
            assert (described["engine"], described["replica"], described["model"]) == ("sim", "0", "digit")
            children = engines_of(process)
            assert len(children) == 2
            process.send_signal(how)
            assert process.wait(20) == status
            wait_gone(children)
    assert KEY not in (tmp_path / "log").read_text()


def test_an_engine_that_ends_ends_the_job_with_its_last_words(
    moto_bucket: MotoBucket, tmp_path: Path, ports: list[int]
) -> None:
    with replica(moto_bucket, tmp_path, ports, spec(engine_module="jobs.no_such_engine")) as process:
        assert process.wait(30) not in (0, None)
    assert "engine 0 ended with status 1" in (log := (tmp_path / "log").read_text())
    assert "No module named jobs.no_such_engine" in log.partition("Its last lines")[2]


def test_one_dead_engine_takes_the_others_with_it(moto_bucket: MotoBucket, tmp_path: Path, ports: list[int]) -> None:
    with replica(moto_bucket, tmp_path, ports, spec("replica.engines=2")) as process:
        for port in ports:
            wait_healthy(port, process)
        children = engines_of(process)
        os.kill(min(children), signal.SIGKILL)
        assert process.wait(20) not in (0, None)
        wait_gone(children)


def test_the_end_of_the_run_ends_the_replica(moto_bucket: MotoBucket, tmp_path: Path, ports: list[int]) -> None:
    with replica(moto_bucket, tmp_path, ports, spec("jobs.lease_s=3")) as process:
        wait_healthy(ports[0], process)
        lease.end(Bucket.from_env(moto_bucket.environ), "run")
        assert process.wait(20) == 0
    with replica(moto_bucket, tmp_path, ports, spec("jobs.lease_s=3")) as process:
        assert process.wait(30) == 0  # nobody renews the lease
    assert "was not renewed for 3 s" in (tmp_path / "log").read_text()


def test_a_replica_whose_watch_has_died_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests' own stays
    with pytest.raises(RunFailed, match="nobody watches the run's lease"):
        Replica().run(lambda stop, expired: None)


def test_nothing_of_a_replica_is_left_on_disk(moto_bucket: MotoBucket, tmp_path: Path, ports: list[int]) -> None:
    with replica(moto_bucket, tmp_path, ports, spec()) as process:
        wait_healthy(ports[0], process)
        assert list(tmp_path.glob("asyncgrpo-adapters-*"))
        process.terminate()
        process.wait(20)
    assert not list(tmp_path.glob("asyncgrpo-adapters-*"))
