"""The client's half of a WebSocket against `websockets` as the server, and against servers that do
what they should not."""

import asyncio
import base64
import hashlib
from collections.abc import Awaitable, Callable
from typing import cast

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame
from websockets.protocol import SERVER, Protocol

from holdfast.client.transport.websocket import (
    UPGRADE_TIMEOUT_S,
    websocket_protocol_factory,
)
from holdfast.protocol.websocket import stream
from holdfast.protocol.websocket.errors import WebSocketError
from holdfast.protocol.websocket.frames import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT
from holdfast.protocol.websocket.stream import ANSWER_S, WebSocketStream
from tests.e2e.websocket_wire import frame

Handler = Callable[[ServerConnection], Awaitable[None]]
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Inner(asyncio.Protocol):
    """Notes what happens to it, and says `greeting` at once."""

    def __init__(self, greeting: bytes = b"") -> None:
        self.greeting = greeting
        self.transport: asyncio.Transport | None = None
        self.received = b""
        self.pauses = 0
        self.resumes = 0
        self.changed = asyncio.Event()
        self.lost = asyncio.Event()
        self.error: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert self.transport is None
        self.transport = cast(asyncio.Transport, transport)
        if self.greeting:
            self.transport.write(self.greeting)
        self.changed.set()

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        assert not self.lost.is_set()
        self.received += data
        self.changed.set()

    def pause_writing(self) -> None:
        self.pauses += 1
        self.changed.set()

    def resume_writing(self) -> None:
        self.resumes += 1
        self.changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        assert not self.lost.is_set()
        self.error = error
        self.lost.set()
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert not self.lost.is_set(), f"lost: {self.error}"
            self.changed.clear()
            await self.changed.wait()

    async def has(self, count: int) -> None:
        await self.until(lambda: len(self.received) >= count)

    async def opened(self) -> asyncio.Transport:
        await self.until(lambda: self.transport is not None)
        assert self.transport is not None
        return self.transport


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 30)

    asyncio.run(bounded())


async def dial(
    port: int, path: str = "/mqtt", greeting: bytes = b"", timeout_s: float = UPGRADE_TIMEOUT_S
) -> Inner:
    inner = Inner(greeting)
    await asyncio.get_running_loop().create_connection(
        lambda: websocket_protocol_factory(inner, "127.0.0.1", port, path, timeout_s),
        "127.0.0.1",
        port,
    )
    return inner


async def with_library(
    handler: Handler, test: Callable[[int], Awaitable[None]], **options: object
) -> None:
    arguments = {"subprotocols": ["mqtt"], "max_size": None, **options}
    async with serve(handler, "127.0.0.1", 0, **arguments) as server:  # type: ignore[arg-type]
        port = next(iter(server.sockets)).getsockname()[1]
        await test(port)


async def with_script(script: Script, test: Callable[[int], Awaitable[None]]) -> None:
    """A server made by hand: one connection, and what the script finds wrong fails the test."""
    done: list[asyncio.Task[None]] = []

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        done.append(task)
        try:
            await script(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    async with server:
        await test(server.sockets[0].getsockname()[1])
        await asyncio.gather(*done)


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    (key,) = [
        line.partition(b": ")[2]
        for line in head.split(b"\r\n")
        if line.startswith(b"Sec-WebSocket-Key")
    ]
    digest = hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Protocol: mqtt\r\nSec-WebSocket-Accept: "
        + base64.b64encode(digest)
        + b"\r\n\r\n"
    )


def test_bytes_go_both_ways() -> None:
    """[MQTT-6.0.0-3] Compression is not offered; the path's query is kept."""
    sent = [b"", b"a", b"b" * 125, b"c" * 126, b"d" * 70_000, b"e" * 3_000_000]
    requests = []

    async def echo(connection: ServerConnection) -> None:
        assert connection.request is not None
        requests.append(connection.request)
        async for message in connection:
            assert isinstance(message, bytes)
            await connection.send(message)

    async def test(port: int) -> None:
        inner = await dial(port, "/live/mqtt?token=a%20b", b"hello")
        transport = await inner.opened()
        assert transport.get_extra_info("peername")[1] == port
        for data in sent:
            transport.write(data)
        transport.writelines([b"lines", b" ", b"joined"])
        expected = b"hello" + b"".join(sent) + b"lines joined"
        await inner.until(lambda: len(inner.received) == len(expected))
        assert inner.received == expected
        transport.close()
        assert transport.is_closing()
        transport.write(b"dropped")
        await inner.lost.wait()
        assert inner.error is None
        (request,) = requests
        assert request.path == "/live/mqtt?token=a%20b"
        assert request.headers["Sec-WebSocket-Protocol"] == "mqtt"
        assert "Sec-WebSocket-Extensions" not in request.headers
        assert request.headers["Host"] == f"127.0.0.1:{port}"

    run(with_library(echo, test))


def test_back_pressure_both_ways() -> None:
    release = asyncio.Event()
    sent = asyncio.Event()
    total = 20_000_000
    taken = 0

    async def slow(connection: ServerConnection) -> None:
        nonlocal taken
        await release.wait()
        while taken < total:
            taken += len(await connection.recv())
        sending = asyncio.create_task(connection.send(bytes(total)))
        done, _ = await asyncio.wait([sending], timeout=0.3)
        assert not done, "the client reads although it was told not to"
        sent.set()
        await sending
        await connection.wait_closed()

    async def test(port: int) -> None:
        inner = await dial(port)
        transport = await inner.opened()
        transport.set_write_buffer_limits(high=65_536)
        written = 0
        while written < total:
            transport.write(bytes(50_000))
            written += 50_000
            if inner.pauses > inner.resumes and not release.is_set():
                assert transport.get_write_buffer_size() > 65_536
                transport.pause_reading()
                release.set()
        await inner.until(lambda: inner.resumes == inner.pauses > 0)
        await sent.wait()
        assert inner.received == b""
        transport.resume_reading()
        await inner.until(lambda: len(inner.received) == total)
        transport.close()
        await inner.lost.wait()

    run(with_library(slow, test))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nno\r\n\x1bhere",
            "/mqtt: the server answered with HTTP 404 Not Found: no here",
        ),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 100000\r\n\r\n", "HTTP 503 Busy"),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", "HTTP 200 OK: <html>"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "missing Connection header"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "does not speak HTTP"),
        (b"\x20\x02\x00\x00", "no HTTP: the server does not speak WebSocket"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 20_000, "more than 16384 bytes"),
        (b"", "closed before the WebSocket was open"),
        (b"HTTP/1.1 101 Sw", "closed before the WebSocket was open"),
    ],
)
def test_refused_upgrades(answer: bytes, text: str) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()

    async def test(port: int) -> None:
        inner = await dial(port)
        await inner.lost.wait()
        assert inner.transport is None
        assert isinstance(inner.error, WebSocketError)
        assert text in str(inner.error)

    run(with_script(refuse, test))


@pytest.mark.parametrize("path", ["", "mqtt", "/a b", "/a\r\nX: y", "/ä", "/a#b", "/a\n"])
def test_paths_that_cannot_be_asked_for(path: str) -> None:
    with pytest.raises(ValueError, match="must begin with a slash"):
        websocket_protocol_factory(Inner(), "localhost", 80, path)


def test_no_subprotocol_is_no_mqtt() -> None:
    """[MQTT-6.0.0-4]"""

    async def never(connection: ServerConnection) -> None:
        await connection.wait_closed()

    async def test(port: int) -> None:
        inner = await dial(port)
        await inner.lost.wait()
        assert inner.transport is None
        assert "did not choose the subprotocol mqtt" in str(inner.error)

    run(with_library(never, test, subprotocols=None))


def test_a_server_that_never_answers() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def test(port: int) -> None:
        inner = await dial(port, timeout_s=0.2)
        await inner.lost.wait()
        assert inner.transport is None
        assert str(inner.error) == "no answer to the WebSocket's request in 0.2 s"

    run(with_script(silent, test))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (frame(TEXT, b"text", masked=False), "1003 .*binary frames"),
        (frame(BINARY, b"x"), "1002 .*masked"),
        (frame(CONTINUATION, b"x", masked=False), "1002 .*continuation"),
        (frame(CLOSE, b"\x03\xf1too much", masked=False), "closed with 1009 .*too much"),
    ],
)
def test_a_server_that_breaks_the_rules(data: bytes, text: str) -> None:
    """[MQTT-6.0.0-1]"""

    async def break_rules(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept(reader, writer)
        good = frame(BINARY, b"good", masked=False)
        writer.write(good + data + good)
        assert await reader.read() != b""

    async def test(port: int) -> None:
        inner = await dial(port)
        await inner.lost.wait()
        assert inner.received == b"good"
        assert isinstance(inner.error, WebSocketError)
        with pytest.raises(WebSocketError, match=text):
            raise inner.error

    run(with_script(break_rules, test))


@pytest.mark.parametrize("payload", [b"", b"\x03\xe8", b"\x03\xe9restarting"])
def test_an_ordinary_close_by_the_server(payload: bytes) -> None:
    answers = []

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept(reader, writer)
        writer.write(frame(CLOSE, payload, masked=False))
        answers.append(await reader.read())

    async def test(port: int) -> None:
        inner = await dial(port)
        await inner.lost.wait()
        assert inner.error is None

    run(with_script(close, test))
    (answer,) = answers
    assert answer[0] == 0x80 | CLOSE
    assert answer[1] == 0x80 | min(len(payload), 2)


@pytest.mark.parametrize("by_server", [False, True])
def test_bytes_that_are_never_taken(monkeypatch: pytest.MonkeyPatch, by_server: bool) -> None:
    """Do not keep a closed WebSocket's socket open."""
    monkeypatch.setattr(stream, "CLOSE_TIMEOUT_S", 0.2)
    stopped, lost = asyncio.Event(), asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept(reader, writer)
        await stopped.wait()
        if by_server:
            writer.write(frame(CLOSE, masked=False))
        await lost.wait()

    async def test(port: int) -> None:
        inner = await dial(port)
        transport = await inner.opened()
        transport.write(bytes(20_000_000))
        assert inner.pauses > 0
        stopped.set()
        if not by_server:
            transport.close()
        await inner.lost.wait()
        lost.set()

    run(with_script(deaf, test))


def test_a_server_that_does_not_answer_a_close() -> None:
    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept(reader, writer)
        while await reader.read(4096):
            writer.write(frame(BINARY, b"more", masked=False))

    async def test(port: int) -> None:
        inner = await dial(port)
        transport = await inner.opened()
        transport.pause_reading()
        transport.close()
        await asyncio.wait_for(inner.lost.wait(), ANSWER_S + 10)
        assert inner.error is None
        assert inner.received == b""

    run(with_script(deaf, test))


def test_abort() -> None:
    async def wait(connection: ServerConnection) -> None:
        with pytest.raises(ConnectionClosed):
            await connection.recv()

    async def test(port: int) -> None:
        inner = await dial(port)
        transport = await inner.opened()
        transport.abort()
        await inner.lost.wait()

    run(with_library(wait, test))


def test_pings_are_answered() -> None:
    async def ping(connection: ServerConnection) -> None:
        await (await connection.ping(b"one"))
        await (await connection.ping(b"two"))
        await connection.send(b"both")
        await connection.wait_closed()

    async def test(port: int) -> None:
        inner = await dial(port)
        transport = await inner.opened()
        await inner.until(lambda: inner.received == b"both")
        transport.close()
        await inner.lost.wait()

    run(with_library(ping, test))


def test_pongs_wait_for_a_peer_that_does_not_read() -> None:
    written = 20_000_000
    inners: list[Inner] = []

    async def ping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept(reader, writer)
        await stopped.wait()
        for number in range(50):
            writer.write(frame(PING, b"%d" % number, masked=False))
            writer.write(frame(BINARY, b".", masked=False))
            await inners[0].has(number + 1)
        received = bytearray()
        while data := await reader.read(1 << 20):
            received += data
        decoder = Protocol(SERVER, max_size=None)
        decoder.receive_data(received)
        frames = [one for one in decoder.events_received() if isinstance(one, Frame)]
        assert sum(len(one.data) for one in frames if one.opcode == BINARY) == written
        assert [bytes(one.data) for one in frames if one.opcode == PONG] == [b"49"]

    async def test(port: int) -> None:
        inner = await dial(port)
        inners.append(inner)
        transport = await inner.opened()
        transport.write(bytes(written))
        assert inner.pauses > inner.resumes
        stopped.set()
        await inner.until(lambda: len(inner.received) == 50 and inner.pauses == inner.resumes)
        transport.close()
        await inner.lost.wait()

    stopped = asyncio.Event()
    run(with_script(ping, test))


def test_bytes_right_behind_the_upgrade_and_masks_that_differ() -> None:
    received = b""

    async def eager(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        await accept(reader, writer)
        writer.write(frame(BINARY, b"first", masked=False) + frame(PING, masked=False)[:1])
        received = await reader.readexactly(2 * (6 + 9))

    async def test(port: int) -> None:
        inner = await dial(port)
        transport = await inner.opened()
        await inner.until(lambda: inner.received == b"first")
        assert isinstance(transport, WebSocketStream)
        transport.write(b"same data")
        transport.write(b"same data")
        await inner.lost.wait()

    run(with_script(eager, test))
    assert received[:2] == received[15:17] == bytes([0x80 | BINARY, 0x80 | 9])
    assert received[2:15] != received[17:]
