"""TLS of a client's socket: real sockets, OpenSSL at both ends, every cut of the bytes."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

import pytest

from holdfast.io.event_loop.loop import new_event_loop
from holdfast.io.sockets.tls_stream import TlsStream
from holdfast.security.tls import server_context
from tests.support.certificates import Authority

TIMEOUT_S = 20.0
VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class Receiver(asyncio.Protocol):
    """The protocol above TLS. It keeps everything that it is told."""

    def __init__(self) -> None:
        self.received = b""
        self.calls: list[str] = []
        self.changed = asyncio.Event()
        self.aborts: TlsStream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._note("made")
        if self.aborts is not None:
            self.aborts.abort()

    def data_received(self, data: bytes) -> None:
        assert data
        self.received += data
        self.changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._note("lost")

    def pause_writing(self) -> None:
        self._note("paused")

    def resume_writing(self) -> None:
        self._note("resumed")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.changed.set()

    async def wait_for(self, call: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while call not in self.calls:
                self.changed.clear()
                await self.changed.wait()

    async def wait_for_bytes(self, count: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.received) < count:
                self.changed.clear()
                await self.changed.wait()


class Client:
    """The other end: OpenSSL over a socket of which the test sees the bytes."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext) -> None:
        self.plain = plain
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname="127.0.0.1")
        self._loop = asyncio.get_running_loop()

    async def flush(self, piece_bytes: int = 1 << 30) -> None:
        data = self.outgoing.read()
        for start in range(0, len(data), piece_bytes):
            await self._loop.sock_sendall(self.plain, data[start : start + piece_bytes])
            await asyncio.sleep(0)

    async def feed(self) -> bool:
        """Take bytes from the socket. False: it is closed."""
        async with asyncio.timeout(TIMEOUT_S):
            data = await self._loop.sock_recv(self.plain, 65536)
        self.incoming.write(data)
        return bool(data)

    async def shake_hands(self, piece_bytes: int = 1 << 30) -> None:
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                await self.flush(piece_bytes)
                assert await self.feed()
                continue
            await self.flush(piece_bytes)
            return

    async def read(self, count: int) -> bytes:
        """`count` bytes, or fewer if close_notify comes before."""
        data = b""
        while len(data) < count:
            try:
                piece = self.tls.read(count - len(data))
            except ssl.SSLWantReadError:
                assert await self.feed(), data[-100:]
                continue
            if not piece:
                break
            data += piece
        return data

    async def read_to_end(self) -> bytes:
        """The bytes of the socket until it is closed."""
        data = b""
        async with asyncio.timeout(TIMEOUT_S):
            while piece := await self._loop.sock_recv(self.plain, 65536):
                data += piece
        return data


class Site:
    """A listening socket with TLS, whose clients check the name of the server."""

    def __init__(self, directory: Path, loop: asyncio.AbstractEventLoop, version: str) -> None:
        authority = Authority(directory)
        issued = authority.issue()
        self.context = server_context(Path(issued.certificate), Path(issued.key))
        self.client_context = ssl.create_default_context(cafile=authority.ca)
        self.client_context.maximum_version = VERSIONS[version]
        self._loop = loop
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)

    @asynccontextmanager
    async def connect(
        self, timeout_s: float = TIMEOUT_S
    ) -> AsyncIterator[tuple[TlsStream, Receiver, Client]]:
        """A stream whose handshake has not begun, what is above it, and its client."""
        plain = socket.socket()
        plain.setblocking(False)
        await self._loop.sock_connect(plain, self._listener.getsockname())
        accepted, _ = await self._loop.sock_accept(self._listener)
        receiver = Receiver()
        stream = TlsStream(receiver, self.context, self._loop, timeout_s)
        await self._loop.connect_accepted_socket(
            lambda: cast(asyncio.BaseProtocol, stream), accepted
        )
        with plain:
            yield stream, receiver, Client(plain, self.client_context)
            stream.abort()
            if "made" in receiver.calls:
                await receiver.wait_for("lost")
        assert receiver.calls.count("made") == receiver.calls.count("lost")

    @asynccontextmanager
    async def shake_hands(self) -> AsyncIterator[tuple[TlsStream, Receiver, Client]]:
        async with self.connect() as (stream, receiver, client):
            await client.shake_hands()
            await stream.handshake
            yield stream, receiver, client

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(params=["uvloop", "asyncio"])
def loop(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoop:
    return new_event_loop() if request.param == "uvloop" else asyncio.new_event_loop()


class Runner:
    """Runs a test of one version on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, directory: Path) -> None:
        self.loop = loop
        self.directory = directory

    def __call__(self, test: object, version: str = "1.3") -> None:
        async def play() -> None:
            site = Site(self.directory, self.loop, version)
            try:
                await test(site)  # type: ignore[operator]
            finally:
                site.close()

        self.loop.set_exception_handler(self._fail)
        self.failures: list[object] = []
        try:
            self.loop.run_until_complete(play())
        finally:
            self.loop.close()
        assert self.failures == []

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        self.failures.append(context)


@pytest.fixture
def run(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> Runner:
    return Runner(loop, tmp_path)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 30])
def test_bytes_arrive_however_they_are_cut(run: Runner, version: str, piece_bytes: int) -> None:
    async def test(site: Site) -> None:
        async with site.connect() as (stream, receiver, client):
            shaking = asyncio.ensure_future(client.shake_hands(piece_bytes))
            await stream.handshake
            await shaking
            assert receiver.calls == ["made"]
            for size in (1, 100, 40_000 if piece_bytes > 1 else 400):
                client.tls.write(b"a" * size)
                client.tls.write(b"b")
                receiver.received = b""
                await client.flush(piece_bytes)
                await receiver.wait_for_bytes(size + 1)
                assert receiver.received == b"a" * size + b"b"
                stream.write(b"c" * size)
                stream.write(b"")
                assert await client.read(size) == b"c" * size

    run(test, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_client_that_does_not_read_or_is_not_read(run: Runner, version: str) -> None:
    """Both directions stop at a bound, and nothing is lost."""
    data = bytes(range(256)) * 4096 * 8

    async def test(site: Site) -> None:
        async with site.shake_hands() as (stream, receiver, client):
            stream.set_write_buffer_limits(high=65_536)
            sent = 0
            while "paused" not in receiver.calls:
                stream.write(data[sent : sent + 50_000])
                sent += 50_000
                assert sent < len(data)
            assert 65_536 < stream.get_write_buffer_size() < 200_000
            assert await client.read(sent) == data[:sent]
            await receiver.wait_for("resumed")

            stream.pause_reading()
            client.tls.write(data)
            sending = asyncio.ensure_future(client.flush())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await asyncio.shield(sending)
            assert len(receiver.received) <= 65_536 * 8
            stream.resume_reading()
            await receiver.wait_for_bytes(len(data))
            await sending
            assert receiver.received == data

    run(test, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_close_lets_the_last_bytes_arrive(run: Runner, version: str) -> None:
    """A client that sends on reads them too, because nothing of it is left unread."""

    async def test(site: Site) -> None:
        async with site.shake_hands() as (stream, receiver, client):
            stream.pause_reading()
            client.tls.write(b"late" * 10_000)
            await client.flush()
            stream.write(b"last")
            stream.close()
            assert stream.is_closing()
            stream.write(b"dropped")
            client.tls.write(b"later" * 10_000)
            await client.flush()
            assert await client.read(100) == b"last"
            assert "lost" not in receiver.calls
            client.tls.unwrap()
            await client.flush()
            assert await client.read_to_end() == b""
            await receiver.wait_for("lost")
            assert receiver.received == b""

    run(test, version)


def test_close_waits_for_no_client_that_is_silent(run: Runner) -> None:
    async def test(site: Site) -> None:
        async with site.shake_hands() as (stream, receiver, client):
            stream.close()
            assert await client.read(1) == b""
            assert "lost" not in receiver.calls
            await receiver.wait_for("lost")

    run(test)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_client_closes(run: Runner, version: str) -> None:
    async def test(site: Site) -> None:
        async with site.shake_hands() as (stream, receiver, client):
            client.tls.write(b"last")
            with pytest.raises(ssl.SSLWantReadError):
                client.tls.unwrap()
            await client.flush()
            await receiver.wait_for("lost")
            assert receiver.received == b"last"
            assert stream.is_closing()
            while await client.feed():
                pass
            client.tls.unwrap()

    run(test, version)


def test_the_socket_ends(run: Runner) -> None:
    async def test(site: Site) -> None:
        async with site.shake_hands() as (_, receiver, client):
            client.tls.write(b"last")
            await client.flush()
            client.plain.close()
            await receiver.wait_for("lost")
            assert receiver.received == b"last"

    run(test)


def test_nothing_arrives_after_an_abort(run: Runner) -> None:
    """A client above a limit is cut when its handshake ends. Its first bytes may have come with the
    last ones of the handshake; the protocol above knows no such connection, and must not fail."""

    async def test(site: Site) -> None:
        async with site.connect() as (stream, receiver, client):
            receiver.aborts = stream
            with pytest.raises(ssl.SSLWantReadError):
                client.tls.do_handshake()
            while not client.outgoing.pending or not client.tls.cipher():
                await client.flush()
                assert await client.feed()
                with suppress(ssl.SSLWantReadError):
                    client.tls.do_handshake()
            client.tls.write(b"first")
            await client.flush()
            await receiver.wait_for("lost")
            assert receiver.received == b""
            assert stream.is_closing()

    run(test)


@pytest.mark.parametrize("garbage", [b"\x17\x03\x03\x00\x20" + bytes(32), b"GET / HTTP/1.1\r\n"])
def test_garbage_after_the_handshake(run: Runner, garbage: bytes) -> None:
    """The bytes before it are passed on, and the client gets an alert."""

    async def test(site: Site) -> None:
        async with site.shake_hands() as (_, receiver, client):
            client.tls.write(b"good")
            await client.flush()
            await receiver.wait_for_bytes(4)
            client.outgoing.write(garbage)
            await client.flush()
            await receiver.wait_for("lost")
            assert receiver.received == b"good"
            # The session tickets of TLS 1.3, and then the alert.
            with pytest.raises(ssl.SSLError, match="ALERT"):
                await client.read(1)

    run(test)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", ssl.SSLError),
        (b"\x16\x03\x01\xff\xff" + bytes(100), ssl.SSLError),
        (b"\x16\x03\x01\x00\x05" + bytes(5), ssl.SSLError),
        (b"", ConnectionResetError),
        (b"\x16\x03\x01", ConnectionResetError),
    ],
)
def test_no_handshake(run: Runner, sent: bytes, error: type[OSError]) -> None:
    async def test(site: Site) -> None:
        async with site.connect() as (stream, receiver, client):
            client.outgoing.write(sent)
            await client.flush()
            if error is ConnectionResetError:
                client.plain.shutdown(socket.SHUT_WR)
            with pytest.raises(error):
                await stream.handshake
            await client.read_to_end()
            assert receiver.calls == []

    run(test)


def test_a_silent_handshake_ends(run: Runner) -> None:
    async def test(site: Site) -> None:
        async with site.connect(timeout_s=0.1) as (stream, receiver, client):
            with pytest.raises(ConnectionAbortedError, match=r"handshake within 0\.1 s"):
                await stream.handshake
            with suppress(ConnectionResetError):
                assert await client.read_to_end() == b""
            assert receiver.calls == []

    run(test)


def test_a_certificate_that_the_server_does_not_accept(run: Runner) -> None:
    """The alert names the reason."""

    async def test(site: Site) -> None:
        site.context.verify_mode = ssl.CERT_REQUIRED
        async with site.connect() as (stream, receiver, client):
            await client.shake_hands()
            with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
                await stream.handshake
            with pytest.raises(ssl.SSLError, match="ALERT_CERTIFICATE_REQUIRED"):
                await client.read(1)
            assert receiver.calls == []

    run(test)
