"""The baseline: one vLLM engine as it is, and the proxy that one would write first.

Adapters go through a directory that shows what was written `lag_s` later, as the Hub's mounted buckets do; a load is
acknowledged when every engine has it; /pause and /resume reach every engine; completions go round in turn.
"""

import asyncio
import itertools
import re
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')


class StockProxy:
    """One server on `port` in front of engines; run it with `start`, in a thread of its own."""

    def __init__(self, engines: Sequence[str], mount: Path, lag_s: float, port: int) -> None:
        self._engines, self._mount, self._lag_s, self._port = list(engines), mount, lag_s, port
        self._turn = itertools.cycle(self._engines)
        self._paused_at: float | None = None
        self.stall_s = 0.0
        """Time in which the engines were paused."""
        self.tokens = 0
        """Of completions that were answered."""
        self._session: aiohttp.ClientSession
        routes = [
            Route("/pause", self._pause, methods=["POST"]),
            Route("/resume", self._resume, methods=["POST"]),
            Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._everywhere, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/{path:path}", self._first, methods=["GET", "POST"]),
        ]
        self._app = Starlette(routes=routes)

    def start(self) -> None:
        """Serves until the process ends."""

        async def serve() -> None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
            config = uvicorn.Config(self._app, host="127.0.0.1", port=self._port, log_level="warning", lifespan="off")
            await uvicorn.Server(config).serve()

        threading.Thread(target=lambda: asyncio.run(serve()), name="stock proxy", daemon=True).start()

    async def _first(self, request: Request) -> Response:
        return await self._forward(self._engines[0], request, await request.body())

    async def _complete(self, request: Request) -> Response:
        answer = await self._forward(next(self._turn), request, await request.body())
        if match := TOKENS.search(answer.body):
            self.tokens += int(match[1])
        return answer

    async def _pause(self, request: Request) -> Response:
        self._paused_at = time.monotonic()
        return await self._everywhere(request)

    async def _resume(self, request: Request) -> Response:
        answer = await self._everywhere(request)
        if self._paused_at is not None:
            self.stall_s += time.monotonic() - self._paused_at
        return answer

    async def _load(self, request: Request) -> Response:
        asked = await request.json()
        shown = self._mount / asked["lora_name"]
        await asyncio.to_thread(shutil.copytree, asked["lora_path"], shown, dirs_exist_ok=True)
        await asyncio.sleep(self._lag_s)
        body = b'{"lora_name": "%s", "lora_path": "%s"}' % (asked["lora_name"].encode(), str(shown).encode())
        return await self._all(lambda engine: self._forward(engine, request, body))

    async def _everywhere(self, request: Request) -> Response:
        body = await request.body()
        return await self._all(lambda engine: self._forward(engine, request, body))

    async def _all(self, ask: Callable[[str], Awaitable[Response]]) -> Response:
        answers = await asyncio.gather(*map(ask, self._engines))
        return max(answers, key=lambda answer: answer.status_code)

    async def _forward(self, engine: str, request: Request, body: bytes) -> Response:
        url = f"{engine}{request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
        headers = {"content-type": "application/json"}
        try:
            async with self._session.request(request.method, url, data=body, headers=headers) as answer:
                return Response(await answer.read(), answer.status, media_type=answer.content_type)
        except aiohttp.ClientConnectionError as error:
            return Response(str(error), 503)
