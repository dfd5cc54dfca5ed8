"""The simulated engine: time, slots, pauses, scripted faults. Its likeness to vLLM has a module of its own."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests

from tests.adapters import write_adapter
from tests.engines import Engine, engine_environ, running, sim_command

PROMPT = list(range(5, 25))
ASK = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}


@contextmanager
def started(folder: Path, port: int, *flags: str) -> Iterator[Engine]:
    with running(sim_command(port, *flags), engine_environ(folder, {}), port, folder / "log") as engine:
        yield engine


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    with started(tmp_path_factory.mktemp("sim"), port) as engine:
        yield engine


@pytest.fixture
def sim(shared: Engine) -> Iterator[Engine]:
    """An engine in which no time passes, as it was when it started."""
    yield shared
    shared.post("/resume")
    shared.post("/sim/reset", {})
    for card in shared.get("/v1/models").json()["data"][1:]:
        shared.post("/v1/unload_lora_adapter", {"lora_name": card["id"]})


def complete(engine: Engine, **fields: Any) -> dict[str, Any]:
    answer = engine.post("/v1/completions", {**ASK, **fields})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def load(engine: Engine, name: str, directory: Path) -> None:
    answer = engine.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})
    assert answer.status_code == 200, answer.text


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_samples_follow_from_seed_prompt_and_adapter(sim: Engine, tmp_path: Path) -> None:
    load(sim, "zero", write_adapter(tmp_path / "zero", scale=0))
    load(sim, "one", write_adapter(tmp_path / "one", seed=1))
    load(sim, "two", write_adapter(tmp_path / "two", seed=2))
    answers = {name: complete(sim, model=name, seed=1, temperature=0) for name in ("tiny", "zero", "one", "two")}
    scores = {name: answer["logprobs"]["token_logprobs"] for name, answer in answers.items()}
    assert scores["zero"] == scores["tiny"]
    assert scores["one"] != scores["tiny"] and scores["two"] not in (scores["tiny"], scores["one"])
    assert complete(sim, seed=7)["token_ids"] == complete(sim, seed=7)["token_ids"]
    assert complete(sim, seed=7)["token_ids"] != complete(sim, seed=8)["token_ids"]
    assert complete(sim, seed=7)["token_ids"] != complete(sim, seed=7, prompt=PROMPT[1:])["token_ids"]
    assert complete(sim)["token_ids"] != complete(sim)["token_ids"]


def test_scoring_agrees_with_sampling(sim: Engine) -> None:
    sampled = complete(sim, seed=1)
    whole = complete(sim, prompt=PROMPT + sampled["token_ids"], max_tokens=1, prompt_logprobs=0)
    scored = [next(iter(each.values()))["logprob"] for each in whole["prompt_logprobs"][len(PROMPT) :]]
    assert scored == pytest.approx(sampled["logprobs"]["token_logprobs"])


def test_slots_are_read_again_from_disk(sim: Engine, tmp_path: Path) -> None:
    for number in range(12):  # more than --max-cpu-loras
        load(sim, f"a{number}", write_adapter(tmp_path / str(number), seed=number))
    first = complete(sim, model="a0", temperature=0)
    for number in range(12):
        complete(sim, model=f"a{number}")
    assert complete(sim, model="a0", temperature=0) == first


def test_the_prefix_cache_has_blocks_of_16_by_adapter(tmp_path: Path, free_port: int) -> None:
    with started(tmp_path, free_port, "--enable-prompt-tokens-details") as engine:
        load(engine, "v1", write_adapter(tmp_path / "v1"))

        def cached(model: str, prompt: list[int]) -> int:
            answer = engine.post("/v1/completions", {**ASK, "model": model, "prompt": prompt}).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        prompt = [token % 90 for token in range(40)]
        assert [cached("tiny", prompt), cached("tiny", prompt)] == [0, 32]
        assert cached("tiny", prompt[:32]) == 16  # the last token is always computed
        assert cached("tiny", [89, *prompt[1:]]) == 0
        assert [cached("v1", prompt), cached("v1", prompt)] == [0, 32]
        engine.post("/pause?mode=keep")
        engine.post("/resume")
        assert cached("tiny", prompt) == 0


def test_tokens_and_loads_take_their_time(tmp_path: Path, free_port: int) -> None:
    flags = ("--sim-prefill-tokens-per-s", "200", "--sim-decode-tokens-per-s", "40", "--sim-load-s", "0.3")
    with started(tmp_path, free_port, *flags) as engine:
        begun = time.monotonic()
        load(engine, "v1", write_adapter(tmp_path / "v1"))
        assert 0.3 <= time.monotonic() - begun < 1.3
        begun = time.monotonic()
        complete(engine)
        assert 0.3 <= time.monotonic() - begun < 1.3  # 20 tokens read, 8 written
        arrivals = []
        with engine.post("/v1/completions", {**ASK, "stream": True}, stream=True) as answer:
            for line in answer.iter_lines(chunk_size=1):
                if line.startswith(b"data: {"):
                    arrivals.append(time.monotonic())
        gaps = [later - earlier for earlier, later in pairwise(arrivals)]
        assert len(gaps) == 7 and min(gaps) > 0.01


def test_only_so_many_sequences_run_at_a_time(tmp_path: Path, free_port: int) -> None:
    with started(tmp_path, free_port, "--max-num-seqs", "2", "--sim-decode-tokens-per-s", "40") as engine:
        begun = time.monotonic()
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda _: complete(engine), range(6)))
        assert time.monotonic() - begun >= 0.6  # three rounds of 0.2 s


def test_thousands_of_requests_wait_at_once(tmp_path: Path, free_port: int) -> None:
    flags = ("--max-num-seqs", "3000", "--sim-decode-tokens-per-s", "2")
    with started(tmp_path, free_port, *flags) as engine:

        async def flood(count: int) -> list[int]:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:

                async def one(seed: int) -> int:
                    body = {**ASK, "max_tokens": 6, "seed": seed}
                    async with session.post(f"{engine.url}/v1/completions", json=body) as answer:
                        return len((await answer.json())["choices"][0]["token_ids"])

                return await asyncio.gather(*(one(seed) for seed in range(count)))

        assert asyncio.run(flood(2000)) == [6] * 2000
        log = engine.get("/sim/log").json()
        assert log["peak"] == 2000 and log["in_flight"] == 0


def test_a_pause_holds_what_runs_until_resume(sim: Engine) -> None:
    sim.post("/pause?mode=keep")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, sim)
        wait_until(lambda: sim.get("/sim/log").json()["in_flight"] == 1)
        assert not waiting.done()
        sim.post("/resume")
        assert len(waiting.result(10)["token_ids"]) == 8


def test_a_stop_answers_with_what_there_is(tmp_path: Path, free_port: int) -> None:
    """As vLLM does on SIGTERM: status 200, some tokens, finish_reason abort."""
    with started(tmp_path, free_port, "--sim-decode-tokens-per-s", "10") as engine, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, engine, max_tokens=200)
        wait_until(lambda: engine.get("/sim/log").json()["in_flight"] == 1)
        os.kill(engine.process.pid, signal.SIGTERM)
        choice = waiting.result(10)
        assert choice["finish_reason"] == "abort" and len(choice["token_ids"]) < 200
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
        assert engine.process.wait(10) in (0, -signal.SIGTERM)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(tmp_path: Path, free_port: int, stream: bool) -> None:
    with started(tmp_path, free_port, "--sim-decode-tokens-per-s", "5") as engine:
        asked = {**ASK, "max_tokens": 200, "stream": stream}
        if stream:
            answer = engine.post("/v1/completions", asked, stream=True)
            next(answer.iter_lines())
            answer.close()
        else:

            def leave(_: int) -> None:
                with pytest.raises(requests.Timeout):
                    engine.post("/v1/completions", asked, timeout=0.5)

            with ThreadPoolExecutor(20) as pool:
                list(pool.map(leave, range(20)))
        wait_until(lambda: engine.get("/sim/log").json()["in_flight"] == 0)
        events = engine.get("/sim/log").json()["events"]
        assert {event["outcome"] for event in events} == {"dropped"}
        assert len(events) == (1 if stream else 20)


def fault(engine: Engine, **fields: Any) -> None:
    assert engine.post("/sim/fault", fields).status_code == 200


def test_loads_fail_as_often_as_told(sim: Engine, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    fault(sim, where="load", count=2, model="v1", status=500, message="out of slots")
    load(sim, "v0", directory)
    for _ in range(2):
        answer = sim.post("/v1/load_lora_adapter", {"lora_name": "v1", "lora_path": str(directory)})
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "out of slots")
    load(sim, "v1", directory)
    statuses = [(event["model"], event["status"]) for event in sim.get("/sim/log").json()["events"]]
    assert statuses == [("v0", 200), ("v1", 500), ("v1", 500), ("v1", 200)]


@pytest.mark.parametrize("where", ["load", "completion"])
@pytest.mark.parametrize("close", ["at once", "after headers", "midway"])
def test_connections_break_where_told(sim: Engine, tmp_path: Path, where: str, close: str) -> None:
    directory = write_adapter(tmp_path / "a")
    fault(sim, where=where, close=close)
    path = "/v1/load_lora_adapter" if where == "load" else "/v1/completions"
    body = {"lora_name": "v1", "lora_path": str(directory)} if where == "load" else ASK
    with pytest.raises((requests.ConnectionError, requests.exceptions.ChunkedEncodingError)):
        sim.post(path, body)
    assert sim.post(path, body).status_code == 200


def test_a_stream_breaks_midway(sim: Engine) -> None:
    fault(sim, where="completion", close="midway")
    with pytest.raises((requests.ConnectionError, requests.exceptions.ChunkedEncodingError)):
        sim.post("/v1/completions", {**ASK, "stream": True})


def test_answers_are_wrong_as_told(sim: Engine, tmp_path: Path) -> None:
    load(sim, "v1", write_adapter(tmp_path / "a"))
    right = complete(sim, model="v1", temperature=0)
    fault(sim, where="completion", model="v1", base=True)
    assert complete(sim, model="v1", temperature=0)["logprobs"] == complete(sim, temperature=0)["logprobs"]
    fault(sim, where="completion", finish_reason="abort")
    aborted = complete(sim, model="v1", temperature=0)
    assert aborted["finish_reason"] == "abort" and aborted["token_ids"] == right["token_ids"][:4]
    fault(sim, where="completion", unequal=True)
    unequal = complete(sim, model="v1")
    assert len(unequal["logprobs"]["token_logprobs"]) == len(unequal["token_ids"]) - 1
    fault(sim, where="completion", status=503, message="busy")
    assert sim.post("/v1/completions", ASK).status_code == 503
    assert complete(sim, model="v1", temperature=0) == right


def test_a_hanging_request_hangs_alone(sim: Engine) -> None:
    fault(sim, where="completion", hang=True)
    with pytest.raises(requests.Timeout):
        sim.post("/v1/completions", ASK, timeout=0.3)
    assert complete(sim)["finish_reason"] == "length"


@pytest.mark.parametrize(
    "fields", [{}, {"where": "dinner"}, {"where": "load", "colour": 1}, {"where": "load", "close": "x"}]
)
def test_a_fault_that_is_none_is_refused(sim: Engine, fields: dict[str, Any]) -> None:
    assert sim.post("/sim/fault", fields).status_code == 400


def test_the_log_says_what_was_asked(sim: Engine, tmp_path: Path) -> None:
    load(sim, "v1", write_adapter(tmp_path / "a"))
    complete(sim, model="v1", seed=3)
    sim.post("/v1/completions", {**ASK, "model": "v9"})
    loaded, answered, refused = sim.get("/sim/log").json()["events"]
    assert loaded["event"] == "load" and len(loaded["digest"]) == 64
    assert (answered["model"], answered["prompt_tokens"], answered["completion_tokens"]) == ("v1", 20, 8)
    assert (answered["outcome"], answered["seed"], answered["finish_reasons"]) == ("answered", 3, ["length"])
    assert (refused["outcome"], refused["status"]) == ("refused", 404)


def test_endpoints_are_closed_unless_opened(tmp_path: Path, free_port: int) -> None:
    environ = {**engine_environ(tmp_path, {}), "VLLM_SERVER_DEV_MODE": "0", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}
    with running(sim_command(free_port), environ, free_port, tmp_path / "log") as engine:
        for path in ("/pause", "/v1/load_lora_adapter"):
            answer = engine.post(path, {})
            assert (answer.status_code, json.loads(answer.text)) == (404, {"detail": "Not Found"})
