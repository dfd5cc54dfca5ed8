"""Upstreams that answer at once and a load generator, on bare asyncio protocols so that they cost little themselves."""

import asyncio
import json
import random
import time
from collections import deque
from dataclasses import dataclass, field

MODEL = "trl-policy-v1"
WIRE = "bench.1.v1"
GROUP = 8
PROBLEMS = 64


def request(problem: int, prompt_tokens: int, host: str) -> bytes:
    """A trainer's request, as TRL 1.16's rollout child writes it."""
    rng = random.Random(problem)
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": [rng.randrange(150_000) for _ in range(prompt_tokens)],
            "max_tokens": 2048,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "n": 1,
            "return_token_ids": True,
            "logprobs": 0,
            "seed": rng.getrandbits(63),
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n"
        f"User-Agent: Python/3.11 aiohttp/3.14\r\nContent-Length: {len(body)}\r\nContent-Type: application/json\r\n\r\n"
    )
    return head.encode() + body


def response(completion_tokens: int) -> bytes:
    """An answer, as vLLM 0.31 writes it for `logprobs: 0` and `return_token_ids`."""
    rng = random.Random(completion_tokens)
    ids = [rng.randrange(150_000) for _ in range(completion_tokens)]
    words = [f" w{each % 1000}" for each in ids]
    logprobs = [-rng.random() for _ in ids]
    body = json.dumps(
        {
            "id": "cmpl-7f9d7a1c4f1c4bb0a1f5bb8f6e5f2a11",
            "object": "text_completion",
            "created": 1790000000,
            "model": WIRE,
            "choices": [
                {
                    "index": 0,
                    "text": "".join(words),
                    "logprobs": {
                        "text_offset": list(range(0, 5 * completion_tokens, 5)),
                        "token_logprobs": logprobs,
                        "tokens": words,
                        "top_logprobs": [{word: value} for word, value in zip(words, logprobs, strict=True)],
                    },
                    "finish_reason": "length",
                    "stop_reason": None,
                    "token_ids": ids,
                    "prompt_logprobs": None,
                    "prompt_token_ids": None,
                }
            ],
            "usage": {
                "prompt_tokens": 512,
                "total_tokens": 512 + completion_tokens,
                "completion_tokens": completion_tokens,
            },
        },
        separators=(",", ":"),
    ).encode()
    head = (
        "HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
        f"content-length: {len(body)}\r\ncontent-type: application/json\r\n\r\n"
    )
    return head.encode() + body


class Wire(asyncio.Protocol):
    """Cuts the bytes of a connection into messages with a Content-Length (or chunks, or no body at all)."""

    def __init__(self) -> None:
        self._received = bytearray()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Calls `message` for each complete one."""
        received = self._received
        received += data
        while (end := received.find(b"\r\n\r\n")) >= 0:
            head = bytes(received[:end]).lower()
            if (mark := head.find(b"content-length:")) >= 0:
                total = end + 4 + int(head[mark + 15 :].split(b"\r\n", 1)[0])
            elif b"transfer-encoding: chunked" in head:
                last = received.find(b"\r\n0\r\n\r\n", end)
                total = last + 7 if last >= 0 else len(received) + 1
            else:
                total = end + 4
            if len(received) < total:
                return
            del received[:total]
            self.message(head)

    def message(self, head: bytes) -> None:
        """One complete message came."""
        raise NotImplementedError


class Upstream(Wire):
    """Answers every POST with the same completion, and every GET with 200."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self._answer = answer

    def message(self, head: bytes) -> None:
        """Answers at once."""
        if head.startswith(b"post"):
            self.transport.write(self._answer)
        else:
            body = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(head + body)


@dataclass
class Load:
    """What a load came to; latencies in seconds."""

    requests: int
    wall_s: float
    errors: int
    latencies: list[float] = field(repr=False)

    def quantile_ms(self, fraction: float) -> float:
        """A quantile of the latencies."""
        return sorted(self.latencies)[min(len(self.latencies) - 1, int(fraction * len(self.latencies)))] * 1e3


class _Client(Wire):
    def __init__(self, generator: "Generator") -> None:
        super().__init__()
        self._generator = generator
        self.sent = 0.0

    def send(self, message: bytes, due: float) -> None:
        self.sent = due
        self.transport.write(message)

    def message(self, head: bytes) -> None:
        self._generator.answered(self, time.perf_counter() - self.sent, head.startswith(b"http/1.1 200"))


class Generator:
    """Sends `total` requests over `in_flight` connections: as fast as answers come, or `rate` of them a second.

    With a rate, latency counts from when a request was due, also if all connections were busy then.
    """

    def __init__(self, host: str, port: int, total: int, in_flight: int, rate: float, prompt_tokens: int) -> None:
        self._address = (host, port)
        self._total = total
        self._in_flight = in_flight
        self._rate = rate
        self._messages = [request(problem, prompt_tokens, f"{host}:{port}") for problem in range(PROBLEMS)]
        self._sent = 0
        self._idle: deque[_Client] = deque()
        self._late: deque[float] = deque()
        self._latencies: list[float] = []
        self._errors = 0
        self._done = asyncio.get_running_loop().create_future()

    async def run(self) -> Load:
        """Sends all and waits for the last answer."""
        loop = asyncio.get_running_loop()
        clients = [
            (await loop.create_connection(lambda: _Client(self), *self._address))[1] for _ in range(self._in_flight)
        ]
        started = time.perf_counter()
        if self._rate:
            self._idle.extend(clients)
            for number in range(self._total):
                due = started + number / self._rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                if self._idle:
                    self._next(self._idle.popleft(), due)
                else:
                    self._late.append(due)
        else:
            for client in clients:
                self._next(client, started)
        await self._done
        wall_s = time.perf_counter() - started
        for client in clients:
            client.transport.close()
        return Load(len(self._latencies), wall_s, self._errors, self._latencies)

    def _next(self, client: _Client, due: float) -> None:
        client.send(self._messages[self._sent // GROUP % PROBLEMS], due)
        self._sent += 1

    def answered(self, client: _Client, latency_s: float, good: bool) -> None:
        """One answer came."""
        self._latencies.append(latency_s)
        self._errors += not good
        if self._late:
            self._next(client, self._late.popleft())
        elif self._rate:
            self._idle.append(client)
        elif self._sent < self._total:
            self._next(client, time.perf_counter())
        if len(self._latencies) >= self._total and not self._done.done():
            self._done.set_result(None)
