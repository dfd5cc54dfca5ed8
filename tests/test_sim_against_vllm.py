"""The simulated engine beside a real vLLM: the same requests, the same answers, down to words, shapes and key order."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from jobs import tokens
from jobs.bucket import Bucket
from jobs.http import KEY_HEADER
from jobs.tiny import build
from tests.adapters import write_adapter
from tests.engines import KEY, Engine, engine_environ, publish, running, sim_command, vllm_command

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def bucket(moto_endpoint: str) -> Bucket:
    import boto3

    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret"}
    client = boto3.client(
        "s3",
        endpoint_url=moto_endpoint,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test-secret",
    )
    client.create_bucket(Bucket="against-vllm")
    return Bucket.from_env({**keys, "AWS_ENDPOINT_URL": moto_endpoint, "ASYNCGRPO_BUCKET": "s3://against-vllm"})


@pytest.fixture(scope="module")
def engines(bucket: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """(simulated, real)."""
    folder = tmp_path_factory.mktemp("engines")
    model = str(build("digit"))
    environ = {**bucket.settings.environment(), **bucket.settings.secrets()}
    raw = ("--middleware", "tests.raw_paths.RawPaths")
    ports = [_free_port(), _free_port()]
    with (
        running(
            vllm_command(ports[1], model, *raw), engine_environ(folder / "vllm", environ), ports[1], folder / "vllm.log"
        ) as real,
        running(
            sim_command(ports[0], *raw, model=model),
            engine_environ(folder / "sim", environ),
            ports[0],
            folder / "sim.log",
        ) as sim,
    ):
        yield sim, real


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters in every state that a directory can be found in."""
    root = tmp_path_factory.mktemp("adapters")
    for name in ("fine", "other", "no-tensors", "cut", "no-header", "tiny-file", "empty", "bad-config", "no-config"):
        write_adapter(root / name, seed=len(name))
    write_adapter(root / "r16", rank=16)
    write_adapter(root / "dora", use_dora=True)
    write_adapter(root / "modules", modules_to_save=["lm_head"])
    write_adapter(root / "bias", bias="all")
    whole = (root / "fine" / WEIGHTS).read_bytes()
    (root / "no-tensors" / WEIGHTS).unlink()
    (root / "cut" / WEIGHTS).write_bytes(whole[:-100])
    (root / "no-header" / WEIGHTS).write_bytes(whole[:100])
    (root / "tiny-file" / WEIGHTS).write_bytes(b"abc")
    (root / "empty" / WEIGHTS).write_bytes(b"")
    (root / "bad-config" / CONFIG).write_text('{"r": 8 "lora_alpha": 16}')
    (root / "no-config" / CONFIG).unlink()
    return root


def completion(**fields: Any) -> tuple[str, str, dict[str, Any]]:
    return "POST", "/v1/completions", {"model": "tiny", "max_tokens": 4, "ignore_eos": True, **fields}


def load(name: str, path: str, **more: Any) -> tuple[str, str, dict[str, Any]]:
    return "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **more}


def unload(name: str) -> tuple[str, str, dict[str, Any]]:
    return "POST", "/v1/unload_lora_adapter", {"lora_name": name}


LOADS = [
    load("fine", "raw:fine"),
    load("fine", "raw:fine"),
    load("fine", "raw:other"),
    load("tiny", "raw:fine"),
    load("", "raw:fine"),
    load("absent", "raw:nowhere"),
    *(load(name, f"raw:{name}") for name in ("no-tensors", "cut", "no-header", "tiny-file", "empty", "bad-config")),
    *(load(name, f"raw:{name}") for name in ("no-config", "r16", "dora", "modules", "bias")),
    load("inplace", "raw:fine", load_inplace=True),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "x"}),
    ("GET", "/v1/models", None),
    unload("nobody"),
    unload(""),
    unload("fine"),
    unload("fine"),
    completion(model="fine", prompt=PROMPT),
    load("fine", "raw:fine"),
    completion(model="fine", prompt=PROMPT, logprobs=0, return_token_ids=True, seed=1),
    unload("fine"),
    ("GET", "/v1/models", None),
]

COMPLETIONS = [
    completion(prompt=PROMPT),
    completion(prompt=PROMPT, logprobs=0, return_token_ids=True, seed=1, n=1, temperature=1.0, top_p=1.0, top_k=-1),
    completion(prompt=PROMPT, logprobs=2),
    completion(prompt=PROMPT, logprobs=5, return_tokens_as_token_ids=True, temperature=0.0),
    completion(prompt="Ticket 7"),
    completion(prompt=["ab", "cde"], n=2),
    completion(prompt=[[5, 6], [7, 8, 9]], temperature=0),
    completion(prompt=PROMPT, max_tokens=None),
    completion(prompt=PROMPT, prompt_logprobs=0),
    completion(prompt=PROMPT[:3], echo=True, logprobs=1, max_tokens=0),
    completion(prompt=PROMPT[:3], echo=True, logprobs=0, max_tokens=1),
    completion(prompt=PROMPT[:3], echo=True, logprobs=0, max_tokens=1, return_token_ids=True),
    completion(prompt=PROMPT, stop_token_ids=list(range(99)), seed=3),
    completion(prompt=PROMPT, stop=[chr(code) for code in range(32, 36)], max_tokens=1),
    completion(prompt=[5] * 255, max_tokens=1),
    completion(prompt=PROMPT, stream=True, logprobs=0, return_token_ids=True),
    completion(prompt=PROMPT, stream=True, stream_options={"include_usage": True}),
    completion(prompt=["ab", "cd"], n=2, stream=True, max_tokens=2),
]

REFUSALS = [
    completion(prompt=PROMPT, model="nobody"),
    completion(prompt=PROMPT, model="nobody", stream=True),
    completion(prompt=PROMPT, max_tokens=250),
    completion(prompt=[5] * 256, max_tokens=1),
    completion(prompt=[5] * 300, max_tokens=1),
    completion(prompt=[1, 2, 500]),
    completion(prompt=[]),
    completion(),
    completion(prompt=""),
    completion(prompt=[1.5, "x"]),
    completion(prompt=[-1]),
    completion(prompt=PROMPT, max_tokens=0),
    completion(prompt=PROMPT, max_tokens=-1),
    completion(prompt=PROMPT, n=0),
    completion(prompt=PROMPT, temperature=-1.0),
    completion(prompt=PROMPT, top_p=0.0),
    completion(prompt=PROMPT, logprobs=-2),
    completion(prompt=PROMPT, logprobs="x"),
    completion(prompt=PROMPT, logprobs=30),
    completion(prompt=PROMPT, seed="x"),
    completion(prompt=PROMPT, seed=2**63),
    completion(prompt=PROMPT, stop=list("abcde")),
    completion(prompt=PROMPT, stream_options={"include_usage": True}),
    ("POST", "/v1/completions", [1]),
    ("GET", "/v1/completions", None),
    ("GET", "/nowhere", None),
]

CONTROL = [
    ("GET", "/health", None),
    ("GET", "/version", None),
    ("POST", "/pause?mode=keep", None),
    ("GET", "/is_paused", None),
    ("POST", "/resume", None),
    ("GET", "/is_paused", None),
    ("POST", "/pause?mode=sometimes", None),
    ("POST", "/reset_prefix_cache", None),
    ("POST", "/tokenize", {"model": "tiny", "prompt": "Ticket 7"}),
    ("GET", "/asyncgrpo/replica", None),
]

TABLE = LOADS + COMPLETIONS + REFUSALS + CONTROL


@pytest.mark.parametrize("request_", TABLE, ids=[f"{i}-{json.dumps(r)[:70]}" for i, r in enumerate(TABLE)])
def test_both_answer_alike(engines: tuple[Engine, Engine], adapters: Path, request_: tuple[str, str, Any]) -> None:
    method, path, body = request_
    if isinstance(body, dict) and str(body.get("lora_path", "")).startswith("raw:"):
        body = {**body, "lora_path": f"raw:{adapters / body['lora_path'].removeprefix('raw:')}"}
    if path == tokens.PATH and isinstance(body, dict) and tokens.plain(body):
        body = {**body, "user": "anybody"}  # vLLM's own answer, not that of jobs.tokens
    sim, real = (
        shape(engine.call(method, path, json=body) if body is not None else engine.call(method, path))
        for engine in engines
    )
    assert sim == real


def test_both_refuse_what_is_no_json(engines: tuple[Engine, Engine]) -> None:
    for content_type in ("application/json", "text/plain"):
        headers = {KEY_HEADER: KEY, "content-type": content_type}
        sim, real = (shape(engine.call("POST", "/v1/completions", data="{", headers=headers)) for engine in engines)
        assert sim == real


def test_both_refuse_without_the_key(engines: tuple[Engine, Engine]) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        for path in ("/health", "/server_info", "/v1/completions", "/pause", "/adapters"):
            for headers in ({}, {KEY_HEADER: "f" * 64}):
                sim, real = (shape(engine.call(method, path, headers=headers)) for engine in engines)
                assert sim == real
                assert real[0] == 401


def test_server_info_has_what_trl_reads(engines: tuple[Engine, Engine]) -> None:
    sim, real = (engine.get("/server_info?config_format=json").json()["vllm_config"] for engine in engines)
    for section, values in sim.items():
        known = {name: real[section][name] for name in values}
        assert known == values, section
    assert {"max_lora_rank", "max_loras"} <= set(sim["lora_config"])


def test_a_published_adapter_is_loaded_by_its_manifest(
    engines: tuple[Engine, Engine], adapters: Path, bucket: Bucket
) -> None:
    where = publish(bucket, adapters / "fine", "run.1.v1")
    for engine in engines:
        answer = engine.post("/v1/load_lora_adapter", {"lora_name": "run.1.v1", "lora_path": where})
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'run.1.v1' added successfully.")
    sim, real = (engine.get("/asyncgrpo/replica").json() for engine in engines)
    assert sim["adapters"] == real["adapters"] and len(real["adapters"]["run.1.v1"]) == 64
    for engine in engines:
        assert engine.post("/v1/unload_lora_adapter", {"lora_name": "run.1.v1"}).status_code == 200


def test_vllm_serves_what_peft_computes(engines: tuple[Engine, Engine], adapters: Path, bucket: Bucket) -> None:
    """Log-probabilities of a completion under an adapter, against transformers and PEFT with the same files."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    _, real = engines
    where = publish(bucket, adapters / "other", "run.1.v2")
    assert real.post("/v1/load_lora_adapter", {"lora_name": "run.1.v2", "lora_path": where}).status_code == 200
    asked = {"prompt": PROMPT, "max_tokens": 16, "logprobs": 0, "return_token_ids": True, "seed": 5}
    choice = real.post("/v1/completions", {"model": "run.1.v2", **asked}).json()["choices"][0]
    base = AutoModelForCausalLM.from_pretrained(build("digit"), dtype=torch.float32)
    ids = torch.tensor([PROMPT + choice["token_ids"]])
    picked = torch.tensor(choice["token_ids"])[:, None]

    def scores(model: Any) -> Any:
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1]
        return torch.log_softmax(logits, -1).gather(1, picked)[:, 0]

    served = torch.tensor(choice["logprobs"]["token_logprobs"])
    far = (scores(base) - served).abs().max()
    near = (scores(PeftModel.from_pretrained(base, adapters / "other")) - served).abs().max()
    assert near < 1e-4 < 0.05 < far


def load_copy(engine: Engine, adapter: Path, folder: Path, name: str) -> Path:
    """Loads a copy of the adapter of its own into the engine; returns where it lies."""
    copy = folder / str(engine.process.pid) / name
    shutil.copytree(adapter, copy)
    loaded = {"lora_name": name, "lora_path": f"raw:{copy}"}
    assert engine.post("/v1/load_lora_adapter", loaded).status_code == 200
    return copy


def test_what_was_unloaded_is_never_read_again(engines: tuple[Engine, Engine], adapters: Path, tmp_path: Path) -> None:
    """More adapters than the engine caches come after one whose files have gone."""
    for engine in engines:
        for number in range(10):
            folder = load_copy(engine, adapters / "fine", tmp_path, f"u{number}")
            answer = engine.post("/v1/completions", {"model": f"u{number}", "prompt": PROMPT, "max_tokens": 2})
            assert answer.status_code == 200
            assert engine.post("/v1/unload_lora_adapter", {"lora_name": f"u{number}"}).status_code == 200
            shutil.rmtree(folder)
        assert engine.get("/health").status_code == 200


def test_both_end_when_an_evicted_adapter_is_gone(
    engines: tuple[Engine, Engine], adapters: Path, tmp_path: Path
) -> None:
    """Last, for it ends both engines."""
    for engine in engines:
        for number in range(10):
            load_copy(engine, adapters / "fine", tmp_path, f"e{number}")
        shutil.rmtree(tmp_path / str(engine.process.pid) / "e0")
    sim, real = (shape(engine.post("/v1/completions", {"model": "e0", "prompt": PROMPT})) for engine in engines)
    assert sim == real and real[0] == 500
    for engine in engines:
        engine.process.wait(10)


def shape(answer: requests.Response) -> tuple[int, str | None, Any]:
    """Status, content type and body, with what may differ (ids, times, samples) replaced by its type."""
    kind = answer.headers.get("content-type")
    if kind and kind.startswith("text/event-stream"):
        events = [event.removeprefix("data: ") for event in answer.text.strip().split("\n\n")]
        assert events.pop() == "[DONE]"
        # vLLM puts the tokens of several steps into one event when its server is behind: how many there are is chance.
        sequences: dict[Any, Any] = {}
        for each in map(json.loads, events):
            index = each["choices"][0]["index"] if each.get("choices") else None
            sequences[index] = _joined(sequences.get(index), each)
        shapes = {index: _one_of_each(json.dumps(_shape(each))) for index, each in sequences.items()}
        return answer.status_code, kind, sorted(shapes.items(), key=repr)
    if kind == "application/json":
        return answer.status_code, kind, _shape(answer.json())
    return answer.status_code, kind, answer.text


def _joined(before: Any, then: Any) -> Any:
    """Two events of one sequence as one: lists are joined, what is null is as before, keys are the later's."""
    if isinstance(before, dict) and isinstance(then, dict):
        assert list(before) == [name for name in then if name in before], "an event has a key that later ones lack"
        return {name: _joined(before.get(name), value) for name, value in then.items()}
    if isinstance(before, list) and isinstance(then, list):
        if before and isinstance(before[0], dict) and "index" in before[0]:
            return [_joined(*pair) for pair in zip(before, then, strict=True)]
        return before + then
    return before if then is None else then


def _one_of_each(shape: str) -> str:
    """A shape whose lists of alike values have one of them."""
    return re.sub(r'("\w+"|\b\d+\b)(, \1)+', r"\1", shape)


EXACT = {"object", "finish_reason", "message", "type", "param", "code", "model", "owned_by", "parent", "root", "status"}
EXACT |= {"prompt_tokens", "total_tokens", "completion_tokens", "max_model_len", "version", "detail", "index", "error"}
EXACT |= {"is_paused", "success", "dtype", "max_loras", "max_lora_rank", "ready", "prompt_token_ids", "count"}


def _shape(value: Any, key: str = "") -> Any:
    if key == "message" and "validation error" in value:
        return "validation error"
    if key == "top_logprobs" and isinstance(value, list):
        return [each and len(each) for each in value]
    if key == "prompt_logprobs" and isinstance(value, list):
        return [each and [len(each), *_shape(next(iter(each.values())))] for each in value]
    if isinstance(value, dict):
        return [(name, _shape(inner, name)) for name, inner in value.items()]
    if isinstance(value, list) and key not in EXACT:
        return [_shape(each) for each in value]
    return value if key in EXACT or value is None else type(value).__name__
