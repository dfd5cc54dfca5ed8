"""A server for which rollouts cost nothing: what a trainer alone is measured before.

It answers TRL's calls as one vLLM server would, completions at once and in full length, with random tokens whose
logprobs are those of a model that knows nothing.
"""

import asyncio
import json
import math
import random
import threading
import urllib.error
import urllib.request

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

VOCABULARY = 151_643
POOL = 64
"""Different completions of one length; more would only cost time to draw."""
CONFIG = {
    "lora_config": {"max_lora_rank": 16, "max_loras": 16},
    "parallel_config": {"data_parallel_size": 1},
}
"""What TRL 1.16 reads of a server's configuration."""
MAX_MODEL_LEN = 4096


class InstantServer:
    """One server on `port`; run it with `start`, in a thread of its own."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.tokens = 0
        """Of completions that were answered."""
        self._port = port
        self._draw = random.Random(0)
        self._pool: dict[int, list[bytes]] = {}
        fine = [f"/{path}" for path in ("pause", "resume", "v1/load_lora_adapter", "v1/unload_lora_adapter")]
        self._app = Starlette(
            routes=[
                Route("/health", self._fine),
                Route("/server_info", self._info),
                Route("/v1/models", self._models),
                Route("/v1/completions", self._complete, methods=["POST"]),
                *(Route(path, self._fine, methods=["POST"]) for path in fine),
            ]
        )

    def start(self) -> None:
        """Serves until the process ends; returns once it does."""
        config = uvicorn.Config(self._app, host="127.0.0.1", port=self._port, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        threading.Thread(target=lambda: asyncio.run(server.serve()), name="instant server", daemon=True).start()
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except urllib.error.URLError:
                continue

    async def _fine(self, request: Request) -> Response:
        return Response(b"")

    async def _info(self, request: Request) -> Response:
        return JSONResponse({"vllm_config": CONFIG})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "bench", "max_model_len": MAX_MODEL_LEN}]})

    async def _complete(self, request: Request) -> Response:
        length = int((await request.json())["max_tokens"])
        if length not in self._pool:
            self._pool[length] = [self._completion(length) for _ in range(POOL)]
        self.tokens += length
        return Response(self._draw.choice(self._pool[length]), media_type="application/json")

    def _completion(self, length: int) -> bytes:
        choice = {
            "index": 0,
            "text": "",
            "token_ids": [self._draw.randrange(VOCABULARY) for _ in range(length)],
            "logprobs": {"token_logprobs": [-math.log(VOCABULARY)] * length},
            "finish_reason": "length",
        }
        return json.dumps({"object": "text_completion", "choices": [choice]}).encode()
