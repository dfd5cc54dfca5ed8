"""The data plane's HTTP: headers, keep-alive and event streams, seen from real sockets on both sides."""

import asyncio
import gzip
import json
import time
import zlib
from typing import Any

import aiohttp
import pytest
import requests
from aiohttp import web

from jobs.connections import POOL_KEEP_ALIVE_S
from jobs.upstream import LISTENER_KEEP_ALIVE_S
from tests.upstreams import V1, Proxy, answer, json_response, proxied, until

BODY = {"model": "trl-policy-v1", "prompt": [1, 2, 3], "max_tokens": 4}


async def raw(port: int, request: bytes) -> tuple[list[bytes], bytes]:
    """Sends bytes and reads to the end of the connection: the head's lines and the rest."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    data = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    head, _, body = data.partition(b"\r\n\r\n")
    return head.split(b"\r\n"), body


def post(body: bytes, *headers: str, path: str = "/v1/completions") -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: client-host",
        "Connection: close",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a11_body_and_headers_agree_whatever_the_engine_compresses(encoding: str) -> None:
    async def packed(request: web.Request, body: Any) -> web.Response:
        plain = json.dumps(answer(body or {}), separators=(",", ":")).encode()
        data = gzip.compress(plain) if encoding == "gzip" else zlib.compress(plain)
        return web.Response(body=data, headers={"Content-Encoding": encoding, "Content-Type": "application/json"})

    async def main() -> None:
        async with proxied(packed) as proxy:
            status, payload = await proxy.complete()  # aiohttp
            assert (status, payload["model"]) == (200, "trl-policy-v1")
            assert proxy.engines[0].seen[0].headers["accept-encoding"] == "identity"
            response = await asyncio.to_thread(requests.post, proxy.url + "/v1/completions", json=BODY, timeout=5)
            assert response.json()["model"] == "trl-policy-v1"
            head, body = await raw(proxy.port, post(json.dumps(BODY).encode()))
            assert b"content-length: %d" % len(body) in head
            assert not any(line.startswith(b"content-encoding") for line in head)
            assert json.loads(body)["model"] == "trl-policy-v1"
            # On other paths the engine's own encoding passes, as the client asked for it.
            async with proxy.http.get(proxy.url + "/version") as got:
                assert got.headers["content-encoding"] == encoding
                assert (await got.json())["object"] == "text_completion"
            assert "gzip" in proxy.engines[0].seen[-1].headers["accept-encoding"]

    asyncio.run(main())


def test_a11_hop_by_hop_headers_go_no_further_and_duplicates_survive() -> None:
    async def reply(request: web.Request, body: Any) -> web.Response:
        response = json_response(answer(body))
        for header in ("a=1", "b=2"):
            response.headers.add("Set-Cookie", header)
        response.headers.update({"Connection": "x-foo, close", "X-Foo": "1", "X-Bar": "2", "Keep-Alive": "timeout=3"})
        return response

    async def main() -> None:
        async with proxied(reply) as proxy:
            headers = ("Connection: x-mine", "X-Mine: 1", "X-Other: 1", "X-Other: 2", "TE: trailers", "Expect: ")
            secrets = ("Authorization: Bearer client", "X-Asyncgrpo-Key: guess", "Proxy-Authorization: Basic x")
            request = post(json.dumps(BODY).encode(), *headers, *secrets).replace(b"Connection: close\r\n", b"", 1)
            head, _ = await raw(proxy.port, request.replace(b"x-mine", b"x-mine, close", 1))
            names = [line.split(b":")[0].lower() for line in head[1:]]
            assert names.count(b"set-cookie") == 2
            assert b"x-bar" in names
            assert b"x-foo" not in names
            assert b"keep-alive" not in names
            seen = proxy.engines[0].seen[0].headers
            assert seen.getall("x-other") == ["1", "2"]
            assert seen.getall("authorization") == ["Bearer hf_ours"]
            assert seen.getall("x-asyncgrpo-key") == ["the-key"]
            assert seen["host"] == proxy.engines[0].url.removeprefix("http://")
            for name in ("x-mine", "te", "proxy-authorization", "expect", "connection"):
                assert name not in seen

    asyncio.run(main())


def test_a11_head_no_content_and_chunks_pass_as_they_are() -> None:
    async def reply(request: web.Request, body: Any) -> web.StreamResponse:
        if request.path == "/empty":
            return web.Response(status=204)
        if request.path == "/chunks":
            response = web.StreamResponse()
            response.enable_chunked_encoding()
            await response.prepare(request)
            for part in (b"one", b"two"):
                await response.write(part)
            return response
        return web.Response(body=b"" if request.method == "HEAD" else b"fine", headers={"X-Own": "1"})

    async def main() -> None:
        async with proxied(reply) as proxy:
            for _ in range(2):
                async with proxy.http.head(proxy.url + "/health") as response:
                    assert (response.status, response.headers["x-own"]) == (200, "1")
                async with proxy.http.get(proxy.url + "/empty") as response:
                    assert (response.status, await response.read()) == (204, b"")
                    assert "content-length" not in response.headers or response.headers["content-length"] == "0"
                    assert "transfer-encoding" not in response.headers
                async with proxy.http.get(proxy.url + "/chunks") as response:
                    assert await response.read() == b"onetwo"
                    assert "content-length" not in response.headers
            head, body = await raw(proxy.port, b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert head[0].startswith(b"HTTP/1.1 200")
            assert body == b""
            assert [seen.method for seen in proxy.engines[0].seen].count("HEAD") == 3

    asyncio.run(main())


def test_a11_the_engines_date_and_server_come_once() -> None:
    async def main() -> None:
        async with proxied(None) as proxy:
            head, _ = await raw(proxy.port, post(json.dumps(BODY).encode()))
            names = [line.split(b":")[0].lower() for line in head[1:]]
            assert names.count(b"date") == names.count(b"server") == 1

    asyncio.run(main())


def test_a12_the_listener_outlives_its_clients_pools() -> None:
    assert LISTENER_KEEP_ALIVE_S > 15  # aiohttp's client, which TRL uses
    assert POOL_KEEP_ALIVE_S < 5  # uvicorn's server, which vLLM uses

    async def main() -> None:
        async with proxied(None) as proxy:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            for _ in range(2):
                body = json.dumps(BODY).encode()
                writer.write(post(body).replace(b"Connection: close\r\n", b""))
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(length)
            writer.close()

    asyncio.run(main())


def test_a12_a_socket_that_the_engine_closed_for_idleness_costs_the_client_nothing() -> None:
    """The engine closes its sockets after a while, just when the next request is on its way."""
    idle_s = 0.02

    async def main() -> None:
        async with proxied(None, keepalive_timeout=idle_s) as proxy:

            async def client(number: int) -> None:
                for _ in range(40):
                    status, _ = await proxy.complete([number] * 20)
                    assert status == 200
                    await asyncio.sleep(idle_s)

            await asyncio.gather(*(client(number) for number in range(8)))
            assert not proxy.pool.failures
            assert proxy.count("redispatched") == 0

    asyncio.run(main())


class Closing(asyncio.Protocol):
    """An engine that answers each connection's first request, and resets the connection at its second."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.requests = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.log.append("connected")

    def data_received(self, data: bytes) -> None:
        self.requests += 1
        self.log.append(f"request {self.requests}")
        if self.requests == 2:
            self.transport.abort()
            return
        body = json.dumps(answer({"model": V1, "max_tokens": 4}), separators=(",", ":")).encode()
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )


def test_a12_a_reset_on_a_reused_socket_is_retried_once_on_a_new_one_and_counted() -> None:
    async def main() -> None:
        log: list[str] = []
        server = await asyncio.get_running_loop().create_server(lambda: Closing(log), "127.0.0.1", 0)
        async with proxied() as proxy:
            proxy.pool.add("0", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            for _ in range(2):
                status, _ = await proxy.complete()
                assert status == 200
            assert log == ["connected", "request 1", "request 2", "connected", "request 1"]
            assert proxy.count("upstream_retries") == 1
            assert not proxy.pool.failures
        server.close()

    asyncio.run(main())


def test_a12_a_reset_on_a_new_socket_is_the_engines_failure() -> None:
    async def reset(request: web.Request, body: Any) -> None:
        return None

    async def main() -> None:
        async with proxied(reset, None) as proxy:
            status, _ = await proxy.complete()
            assert status == 200
            assert proxy.count("upstream_retries") == 0
            assert [engine for engine, _ in proxy.pool.failures] == ["0"]

    asyncio.run(main())


def chunk(number: int, **changes: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": f"t{number}", "finish_reason": None}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": V1, "choices": [choice | changes]}


def sse(payload: Any) -> bytes:
    return b"data: " + (payload if isinstance(payload, bytes) else json.dumps(payload).encode()) + b"\n\n"


def streaming(events: int, pause_s: float = 0.0, cut_after: int | None = None, done: bool = True) -> Any:
    """A handler that streams."""

    async def stream(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for number in range(events):
            if number == cut_after:
                return None
            await response.write(sse(chunk(number)))
            await asyncio.sleep(pause_s)
        if done:
            await response.write(sse(b"[DONE]"))
        return response

    return stream


async def events_of(proxy: Proxy, **members: Any) -> tuple[list[tuple[float, bytes]], dict[str, str]]:
    """Each piece of a stream with the time since the request; and the response's headers."""
    started = time.monotonic()
    got: list[tuple[float, bytes]] = []
    async with proxy.http.post(proxy.url + "/v1/completions", json=BODY | {"stream": True} | members) as response:
        assert response.status == 200
        async for piece in response.content.iter_any():
            got.append((time.monotonic() - started, piece))
        return got, {name.lower(): value for name, value in response.headers.items()}


def test_a14_events_pass_as_they_come() -> None:
    pause_s = 0.1

    async def main() -> None:
        async with proxied(streaming(8, pause_s)) as proxy:
            got, headers = await events_of(proxy)
            assert got[0][0] < 0.3
            assert got[-1][0] - got[0][0] > 6 * pause_s
            assert len(got) >= 8
            text = b"".join(piece for _, piece in got)
            assert text.endswith(b"data: [DONE]\n\n")
            assert text.count(b'"trl-policy-v1"') == 8
            assert V1.encode() not in text
            assert "content-length" not in headers
            assert headers["content-type"].startswith("text/event-stream")
            assert proxy.idle()
            assert proxy.completions.snapshot()["engines"]["0"]["tokens"] == 8

    asyncio.run(main())


@pytest.mark.parametrize("handler", [streaming(9, 0.01, cut_after=5), streaming(5, done=False)], ids=["cut", "no end"])
def test_a14_a_broken_stream_has_no_clean_end(handler: Any) -> None:
    async def main() -> None:
        async with proxied(handler) as proxy:
            got = b""
            with pytest.raises(aiohttp.ClientPayloadError):
                async with proxy.http.post(proxy.url + "/v1/completions", json=BODY | {"stream": True}) as response:
                    async for piece in response.content.iter_any():
                        got += piece
            assert b"t4" in got
            assert b"data: [DONE]" not in got
            assert b'"error"' in got
            assert [engine for engine, _ in proxy.pool.failures] == ["0"]
            await until(proxy.idle)
            assert proxy.count("lost") == 1

    asyncio.run(main())


@pytest.mark.parametrize("cut", ["before", "abort", "error"])
def test_a14_a_stream_that_fails_before_its_first_event_is_asked_for_elsewhere(cut: str) -> None:
    async def fail(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if cut == "before":
            return None
        await response.write(sse(chunk(0, finish_reason="abort") if cut == "abort" else {"error": {"code": 500}}))
        return response

    async def main() -> None:
        async with proxied(fail, streaming(3)) as proxy:
            got, _ = await events_of(proxy)
            assert b"".join(piece for _, piece in got).count(b"data: {") == 3
            assert proxy.count("redispatched") == 1
            assert proxy.idle()

    asyncio.run(main())


def test_a14_events_cut_anywhere_keep_their_names_mapped() -> None:
    async def drip(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        data = sse(chunk(0)) + sse(chunk(1)) + sse(b"[DONE]")
        for start in range(0, len(data), 7):
            await response.write(data[start : start + 7])
            await asyncio.sleep(0.001)
        return response

    async def main() -> None:
        async with proxied(drip) as proxy:
            got, _ = await events_of(proxy)
            expected = sse(chunk(0)) + sse(chunk(1)) + sse(b"[DONE]")
            assert b"".join(piece for _, piece in got) == expected.replace(V1.encode(), b"trl-policy-v1")

    asyncio.run(main())


def test_a14_a_verdict_instead_of_a_stream_passes() -> None:
    async def refuse(request: web.Request, body: dict[str, Any]) -> web.Response:
        return json_response({"error": {"message": "too long"}}, 400)

    async def main() -> None:
        async with (
            proxied(refuse) as proxy,
            proxy.http.post(proxy.url + "/v1/completions", json=BODY | {"stream": True}) as response,
        ):
            assert (response.status, await response.json()) == (400, {"error": {"message": "too long"}})

    asyncio.run(main())


def test_a_batch_streams_as_one() -> None:
    async def stream(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        own = f"cmpl-{body['prompt'][0]}"
        for number in range(3):
            await response.write(sse(chunk(number) | {"id": own}))
            await asyncio.sleep(0.005)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 3, "total_tokens": 3 + len(body["prompt"])}
        await response.write(sse({**chunk(0), "id": own, "choices": [], "usage": usage}) + sse(b"[DONE]"))
        return response

    async def main() -> None:
        async with proxied(stream, stream) as proxy:
            got, _ = await events_of(proxy, prompt=[[1] * 20, [2] * 30, [3] * 40])
            text = b"".join(piece for _, piece in got)
            assert text.count(b"[DONE]") == 1
            assert text.endswith(b"data: [DONE]\n\n")
            events = [json.loads(each[6:]) for each in text.split(b"\n\n") if each.startswith(b"data: {")]
            assert {each["id"] for each in events} == {events[0]["id"]}
            assert {each["model"] for each in events} == {"trl-policy-v1"}
            texts: dict[int, list[str]] = {}
            for each in events:
                for choice in each["choices"]:
                    texts.setdefault(choice["index"], []).append(choice["text"])
            assert texts == {index: ["t0", "t1", "t2"] for index in range(3)}
            assert [each["usage"]["completion_tokens"] for each in events if each.get("usage")] == [9]
            assert all(engine.seen for engine in proxy.engines)
            assert proxy.idle()

    asyncio.run(main())


def test_a_batch_stream_that_breaks_has_no_clean_end() -> None:
    async def fragile(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        cut = 2 if body["prompt"] == [2] else None
        return await streaming(200, 0.01, cut_after=cut)(request, body)  # type: ignore[no-any-return]

    async def main() -> None:
        async with proxied(fragile) as proxy:
            with pytest.raises(aiohttp.ClientPayloadError):
                await events_of(proxy, prompt=[[1], [2], [3]])
            await until(proxy.idle)

    asyncio.run(main())


def test_no_engine_for_another_path_is_said_at_once() -> None:
    async def main() -> None:
        async with proxied() as proxy, proxy.http.get(proxy.url + "/version") as response:
            assert response.status == 503
            assert response.headers["retry-after"]

    asyncio.run(main())


def test_another_path_goes_to_an_engine_that_can_be_reached() -> None:
    async def main() -> None:
        async with proxied(None, None) as proxy:
            await proxy.engines[0].stop()
            async with proxy.http.get(proxy.url + "/version") as response:
                assert response.status == 200
            assert proxy.engines[1].seen[0].headers["x-asyncgrpo-key"] == "the-key"

    asyncio.run(main())
