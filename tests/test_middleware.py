"""The replica's middleware in front of a simulated engine, over real sockets, with a real bucket."""

import asyncio
import fcntl
import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.bucket import Bucket
from jobs.errors import ConfigError
from jobs.http import KEY_HEADER
from jobs.manifest import CONFIG_FILE, WEIGHTS_FILE
from jobs.middleware import LOAD_BODY_BYTES, ReplicaMiddleware
from tests.adapters import write_adapter
from tests.conftest import MotoBucket
from tests.engines import KEY, Engine, engine_environ, publish, running, sim_command

WIRE = "run.1.v1"


@pytest.fixture
def bucket(moto_bucket: MotoBucket) -> Bucket:
    return Bucket.from_env(moto_bucket.environ)


@pytest.fixture
def sim(moto_bucket: MotoBucket, tmp_path: Path, free_port: int) -> Iterator[Engine]:
    command = sim_command(free_port, "--middleware", "jobs.middleware.ReplicaMiddleware")
    environ = engine_environ(tmp_path / "store", moto_bucket.environ)
    with running(command, {**environ, "ASYNCGRPO_REPLICA": "3"}, free_port, tmp_path / "log") as engine:
        yield engine


def load(engine: Engine, where: Any, wire: Any = WIRE, **more: Any) -> tuple[int, str, str]:
    answer = engine.post("/v1/load_lora_adapter", {"lora_name": wire, "lora_path": where, **more})
    error = answer.json()["error"] if answer.status_code != 200 else {"type": "", "message": answer.text}
    assert answer.status_code == 200 or error["code"] == answer.status_code
    return answer.status_code, error["type"], error["message"]


def test_nothing_is_answered_without_the_key(sim: Engine) -> None:
    paths = [
        "/health",
        "/v1/models",
        "/server_info",
        "/pause",
        "/v1/completions",
        "/asyncgrpo/replica",
        "/sim/log",
        "/x",
    ]
    for path in paths:
        for method in ("GET", "POST", "OPTIONS", "PUT", "DELETE"):
            for headers in ({}, {KEY_HEADER: ""}, {KEY_HEADER: KEY[:-1]}, {"authorization": f"Bearer {KEY}"}):
                answer = sim.call(method, path, headers=headers)
                assert answer.status_code == 401, (method, path)
                assert answer.json()["error"]["code"] == 401
                assert KEY not in answer.text
    assert sim.get("/health").status_code == 200
    assert sim.get("/sim/log").json()["paused"] is False


def test_a_websocket_without_the_key_is_refused(sim: Engine) -> None:
    host, port = sim.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=5)
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    connection.request("GET", "/v1/realtime", headers={**upgrade, "Sec-WebSocket-Version": "13"})
    assert connection.getresponse().status in (401, 403)
    connection.close()


def test_an_adapter_is_loaded_by_its_manifest(sim: Engine, bucket: Bucket, tmp_path: Path) -> None:
    where = publish(bucket, write_adapter(tmp_path / "adapter"), WIRE)
    assert load(sim, where) == (200, "", f"Success: LoRA adapter '{WIRE}' added successfully.")
    described = sim.get("/asyncgrpo/replica").json()
    (event,) = sim.get("/sim/log").json()["events"]
    assert described.pop("adapters") == {WIRE: event["digest"]}
    assert len(described.pop("boot_id")) == 16
    assert described == {
        "replica": "3",
        "engine": "vllm",
        "ready": True,
        "model": "tiny",
        "max_model_len": 256,
        "dtype": "torch.float32",
        "max_loras": 6,
        "max_lora_rank": 8,
    }
    status, kind, message = load(sim, where)
    assert (status, kind) == (400, "InvalidUserInput") and "already been loaded" in message
    assert sim.post("/v1/unload_lora_adapter", {"lora_name": WIRE}).status_code == 200
    assert sim.get("/asyncgrpo/replica").json()["adapters"] == {}
    assert load(sim, where)[0] == 200


def test_weights_of_what_is_loaded_are_in_use(sim: Engine, bucket: Bucket, tmp_path: Path) -> None:
    where = publish(bucket, write_adapter(tmp_path / "adapter"), WIRE)
    assert load(sim, where)[0] == 200
    with next((tmp_path / "store").glob(f"**/.{WIRE}.used")).open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for body in ({"lora_name": 5}, {"lora_name": "../x"}, {}, []):
        assert sim.post("/v1/unload_lora_adapter", body).status_code in (400, 404), body


def test_weights_are_released_before_anybody_can_load_them_again(moto_bucket: MotoBucket, tmp_path: Path) -> None:
    """After the answer to an unload the next load may come at once: its weights must not count as unused."""
    order: list[str] = []

    class Store:
        def release(self, wire: str, now: float) -> None:
            order.append(f"released {wire}")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        order.append(f"vLLM sees {(await receive())['body'].decode()}")

    body = json.dumps({"lora_name": WIRE})

    async def receive() -> Any:
        return {"type": "http.request", "body": body.encode(), "more_body": False}

    async def send(message: Any) -> None: ...

    headers = [(KEY_HEADER.encode(), KEY.encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/unload_lora_adapter", "headers": headers, "root_path": ""}
    middleware = ReplicaMiddleware(app, engine_environ(tmp_path, moto_bucket.environ))
    middleware.store = Store()  # type: ignore[assignment]
    asyncio.run(middleware(scope, receive, send))  # type: ignore[arg-type]
    assert order == [f"released {WIRE}", f"vLLM sees {body}"]


def test_only_manifests_are_loaded(sim: Engine, bucket: Bucket, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    where = publish(bucket, adapter, WIRE)
    for path in (str(adapter), "manifest:", "manifest:/etc/passwd", f"manifest:../{where}", f"{where}/..", None, 5):
        assert load(sim, path)[:2] == (400, "AdapterRejected"), path
    assert load(sim, where, wire="run.1.v2")[:2] == (400, "AdapterRejected")
    assert load(sim, where, wire=None)[:2] == (400, "AdapterRejected")
    assert load(sim, where, load_inplace=True)[:2] == (400, "AdapterRejected")
    for method in ("POST", "DELETE"):
        for path in ("/adapters", "/adapters/x"):
            assert sim.call(method, path, json={"name": "x", "src": str(adapter)}).status_code == 403
    assert sim.get("/sim/log").json()["events"] == []


def test_what_may_come_later_is_told_from_what_never_can(sim: Engine, bucket: Bucket, tmp_path: Path) -> None:
    where = publish(bucket, write_adapter(tmp_path / "adapter"), WIRE, key="1" * 64)
    assert load(sim, where)[:2] == (400, "AdapterRejected")
    where = publish(bucket, write_adapter(tmp_path / "adapter"), WIRE)
    folder = where.removeprefix("manifest:").removesuffix("/manifest.json")
    bucket.put(f"{folder}/{WEIGHTS_FILE}", bucket.get(f"{folder}/{WEIGHTS_FILE}")[:-4] + b"1234")
    status, kind, message = load(sim, where)
    assert (status, kind) == (400, "AdapterRejected") and WEIGHTS_FILE in message
    bucket.delete([f"{folder}/{CONFIG_FILE}"])
    status, kind, message = load(sim, where)
    assert (status, kind) == (503, "AdapterNotVisible") and CONFIG_FILE in message


def test_a_load_that_is_no_json_gets_the_engines_verdict(sim: Engine) -> None:
    headers = {KEY_HEADER: KEY, "content-type": "application/json"}
    for body in ("{", "[]", "5"):
        answer = sim.call("POST", "/v1/load_lora_adapter", data=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "Bad Request")
    long = sim.call("POST", "/v1/load_lora_adapter", data=" " * (LOAD_BODY_BYTES + 1), headers=headers)
    assert long.status_code == 413


def test_a_client_that_leaves_is_seen_by_the_engine(sim: Engine) -> None:
    sim.post("/sim/fault", {"where": "completion", "hang": True})
    host, port = sim.url.removeprefix("http://").split(":")
    body = json.dumps({"model": "tiny", "prompt": [5, 6], "max_tokens": 2}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{KEY_HEADER}: {KEY}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        deadline = time.monotonic() + 5
        while sim.get("/sim/log").json()["hanging"] != 1:
            assert time.monotonic() < deadline
    while sim.get("/sim/log").json()["hanging"] != 0:
        assert time.monotonic() < deadline


def test_large_bodies_pass_whole(sim: Engine) -> None:
    asked = {"model": "tiny", "prompt": [5] * 400_000, "max_tokens": 1}
    answer = sim.post("/v1/completions", asked)
    assert answer.status_code == 400 and "400000 input tokens" in answer.text


def test_without_its_settings_it_does_not_start(moto_bucket: MotoBucket, tmp_path: Path) -> None:
    environ = engine_environ(tmp_path, moto_bucket.environ)

    async def app(*_: Any) -> None:
        raise AssertionError

    for name in ("ASYNCGRPO_KEY", "ASYNCGRPO_ADAPTERS", "ASYNCGRPO_BUCKET"):
        with pytest.raises(ConfigError, match=name):
            ReplicaMiddleware(app, {key: value for key, value in environ.items() if key != name})


def test_completions_pass_untouched_and_cheaply(moto_bucket: MotoBucket, tmp_path: Path) -> None:
    """What stands before a completion is a look at its headers: `receive` and `send` are the server's own."""
    seen: list[tuple[Any, Any, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    async def receive() -> Any: ...
    async def send(message: Any) -> None: ...

    headers = [(b"host", b"x"), (KEY_HEADER.encode(), KEY.encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "root_path": ""}
    middleware = ReplicaMiddleware(app, engine_environ(tmp_path, moto_bucket.environ))
    asyncio.run(middleware(scope, receive, send))  # type: ignore[arg-type]
    assert seen == [(scope, receive, send)]
