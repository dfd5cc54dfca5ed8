import asyncio
import contextlib
import io
import json

import aiohttp
import pytest
from aiohttp import web

from emulator.gateway import Gateway

TOKEN = "hf_gateway_test"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


class Job:
    """A real aiohttp server that stands for what listens in a Job, and remembers what it saw."""

    def __init__(self):
        self.seen = []
        self.cancelled = asyncio.Event()
        self.arrived = asyncio.Event()
        self.more = asyncio.Event()

    async def echo(self, request):
        body = await request.read()
        self.seen.append(request)
        return web.json_response(
            {
                "method": request.method,
                "path": request.raw_path,
                "headers": [[name, value] for name, value in request.headers.items()],
                "bytes": len(body),
                "body": body[:100].decode(),
            },
            headers=[("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("X-Foo", "drop"), ("Connection", "X-Foo")],
        )

    async def big(self, request):
        return web.Response(body=b"x" * int(request.query["bytes"]))

    async def stream(self, request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        try:
            await self.more.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if request.query.get("break"):
            request.transport.abort()
            return response
        await response.write(b"last")
        return response

    async def hang(self, request):
        await request.read()
        self.arrived.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def drop(self, request):
        request.transport.abort()
        return web.Response()


@contextlib.asynccontextmanager
async def gateway_and_job(**settings):
    job = Job()
    application = web.Application(client_max_size=1 << 30)
    for path in ("big", "stream", "hang", "drop"):
        application.router.add_route("*", f"/{path}", getattr(job, path))
    application.router.add_route("*", "/{path:.*}", job.echo)
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    address = f"{host}:{port}"

    async def locate(refused):
        return address

    gateway = Gateway(TOKEN, **settings)
    route = await gateway.open("job", 8000, public=False, locate=locate)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as client:
        try:
            yield gateway, route, job, client
        finally:
            await gateway.close()
            await runner.cleanup()


def run(test, **settings):
    async def main():
        async with gateway_and_job(**settings) as parts:
            await test(*parts)

    asyncio.run(main())


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer hf_other"}, {"Authorization": TOKEN}])
def test_without_the_token_nothing_reaches_the_job(headers):
    async def test(gateway, route, job, client):
        async with client.post(f"{route.url}/x", data=b"body", headers=headers) as response:
            assert response.status == 401
            assert "error" in await response.json()
        assert job.seen == []

    run(test)


def test_a_public_port_needs_no_token():
    async def test(gateway, route, job, client):
        route.public = True
        async with client.get(f"{route.url}/x") as response:
            assert response.status == 200

    run(test)


def test_headers_and_paths_arrive_as_they_should():
    async def test(gateway, route, job, client):
        headers = {
            **BEARER,
            "X-Own": "1",
            "Connection": "keep-alive, X-Hop",
            "X-Hop": "2",
            "TE": "trailers",
            "Accept-Encoding": "gzip",
        }
        async with client.post(f"{route.url}/v1/a%2Fb?x=%20y&z", data=b"hello", headers=headers) as response:
            answer = await response.json()
            assert response.headers.getall("Set-Cookie") == ["a=1", "b=2"]
            assert "X-Foo" not in response.headers
        assert answer["path"] == "/v1/a%2Fb?x=%20y&z"
        assert answer["body"] == "hello"
        sent = {name.lower(): value for name, value in answer["headers"]}
        assert sent["x-own"] == "1"
        assert sent["content-length"] == "5"
        assert sent["accept-encoding"] == "gzip"
        assert not {"authorization", "x-hop", "te", "transfer-encoding"} & set(sent)
        assert len(answer["headers"]) == len(sent)

    run(test)


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH"])
def test_methods(method):
    async def test(gateway, route, job, client):
        async with client.request(method, f"{route.url}/x", headers=BEARER) as response:
            assert response.status == 200
            assert int(response.headers["Content-Length"]) > 0
            assert bool(await response.read()) == (method != "HEAD")
        assert job.seen[0].method == method

    run(test)


def test_a13_large_bodies_pass_the_gateway_both_ways():
    """Case A13: 400,000 token ids up, 20 MB of log-probabilities down."""

    async def test(gateway, route, job, client):
        prompt = json.dumps({"prompt": list(range(400_000))}).encode()
        assert len(prompt) > 2_000_000
        for data in (io.BytesIO(prompt), chunks(prompt)):  # with a length, and chunked
            async with client.post(f"{route.url}/x", data=data, headers=BEARER) as response:
                assert (await response.json())["bytes"] == len(prompt)
        async with client.get(f"{route.url}/big?bytes=20000000", headers=BEARER) as response:
            assert len(await response.read()) == 20_000_000

    run(test)


async def chunks(data, size=65536):
    for start in range(0, len(data), size):
        yield data[start : start + size]


def test_a13_the_gateways_limit_is_named():
    async def test(gateway, route, job, client):
        for data in (b"x" * 100_001, chunks(b"x" * 100_001), chunks(b"x" * 3_000_000)):
            async with client.post(f"{route.url}/x", data=data, headers=BEARER) as response:
                assert response.status == 413
                assert "body_limit_bytes = 100000" in (await response.json())["error"]
        async with client.post(f"{route.url}/x", data=b"x" * 100_000, headers=BEARER) as response:
            assert response.status == 200

    run(test, body_limit_bytes=100_000)


def test_answers_are_streamed():
    async def test(gateway, route, job, client):
        async with client.get(f"{route.url}/stream", headers=BEARER) as response:
            assert await response.content.readany() == b"first"  # before the rest exists
            job.more.set()
            assert await response.content.read() == b"last"

    run(test)


def test_an_answer_that_breaks_never_looks_complete():
    async def test(gateway, route, job, client):
        async with client.get(f"{route.url}/stream?break=1", headers=BEARER) as response:
            assert await response.content.readany() == b"first"
            job.more.set()
            with pytest.raises(aiohttp.ClientError):
                await response.content.read()

    run(test)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_client_that_leaves_takes_its_request_with_it(method):
    async def test(gateway, route, job, client):
        asking = asyncio.ensure_future(client.request(method, f"{route.url}/hang", data=b"x" * 10, headers=BEARER))
        await asyncio.wait_for(job.arrived.wait(), 5)
        asking.cancel()
        await asyncio.wait_for(job.cancelled.wait(), 2)

    run(test)


def test_a_client_that_leaves_a_stream():
    async def test(gateway, route, job, client):
        async with client.get(f"{route.url}/stream", headers=BEARER) as response:
            assert await response.content.readany() == b"first"
        await asyncio.wait_for(job.cancelled.wait(), 2)

    run(test)


def test_a_closed_port_serves_no_open_connection():
    async def test(gateway, route, job, client):
        for status in (200, 404):
            async with client.get(f"{route.url}/x", headers=BEARER) as response:
                assert response.status == status
                await response.read()
            gateway.close_route(route)
        assert len(job.seen) == 1

    run(test)


def test_a_client_that_leaves_in_the_middle_of_its_body():
    async def test(gateway, route, job, client):
        _, writer = await asyncio.open_connection("127.0.0.1", int(route.url.rpartition(":")[2]))
        head = f"POST /x HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 1000000\r\n\r\n"
        writer.write(head.encode() + b"x" * 1000)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        async with client.get(f"{route.url}/x", headers=BEARER) as response:
            assert response.status == 200
        assert [request.method for request in job.seen] == ["GET"]

    run(test)


def test_a_job_that_is_not_up():
    async def test(gateway, route, job, client):
        async def nowhere(refused):
            return None

        async def refusing(refused):
            return "127.0.0.1:1"

        for locate in (nowhere, refusing):
            closed = await gateway.open("late", 8000, public=False, locate=locate)
            async with client.post(f"{closed.url}/x", data=b"x", headers=BEARER) as response:
                assert response.status == 503
                assert "port 8000" in (await response.json())["error"]

    run(test)


def test_a_job_that_closes_without_an_answer():
    async def test(gateway, route, job, client):
        async with client.post(f"{route.url}/drop", data=b"x", headers=BEARER) as response:
            assert response.status == 502

    run(test)


def test_faults():
    async def test(gateway, route, job, client):
        async def interfere(job_id, port, path):
            assert (job_id, port) == ("job", 8000)
            return 500 if path == "/bad" else None

        gateway.interfere = interfere
        for path, status in (("bad", 500), ("good", 200)):
            async with client.get(f"{route.url}/{path}", headers=BEARER) as response:
                assert response.status == status

    run(test)


def test_many_at_once():
    async def test(gateway, route, job, client):
        async def one(index):
            async with client.post(f"{route.url}/x", data=b"%d" % index, headers=BEARER) as response:
                return (await response.json())["body"]

        assert await asyncio.gather(*map(one, range(384))) == [str(index) for index in range(384)]

    run(test)
