"""A member and its topology manager, and what else may answer at that address."""

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from holdfast_federation.sidecar.manager_client import client as manager_client
from holdfast_federation.sidecar.manager_client.client import LinkState, ManagerClient
from holdfast_federation.sidecar.manager_client.http import (
    ANSWER_BYTES_MAX,
    ManagerHttp,
    ManagerRefuses,
    ManagerUnreachable,
)
from holdfast_federation.sidecar.store.member_files import MemberFiles
from tests.support.ports import free_port
from tests.support.scripted_edge import until

A, B, C = "0a" * 16, "0b" * 16, "0c" * 16


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 100)

    asyncio.run(limited())


def envelope(data: object, code: int = 200, description: str = "") -> bytes:
    body = json.dumps(
        {"status": "success", "code": code, "data": data, "description": description}
    ).encode()
    head = f"HTTP/1.1 {code} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


@asynccontextmanager
async def server(answer: bytes, tls: ssl.SSLContext | None = None) -> Any:
    """Says the same to everybody; yields its port and the requests."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        writer.close()

    port = free_port()
    listening = await asyncio.start_server(serve, "127.0.0.1", port, ssl=tls)
    async with listening:
        yield port, requests


async def ask(port: int, scheme: str = "http", ca: str = "", timeout_s: float = 60) -> Any:
    http = ManagerHttp(f"{scheme}://127.0.0.1:{port}/under/", ca)
    return await http.request("POST", "/x", {"a": 1}, "token", timeout_s)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"", "answers no HTTP"),
        (b"SSH-2.0\r\n", "answers no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", "answers no HTTP"),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", "no topology manager"),
        (b"HTTP/1.1 200 OK\r\n\r\n[1]", "no topology manager"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000, "no topology manager"),
        (b"HTTP/1.1 404 No\r\n\r\n<html>", "answers 404 and is no topology manager"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(ANSWER_BYTES_MAX), "answers more than it may"),
        (envelope(None, 503, "the disk is full"), "answers 503: the disk is full"),
        (envelope(None, 429, "later"), "answers 429: later"),
    ],
    ids=[
        "nothing", "SSH", "cut short", "no JSON", "a list", "deep", "HTML", "endless", "full",
        "later",
    ],
)  # fmt: skip
def test_what_is_no_answer(answer: bytes, text: str) -> None:
    async def test() -> None:
        async with server(answer) as (port, _):
            with pytest.raises(ManagerUnreachable, match=text):
                await ask(port)

    run(test)


def test_answers() -> None:
    async def test() -> None:
        async with server(envelope({"x": 1})) as (port, requests):
            assert await ask(port) == {"x": 1}
            head = requests[0].decode()
            assert head.startswith("POST /under/x HTTP/1.1\r\n")
            assert f"Host: 127.0.0.1:{port}\r\n" in head
            assert "Authorization: Bearer token\r\n" in head
        body = b'{"data": [7], "description": ""}'
        chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunked += b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        async with server(chunked) as (port, _):
            assert await ask(port) == [7]
        async with server(envelope(None, 409, "no")) as (port, _):
            with pytest.raises(ManagerRefuses, match="no") as caught:
                await ask(port)
            assert caught.value.status == 409

    run(test)


def test_nobody_and_silence() -> None:
    async def test() -> None:
        with pytest.raises(ManagerUnreachable, match=r"127\.0\.0\.1"):
            await ask(free_port())
        async with server(b"HTTP/1.1 200 OK\r\n") as (port, _):
            with pytest.raises(ManagerUnreachable, match=r"answers no HTTP|no topology"):
                await ask(port)
        with (
            socket.create_server(("127.0.0.1", free_port())) as silent,
            pytest.raises(ManagerUnreachable, match=r"gives no answer in 0\.2 s"),
        ):
            await ask(silent.getsockname()[1], timeout_s=0.2)

    run(test)


def test_tls(tmp_path: Path) -> None:
    async def test() -> None:
        authority = trustme.CA()
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(tls)
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
        async with server(envelope("x"), tls) as (port, _):
            assert await ask(port, "https", str(tmp_path / "ca.pem")) == "x"
            with pytest.raises(ManagerUnreachable, match="certificate verify failed"):
                await ask(port, "https", str(tmp_path / "other.pem"))
            with pytest.raises(ManagerUnreachable):
                await ask(port)

    run(test)


class Member:
    """A federator, as the client sees it."""

    def __init__(self) -> None:
        self.neighbours: list[dict[str, str]] = []
        self.up: dict[bytes, LinkState] = {}

    def links(self) -> dict[bytes, LinkState]:
        return self.up

    def digest(self) -> bytes:
        return b"\x01\x02"

    def interest(self) -> int:
        return 5

    def set_neighbours(self, neighbours: dict[bytes, str]) -> None:
        self.neighbours.append({node.hex(): address for node, address in neighbours.items()})


class Manager:
    """The part of the real one that its client meets, with a script."""

    def __init__(self) -> None:
        self.nodes = {1: (A, "a:1"), 2: (B, "b:2"), 3: (C, "c:3"), 4: ("", "")}
        self.neighbours: list[int] = [2]
        self.revision = 5
        self.member = 1
        self.removed = False
        self.tokens = {"good"}
        self.requests: list[tuple[str, str, Any]] = []
        self.changed = asyncio.Event()
        self.port = free_port()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.changed.set()

    def change(self, *neighbours: int) -> None:
        self.revision += 1
        self.neighbours = list(neighbours)
        self.changed.set()
        self.changed = asyncio.Event()

    def of(self, path: str) -> list[Any]:
        return [body for method, at, body in self.requests if at.startswith(path)]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        text = await reader.readexactly(int(lines["Content-Length"]))
        method, path, _ = head.split(" ", 2)
        path = path.removeprefix("/api/v1")
        self.requests.append((method, path, json.loads(text) if text else None))
        token = lines.get("Authorization", "").removeprefix("Bearer ")
        writer.write(await self._answer(method, path, token))
        writer.close()

    async def _answer(self, method: str, path: str, token: str) -> bytes:
        if token not in self.tokens:
            return envelope(None, 401, f"the token {token!r} is not known")
        if path == "/join":
            self.removed = False
            self.tokens = {"own"}
            return envelope(
                {
                    "id": self.member, "ip": "", "neighbors": self._neighbours(), "redundancy": 2,
                    "coreAnnInterval": 1, "beaconInterval": 1, "revision": self.revision,
                    "token": "own",
                }
            )  # fmt: skip
        if path == "/nodes":
            return envelope([self._view(id) for id in self.nodes])
        if self.removed:
            return envelope(None, 404, "there is no such member")
        if path.startswith("/watch"):
            since = int(path.partition("since=")[2].partition("&")[0])
            if since == self.revision:
                await self.changed.wait()
            return envelope(
                {"revision": self.revision, "changed": True, "links": [],
                 "neighbors": self._neighbours()}
            )  # fmt: skip
        return envelope({"revision": self.revision, "neighbors": self._neighbours()})

    def _neighbours(self) -> list[dict[str, object]]:
        return [
            {"id": id, "ip": f"tcp://{id}:1", "advertise": self.nodes[id][1]}
            for id in self.neighbours
        ]

    def _view(self, id: int) -> dict[str, object]:
        uuid, address = self.nodes[id]
        return {
            "id": id, "ip": f"tcp://{id}:1", "uuid": uuid, "epoch": 1, "advertise": address,
            "labels": {}, "capacity": 0, "state": "HEALTHY", "latency_ms": None, "neighbors": [],
            "joined_at_s": 0.0, "reported_ago_s": None, "digest": "", "interest": 0,
        }  # fmt: skip


@asynccontextmanager
async def client_of(manager: Manager, member: Member, directory: Path) -> Any:
    token_file = directory / "token"
    if not token_file.exists():
        token_file.write_text("good\n")
    client = ManagerClient(
        ManagerHttp(f"http://127.0.0.1:{manager.port}"),
        member,
        {"ip": "tcp://x:1", "uuid": A, "epoch": 3},
        str(token_file),
        MemberFiles(directory),
    )
    task = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await manager.stop()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_client, "REPORT_S", 0.1)
    monkeypatch.setattr(manager_client, "RETRY_S", 0.02)
    monkeypatch.setattr(manager_client, "RETRY_S_MAX", 0.1)


def test_a_member_follows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        manager, member = Manager(), Member()
        await manager.start()
        member.up = {bytes.fromhex(B): LinkState(1.5), bytes.fromhex(C): LinkState(None)}
        async with client_of(manager, member, tmp_path) as client:
            await until(lambda: member.neighbours == [{B: "b:2"}], "neighbours")
            assert manager.of("/join") == [{"ip": "tcp://x:1", "uuid": A, "epoch": 3}]
            assert client.id == 1
            await until(lambda: manager.of("/nodes/1/report"), "a report")
            assert manager.of("/nodes/1/report")[0] == {
                "links": [
                    {"peer": 2, "up": True, "rtt_ms": 1.5},
                    {"peer": 3, "up": True, "rtt_ms": None},
                ],
                "epoch": 3, "digest": "0102", "interest": 5,
            }  # fmt: skip
            manager.change(2, 3, 4)
            await until(lambda: member.neighbours[-1] == {B: "b:2", C: "c:3"}, "more")
            assert "speaks the published protocol" in caplog.text
            del member.up[bytes.fromhex(B)]
            await until(
                lambda: {"peer": 2, "up": False} in manager.of("/nodes/1/report")[-1]["links"],
                "a loss",
            )
            # A member that joined meanwhile is looked up.
            manager.nodes[9] = ("0d" * 16, "d:4")
            manager.change(9)
            await until(lambda: member.neighbours[-1] == {"0d" * 16: "d:4"}, "the new one")
            assert len(manager.of("/join")) == 1

    caplog.set_level(logging.INFO)
    run(test)


def test_a_manager_that_goes_and_comes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        manager, member = Manager(), Member()
        await manager.start()
        async with client_of(manager, member, tmp_path) as client:
            await until(lambda: client.is_connected and member.neighbours, "a place")
            await manager.stop()
            await until(lambda: not client.is_connected, "its absence")
            await asyncio.sleep(0.3)
            assert member.neighbours[-1] == {B: "b:2"}
            assert caplog.text.count("the federation goes on as it is") == 1
            manager.change(3)
            await manager.start()
            await until(lambda: client.is_connected, "its return")
            await until(lambda: member.neighbours[-1] == {C: "c:3"}, "what it wants now")
            assert len(manager.of("/join")) == 1, "an id stays"

    run(test)


def test_a_member_that_was_removed_joins_again(tmp_path: Path) -> None:
    async def test() -> None:
        manager, member = Manager(), Member()
        await manager.start()
        async with client_of(manager, member, tmp_path) as client:
            await until(lambda: client.is_connected, "a place")
            manager.member = 7
            manager.removed = True
            manager.change(3)
            await until(lambda: client.id == 7 and client.is_connected, "another id")
            await until(lambda: manager.of("/nodes/7/report"), "reports")

    run(test)


def test_what_a_restart_needs_is_kept(tmp_path: Path) -> None:
    async def test() -> None:
        manager, member = Manager(), Member()
        await manager.start()
        async with client_of(manager, member, tmp_path) as client:
            await until(lambda: (tmp_path / "manager.json").exists(), "the file")
            await until(lambda: member.neighbours, "neighbours")
            await until(lambda: b"b:2" in (tmp_path / "manager.json").read_bytes(), "neighbours")
        again = Member()
        async with client_of(manager, again, tmp_path) as client:
            # Nobody is there.
            await until(lambda: again.neighbours == [{B: "b:2"}], "neighbours")
            assert client.id is None
            await manager.start()
            await until(lambda: client.is_connected, "a place")
            assert manager.tokens == {"own"}
        # The token of another manager's state: the configured one is tried again.
        manager.tokens = {"good"}
        await manager.start()
        async with client_of(manager, Member(), tmp_path) as client:
            await until(lambda: client.is_connected, "a place")
        for damage in (b"", b"{", b'{"url": 1}', b'{"url": "x", "token": "t"}', b"\xff"):
            (tmp_path / "manager.json").write_bytes(damage)
            manager.tokens = {"good"}
            await manager.start()
            async with client_of(manager, Member(), tmp_path) as client:
                await until(lambda client=client: client.is_connected, "a place")  # type: ignore[misc]

    run(test)


def test_leaving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        manager, member = Manager(), Member()
        await manager.start()
        async with client_of(manager, member, tmp_path) as client:
            await until(lambda: client.is_connected, "a place")
            await client.leave()
            assert ("DELETE", "/nodes/1", None) in manager.requests
            assert not (tmp_path / "manager.json").exists()
            await client.leave()
        client.id = 1
        await client.leave()
        assert "was not told of the end" in caplog.text

    run(test)


def test_a_token_file_that_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        manager, member = Manager(), Member()
        await manager.start()
        async with client_of(manager, member, tmp_path) as client:
            client._stored = manager_client.StoredManager("")
            (tmp_path / "token").unlink()
            await until(lambda: "token: cannot be read" in caplog.text, "a line")
            assert not client.is_connected or client._stored.token
            (tmp_path / "token").write_text("good")
            await until(lambda: client.is_connected, "a place")

    run(test)
