"""HTTP to engines, byte by byte."""

import asyncio
import datetime
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from jobs import connections
from jobs.connections import BrokenOff, Connections, Response, Unreachable, origin
from tests.upstreams import until

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(talk: Talk) -> AsyncIterator[tuple[str, list[int]]]:
    """A server whose connections each do `talk`; yields its URL and the number of connections as a list's length."""
    made: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.append(1)
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", made
    listening.close()


def replies(*answers: bytes, close: bool = True) -> Talk:
    """Gives one answer after another on each connection."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        if not close:
            await reader.read()

    return talk


async def get(pool: Connections, url: str, method: bytes = b"GET", fresh: bool = False) -> Response:
    return await pool.request(url, method, b"/path", [(b"x-a", b"1")], b"", fresh=fresh)


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n", b"hello"),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", b"hello"),
    ],
)
@pytest.mark.parametrize("pieces", [False, True])
def test_bodies_end_where_they_should(answer: bytes, body: bytes, pieces: bool) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"GET /base/path HTTP/1.1\r\nhost: 127.0.0.1:")
        for byte in answer:
            writer.write(bytes([byte]))
            if pieces:
                await writer.drain()

    async def main() -> None:
        pool = Connections()
        async with server(talk) as (url, _):
            response = await get(pool, url + "/base/")
            assert response.status in (200, 204)
            assert await response.read() == body
        pool.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_what_ends_too_soon_is_broken_off(answer: bytes) -> None:
    async def main() -> None:
        pool = Connections()
        async with server(replies(answer)) as (url, _):
            with pytest.raises(BrokenOff) as caught:
                await (await get(pool, url)).read()
            assert not caught.value.stale
        pool.close()

    asyncio.run(main())


def test_sockets_are_reused_and_known_to_be() -> None:
    ok = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    async def main() -> None:
        pool = Connections()
        async with server(replies(ok, ok)) as (url, made):
            for _ in range(2):
                assert await (await get(pool, url)).read() == b"ok"
            assert len(made) == 1
            await asyncio.sleep(0)
            assert await (await get(pool, url, fresh=True)).read() == b"ok"
            assert len(made) == 2
        pool.close()

    asyncio.run(main())


def test_a_reset_before_a_byte_on_a_reused_socket_is_stale() -> None:
    ok = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ok)
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    async def main() -> None:
        pool = Connections()
        async with server(talk) as (url, _):
            await (await get(pool, url)).read()
            with pytest.raises(BrokenOff) as caught:
                await get(pool, url)
            assert caught.value.stale
        pool.close()

    asyncio.run(main())


def test_connection_close_and_head_are_not_reused() -> None:
    async def main() -> None:
        pool = Connections()
        closing = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
        async with server(replies(closing, close=False)) as (url, made):
            for count in (1, 2):
                assert await (await get(pool, url)).read() == b"ok"
                assert len(made) == count
        headed = b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n"
        async with server(replies(headed, close=False)) as (url, made):
            for count in (1, 2):
                response = await get(pool, url, b"HEAD")
                assert response.header(b"content-length") == b"20"
                assert await response.read() == b""
                assert len(made) == count
        pool.close()

    asyncio.run(main())


def test_idle_sockets_are_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "POOL_KEEP_ALIVE_S", 0.05)
    closed: list[int] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        assert await reader.read() == b""
        closed.append(1)

    async def main() -> None:
        pool = Connections()
        async with server(talk) as (url, _):
            await (await get(pool, url)).read()
            await until(lambda: bool(closed))
        pool.close()

    asyncio.run(main())


def test_a_slow_reader_holds_the_engine_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BUFFER_BYTES", 1 << 16)
    sent = 0
    total = 64 << 20

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        while sent < total:
            writer.write(bytes(1 << 20))
            await writer.drain()
            sent += 1 << 20

    async def main() -> None:
        pool = Connections()
        async with server(talk) as (url, _):
            response = await get(pool, url)
            before = -1
            while before != sent:  # until it stands still
                before = sent
                await asyncio.sleep(0.1)
            assert sent < total / 2
            size = 0
            while piece := await response.read_some():
                size += len(piece)
            assert size == total
        pool.close()

    asyncio.run(main())


def test_closing_an_unfinished_response_ends_its_connection() -> None:
    ended: list[int] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\nhel")
        await reader.read()
        ended.append(1)

    async def main() -> None:
        pool = Connections()
        async with server(talk) as (url, _):
            response = await get(pool, url)
            assert await response.read_some() == b"hel"
            response.close()
            await until(lambda: bool(ended))
        pool.close()

    asyncio.run(main())


def test_nobody_there(free_port: int) -> None:
    async def main() -> None:
        with pytest.raises(Unreachable, match=str(free_port)):
            await get(Connections(), f"http://127.0.0.1:{free_port}")

    asyncio.run(main())


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate for localhost and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """For a server on localhost that clients trust."""
    certificate, key = self_signed(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


@contextmanager
def tls_server(context: ssl.SSLContext, gate: threading.Event) -> Iterator[tuple[str, list[int], list[int]]]:
    """A server whose handshakes wait for the gate, in threads; yields its URL, and the connections begun and ended."""
    made: list[int] = []
    ended: list[int] = []

    def talk(raw: socket.socket) -> None:
        raw.settimeout(5)  # a test that failed closes nothing
        gate.wait()
        try:
            with raw, context.wrap_socket(raw, server_side=True) as tls:
                while tls.recv(1 << 16):
                    tls.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        except OSError:
            pass
        ended.append(1)

    def accept() -> None:
        with suppress(OSError):  # shut down
            while True:
                raw, _ = listener.accept()
                made.append(1)
                threads.submit(talk, raw)

    with ThreadPoolExecutor(64) as threads, socket.create_server(("127.0.0.1", 0)) as listener:
        threads.submit(accept)
        try:
            yield f"https://localhost:{listener.getsockname()[1]}", made, ended
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            gate.set()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_only_so_many_handshakes_at_a_time(
    run: Callable[..., None], trusted: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, each would be late by what the others cost."""
    monkeypatch.setattr(connections, "HANDSHAKES", 4)
    gate = threading.Event()

    async def main(url: str, made: list[int], ended: list[int]) -> None:
        pool = Connections()
        asked = [asyncio.create_task(get(pool, url)) for _ in range(20)]
        await until(lambda: len(made) >= 4)
        async with server(replies(b"HTTP/1.1 204 No Content\r\n\r\n")) as (plain, plainly):
            await asyncio.gather(*(get(pool, plain) for _ in range(20)))
        assert (len(made), len(plainly)) == (4, 20)
        gate.set()
        assert [await (await each).read() for each in asked] == [b"ok"] * 20
        # While all places are taken, a socket that is there is used all the same.
        gate.clear()
        slow = [asyncio.create_task(get(pool, url, fresh=True)) for _ in range(4)]
        await until(lambda: len(made) == 24)
        assert await (await get(pool, url)).read() == b"ok"
        gate.set()
        assert [await (await each).read() for each in slow] == [b"ok"] * 4
        pool.close()
        await until(lambda: len(ended) == len(made) == 24)

    with tls_server(trusted, gate) as there:
        run(main(*there))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_an_engine_that_hangs_holds_up_others_for_one_time_out(
    run: Callable[..., None], trusted: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKES", 2)
    monkeypatch.setattr(connections, "CONNECT_TIMEOUT_S", 0.5)
    shut, gate = threading.Event(), threading.Event()
    gate.set()

    async def main(hung: str, tried: list[int], well: str, ended: list[int]) -> None:
        pool = Connections()
        asked = [asyncio.create_task(get(pool, hung)) for _ in range(10)]
        await until(lambda: len(tried) >= 2)
        # It waits its turn for a whole time-out, which is not held against it.
        assert await (await get(pool, well)).read() == b"ok"
        failures = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(failure) for failure in failures] == [Unreachable] * 10
        assert len(tried) == 2
        pool.close()
        await until(lambda: bool(ended))

    with tls_server(trusted, shut) as (hung, tried, _), tls_server(trusted, gate) as (well, _, ended):
        run(main(hung, tried, well, ended))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_https_is_verified_and_reused(
    run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    body = bytes(300_000)
    ok = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    made: list[int] = []
    ended: list[int] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.append(1)
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ok)
        await reader.read()
        writer.close()
        ended.append(1)

    async def main() -> None:
        listening = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=context)
        url = f"https://localhost:{listening.sockets[0].getsockname()[1]}"
        with pytest.raises(Unreachable, match="certificate"):
            await get(Connections(), url)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        pool = Connections()
        for _ in range(2):
            assert await (await get(pool, url)).read() == body
        assert len(made) == 1
        pool.close()
        await until(lambda: bool(ended))
        listening.close()

    run(main())


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:8000", ("h", 8000, False, b"h:8000", b"")),
        ("https://id--8000.hf.jobs/", ("id--8000.hf.jobs", 443, True, b"id--8000.hf.jobs", b"")),
        ("http://user:secret@[::1]:80/a/b", ("::1", 80, False, b"[::1]:80", b"/a/b")),
    ],
)
def test_origins(url: str, expected: tuple[str, int, bool, bytes, bytes]) -> None:
    assert tuple(origin(url)) == expected


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="url = 'ftp://x'"):
        origin("ftp://x")
