"""A simulated inference server: `python -m emulator.sim_engine --model ... --port ...` with the flags of `vllm serve`.

It answers as vLLM 0.31 does (statuses, words, shapes: compared in the tests), reads real adapters, takes the time of a
real engine if told to (`--sim-*` flags, or ASYNCGRPO_SIM_* variables), and holds thousands of requests at a time. What
it says is a sample of `sim_model`'s tiny language; top_p, top_k, min_p and penalties are accepted and not applied. For
tests it also answers POST /sim/fault, POST /sim/reset and GET /sim/log.
"""

import argparse
import asyncio
import importlib
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from emulator import sim_answers as answers
from emulator.sim_faults import Close, Fault
from emulator.sim_model import Sampled, tokenize
from emulator.sim_requests import Completion, Refused, completion, field, invalid, read_json
from emulator.sim_state import ABORT, Emit, Engine, EngineDead, Settings, settings_of_model

Handler = Callable[[Request], Awaitable[Response]]

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
"""What vLLM answers when its engine has died."""


class Dropped(Response):
    """Closes the connection before, at or in the middle of the answer that it stands for."""

    def __init__(self, close: Close, body: bytes) -> None:
        super().__init__(body, media_type="application/json")
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends as much as it is to send, and ends the connection."""
        if self.close != "at once":
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            part = self.body[: len(self.body) // 2] if self.close == "midway" else b""
            await send({"type": "http.response.body", "body": part, "more_body": True})
        scope["sim.transport"].close()
        await _gone(receive)


class Wire:
    """The HTTP side of one engine."""

    def __init__(self, engine: Engine, shut: Callable[[], None]) -> None:
        self.engine = engine
        self._shut = shut

    def routes(self, environ: Mapping[str, str]) -> list[tuple[str, str, Handler]]:
        """The paths that the flags in the environment open, as vLLM reads them."""
        served: list[tuple[str, str, Handler]] = [
            ("GET", "/health", self.health),
            ("GET", "/version", self.version),
            ("GET", "/v1/models", self.models),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/sim/fault", self.fault),
            ("POST", "/sim/reset", self.reset),
            ("GET", "/sim/log", self.log),
        ]
        if environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1":
            served += [("POST", "/v1/load_lora_adapter", self.load), ("POST", "/v1/unload_lora_adapter", self.unload)]
        if environ.get("VLLM_SERVER_DEV_MODE") == "1":
            served += [
                ("POST", "/pause", self.pause),
                ("POST", "/resume", self.resume),
                ("GET", "/is_paused", self.is_paused),
                ("POST", "/reset_prefix_cache", self.reset_prefix_cache),
                ("GET", "/server_info", self.server_info),
            ]
        return served

    async def health(self, request: Request) -> Response:
        """200 and nothing, or 503 once the engine has died."""
        await self.engine.faults.meet("health", "")
        return Response(status_code=503 if self.engine.dead else 200)

    async def version(self, request: Request) -> Response:
        """The version of vLLM that it answers like."""
        return JSONResponse({"version": "0.31.0"})

    async def models(self, request: Request) -> Response:
        """The base model, then the adapters in the order of their loads."""
        settings = self.engine.settings
        cards = [answers.model_card(settings.served, settings.model, None, settings.max_model_len)]
        for name, adapter in self.engine.adapters.items():
            cards.append(answers.model_card(name, str(adapter.path), settings.served, None))
        return JSONResponse({"object": "list", "data": cards})

    async def tokenize(self, request: Request) -> Response:
        """Tokens of a text."""
        tokens = tokenize(field(read_json(request.headers.get("content-type", ""), await request.body()), "prompt"))
        limit = self.engine.settings.max_model_len
        return JSONResponse({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None})

    async def server_info(self, request: Request) -> Response:
        """The part of vLLM's configuration that TRL and others read."""
        config = configuration(self.engine.settings)
        shown = config if request.query_params.get("config_format") == "json" else str(config)
        return JSONResponse({"vllm_config": shown, "vllm_env": {}, "system_env": {}})

    async def load(self, request: Request) -> Response:
        """Loads an adapter from a directory of this machine."""
        body = read_json(request.headers.get("content-type", ""), await request.body())
        name, path = field(body, "lora_name"), field(body, "lora_path")
        try:
            fault = await self.engine.faults.meet("load", name)
            if fault and fault.close:
                return Dropped(fault.close, b"Success: LoRA adapter")
            await self.engine.load(name, path, bool(body.get("load_inplace")))
        except Refused as error:
            self.engine.note("load", model=name, status=error.status, message=str(error))
            raise
        self.engine.note("load", model=name, status=200, digest=self.engine.adapters[name].digest)
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Forgets an adapter's name."""
        name = field(read_json(request.headers.get("content-type", ""), await request.body()), "lora_name")
        await self.engine.faults.meet("unload", name)
        await self.engine.unload(name)
        self.engine.note("unload", model=name, status=200)
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    async def pause(self, request: Request) -> Response:
        """Stops generation; the mode is that of vLLM."""
        mode = request.query_params.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise invalid("literal_error", "query.mode", "Input should be 'abort', 'wait' or 'keep'", mode)
        if mode == "wait":
            await asyncio.gather(*self.engine.running, return_exceptions=True)
        self.engine.pause(mode)
        self.engine.note("pause", mode=mode)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """Lets generation go on."""
        self.engine.resume()
        self.engine.note("resume")
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """Whether it is stopped."""
        return JSONResponse({"is_paused": self.engine.paused})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Empties the prefix cache."""
        self.engine.forget_prefixes()
        return JSONResponse({"success": True})

    async def completions(self, request: Request) -> Response:
        """Completes prompts, whole or streamed."""
        body = read_json(request.headers.get("content-type", ""), await request.body())
        model = str(body.get("model"))
        try:
            fault = await self.engine.faults.meet("completion", model)
            ask = completion(body, self.engine.settings.limits(), self.engine.adapters)
        except Refused as error:
            self.engine.note("completion", model=model, outcome="refused", status=error.status)
            raise
        if ask.stream:
            events = self._events(ask, fault)
            if fault and fault.close:
                whole = b"".join([part async for part in events])
                return Dropped(fault.close, whole)
            return StreamingResponse(events, media_type="text/event-stream")
        content = await self._whole(ask, fault)
        encoded = json.dumps(content, separators=(",", ":")).encode()
        if fault and fault.close:
            return Dropped(fault.close, encoded)
        return Response(encoded, media_type="application/json")

    async def _whole(self, ask: Completion, fault: Fault | None) -> dict[str, Any]:
        engine = self.engine
        adapter = engine.adapters.get(ask.model)
        tasks = [engine.start(ask, index, fault, None) for index in range(len(ask.prompts) * ask.n)]
        sequences: list[Sampled] = []
        try:
            sequences = [await task for task in tasks]
            table = engine.table(adapter)
        except EngineDead:
            self._shut()
            raise Refused(DEAD, 500, "InternalServerError") from None
        finally:
            for task in tasks:
                task.cancel()
            self._note(ask, sequences)
        details = engine.settings.prompt_tokens_details
        content = answers.answer(ask, table, engine.settings.end, sequences, details)
        if fault and fault.unequal:
            content["choices"][0]["logprobs"]["token_logprobs"].pop()
        return content

    async def _events(self, ask: Completion, fault: Fault | None) -> AsyncIterator[bytes]:
        due: asyncio.Queue[tuple[int, Sampled, int] | None] = asyncio.Queue()
        count = len(ask.prompts) * ask.n

        def emit(index: int) -> Emit:
            return lambda sampled, at: due.put_nowait((index, sampled, at))

        tasks = [self.engine.start(ask, index, fault, emit(index)) for index in range(count)]
        for task in tasks:
            task.add_done_callback(lambda _: due.put_nowait(None))
        name, left, sequences = answers.identifier("cmpl"), count, list[Sampled]()
        try:
            while left:
                told = await due.get()
                if told is None:
                    left -= 1
                    continue
                index, sampled, at = told
                yield _event(answers.event(ask, name, index, sampled, at, self.engine.settings.end))
            sequences = [task.result() for task in tasks]
            for index, sampled in enumerate(sequences):
                if sampled.finish_reason == ABORT:
                    yield _event(answers.last_event(ask, name, index, sampled))
            if ask.usage:
                yield _event(answers.usage_event(ask, name, sequences))
        except EngineDead:
            self._shut()
            yield _event(Refused(DEAD, 500, "InternalServerError").content())
        finally:
            for task in tasks:
                task.cancel()
            self._note(ask, sequences)
        yield b"data: [DONE]\n\n"

    def _note(self, ask: Completion, sequences: list[Sampled]) -> None:
        """Logs a completion: answered if all of its sequences are there, else its client left or the engine died."""
        self.engine.note(
            "completion",
            model=ask.model,
            outcome="answered" if sequences else "dropped",
            prompt_tokens=sum(map(len, ask.prompts)),
            cached_tokens=sum(sampled.cached_tokens for sampled in sequences),
            completion_tokens=sum(len(sampled.tokens) for sampled in sequences),
            finish_reasons=[sampled.finish_reason for sampled in sequences],
            seed=ask.seed,
        )

    async def fault(self, request: Request) -> Response:
        """Scripts a fault; see `sim_faults.Fault` for the fields."""
        self.engine.faults.add(Fault.read(read_json(request.headers.get("content-type", ""), await request.body())))
        return JSONResponse({})

    async def reset(self, request: Request) -> Response:
        """Takes back the faults that have not come, and empties the log."""
        self.engine.faults.clear()
        self.engine.events.clear()
        return JSONResponse({})

    async def log(self, request: Request) -> Response:
        """What happened since the start or the last reset, and what is going on."""
        engine = self.engine
        now = {"in_flight": len(engine.running), "peak": engine.peak, "paused": engine.paused}
        return JSONResponse({**now, "hanging": engine.faults.hanging, "events": list(engine.events)})


class Server(uvicorn.Server):
    """Ends like vLLM: told to end, it answers what is in flight with what there is."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Aborts all sequences and begins to shut down."""
        self._engine.abort()
        super().handle_exit(sig, frame)


def application(engine: Engine, shut: Callable[[], None], environ: Mapping[str, str], middleware: list[str]) -> ASGIApp:
    """The server's ASGI application; `middleware` names classes as vLLM's --middleware does."""
    wire = Wire(engine, shut)
    app = Starlette(
        routes=[Route(path, _unless_gone(handler), methods=[method]) for method, path, handler in wire.routes(environ)],
        exception_handlers={HTTPException: _http_error, Refused: _refused},
    )
    app.state.vllm_config = SimpleNamespace(
        **{name: SimpleNamespace(**values) for name, values in configuration(engine.settings).items() if values}
    )
    for name in middleware:
        module, _, attribute = name.rpartition(".")
        app.add_middleware(getattr(importlib.import_module(module), attribute))

    async def outermost(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["sim.transport"] = receive.__self__.transport  # type: ignore[attr-defined]
        await app(scope, receive, send)

    return outermost


def configuration(settings: Settings) -> dict[str, Any]:
    """The fields of vLLM's configuration that its clients read."""
    lora = {name: getattr(settings, name) for name in ("max_lora_rank", "max_loras", "max_cpu_loras")}
    return {
        "model_config": {
            "model": settings.model,
            "served_model_name": settings.served,
            "max_model_len": settings.max_model_len,
            "dtype": f"torch.{settings.dtype}",
        },
        "parallel_config": {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        "scheduler_config": {"max_num_seqs": settings.max_num_seqs},
        "lora_config": lora if settings.enable_lora else None,
    }


def _unless_gone(handler: Handler) -> Handler:
    """Ends the handler's work when its client leaves, as vLLM does."""

    async def wrapped(request: Request) -> Response:
        await request.body()
        work = asyncio.ensure_future(handler(request))
        gone = asyncio.ensure_future(_gone(request.receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            return Response(status_code=499)
        finally:
            gone.cancel()
            work.cancel()

    return wrapped


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse(error.content(), error.status)


def parse(arguments: list[str], environ: Mapping[str, str]) -> tuple[Settings, argparse.Namespace]:
    """The engine's settings, and where it listens; flags of vLLM that change nothing here are ignored."""
    parser = argparse.ArgumentParser(prog="emulator.sim_engine", allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--middleware", action="append", default=[])
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--enable-prompt-tokens-details", action="store_true")
    parser.add_argument("--dtype", default=Settings.dtype)
    parser.add_argument("--sim-log", type=Path, help="a file for the log, which outlives the engine")
    for name in ("max-model-len", "max-num-seqs", "max-loras", "max-cpu-loras", "max-lora-rank", "seed"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument(
        "--sim-kv-tokens", type=int, default=int(environ.get("ASYNCGRPO_SIM_KV_TOKENS", Settings.kv_tokens))
    )
    for name in ("prefill-tokens-per-s", "decode-tokens-per-s", "load-s"):
        default = environ.get(f"ASYNCGRPO_SIM_{name.replace('-', '_').upper()}", "0")
        parser.add_argument(f"--sim-{name}", type=float, default=float(default))
    flags, _ = parser.parse_known_args(arguments)
    given = {
        name: value
        for name in ("max_model_len", "max_num_seqs", "max_loras", "max_cpu_loras", "max_lora_rank", "seed")
        if (value := getattr(flags, name)) is not None
    }
    given.setdefault("max_cpu_loras", given.get("max_loras", Settings.max_loras))
    settings = Settings(
        model=flags.model,
        served=flags.served_model_name or flags.model,
        enable_lora=flags.enable_lora,
        dtype=flags.dtype,
        prompt_tokens_details=flags.enable_prompt_tokens_details,
        kv_tokens=flags.sim_kv_tokens,
        prefill_tokens_per_s=flags.sim_prefill_tokens_per_s,
        decode_tokens_per_s=flags.sim_decode_tokens_per_s,
        load_s=flags.sim_load_s,
        **settings_of_model(flags.model) | given,
    )
    return settings, flags


def main() -> None:
    """Serves until a signal comes or the engine dies."""
    settings, flags = parse(sys.argv[1:], os.environ)
    engine = Engine(settings, flags.sim_log.open("a") if flags.sim_log else None)
    server: Server | None = None

    def shut() -> None:
        if server is not None:
            server.should_exit = True

    config = uvicorn.Config(
        application(engine, shut, os.environ, flags.middleware),
        host=flags.host,
        port=flags.port,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=int(os.environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5")),
        backlog=4096,
    )
    server = Server(config, engine)
    server.run()


if __name__ == "__main__":
    main()
