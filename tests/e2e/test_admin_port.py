"""The admin port's own bounds: who may ask, what garbage does, what unread answers cost.

The routes are read from the application, so a new one is tried, too.
"""

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.api.admin import AdminRoutes
from holdfast.api.dispatch import PLAIN
from holdfast.api.log_routes import READS_MAX
from holdfast.config.schema import Config
from holdfast.log.record import MESSAGE
from tests.e2e import wire
from tests.e2e.brokers import Holdfast
from tests.e2e.conftest import StartHoldfast
from tests.support.journal_files import TIME_US, Journal, record
from tests.support.ports import free_port
from tests.support.waiting import until

WAIT_S = 20.0
RECORD_BYTES = 1 << 20


class Nothing:
    """A server that does not serve: enough to list the routes."""

    broker = None
    sharing = None
    cluster = None
    federation = None
    config = Config()
    is_stopping = False
    restarts = 0

    def __init__(self) -> None:
        self.siblings: list[str] = []


def routes() -> list[tuple[str, str]]:
    declared = [(each.method, each.path) for each in AdminRoutes(Nothing()).endpoints()]
    found = [*declared, ("GET", PLAIN.openapi_path), ("POST", "/api/v1/log/read")]
    return sorted({*found, *(("HEAD", path) for method, path in found if method == "GET")})


ROUTES = routes()
NUMBERS = ["9" * 5000, "-1", "1e9", "0x10", "%00", "%ff%fe", "\u0661".encode().hex(), "", "NaN"]
NAMES = ["start", "end", "bytes", "timestamp_us", "node", "topic", "accept_loss"]


def filled_paths(path: str) -> Iterator[str]:
    if "{" not in path:
        yield path
        return
    before, _, rest = path.partition("{")
    _, _, after = rest.partition("}")
    for value in ["0", "drain", "unsafe-recover", *(number for number in NUMBERS if number)]:
        yield from filled_paths(f"{before}{value}{after}")


def ask(
    port: int, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b""
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.putrequest(method, path, skip_host="Host" in (headers or {}))
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        is_stream = answer.headers.get("Content-Type", "").startswith("text/event-stream")
        return answer.status, b"" if is_stream else answer.read()
    finally:
        connection.close()


@pytest.fixture(scope="module", params=["single", "cluster"])
def node(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Holdfast]:
    settings: dict[str, dict[str, object]] = {}
    if request.param == "cluster":
        settings["cluster"] = {
            "peer_bind": "127.0.0.1",
            "peer_port": free_port(),
            "wait_for_init": False,
            "replication_factor": 1,
            "min_insync": 1,
        }
    broker = Holdfast(tmp_path_factory.mktemp("admin"), settings)
    broker.start()
    with wire.Wire(broker.port) as client:
        client.connect("c")
        client.publish("t", b"x", qos=1)
    yield broker
    broker.kill()
    assert "Traceback" not in broker.log_text(), broker.log_text()[-6000:]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_garbage_is_refused_by_every_route(node: Holdfast, method: str, path: str) -> None:
    for turn, filled in enumerate(filled_paths(path)):
        # Each number with some names, and others at the next path: a route reads few of them.
        for each, number in enumerate(NUMBERS):
            for name in (NAMES[(each + turn) % len(NAMES)], NAMES[(each + turn + 3) % len(NAMES)]):
                code, _ = ask(node.admin_port, method, f"{filled}?{name}={number}")
                assert code < 500 or code == 503, (filled, name, number[:20])
    for body in (b"{", b"[" * 100_000, b'{"ranges":[[0,' + b"9" * 5000 + b",1]]}", b"\xff" * 100):
        code, _ = ask(node.admin_port, method, next(filled_paths(path)), body=body)
        assert code < 500 or code == 503
    assert node.admin("/readyz")[0] == 200


HOSTILE = [
    {"Host": "evil.example"},
    {"Host": "localhost.evil.example:18083"},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_refuses_web_pages(node: Holdfast, method: str, path: str) -> None:
    for headers in HOSTILE:
        code, body = ask(node.admin_port, method, next(filled_paths(path)), headers)
        assert code == 403, headers
        if method != "HEAD":
            assert "error" in json.loads(body)


def test_a_name_is_allowed_by_setting(start_holdfast: StartHoldfast) -> None:
    broker = start_holdfast({"admin": {"hosts": ["broker.example"]}})
    assert ask(broker.admin_port, "GET", "/healthz", {"Host": "broker.example:1"})[0] == 200
    code, body = ask(broker.admin_port, "GET", "/healthz", {"Host": "evil.example"})
    assert code == 403
    assert b"admin.hosts" in body


def test_unsafe_recover_needs_a_word_of_acceptance(node: Holdfast) -> None:
    code, body = ask(node.admin_port, "POST", "/cluster/unsafe-recover?node=n1")
    assert code == 400
    assert b"accept_loss=true" in body


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Holdfast]:
    """A broker with 64 MiB in one partition."""
    directory = tmp_path_factory.mktemp("large")
    journal = Journal(directory / "data", partitions=1, segment_bytes=64 << 20)
    payload = bytes(RECORD_BYTES)
    for number in range(64):
        journal.append(0, [record("t", payload, kind=MESSAGE, timestamp_us=TIME_US + number)])
    settings: dict[str, dict[str, object]] = {
        "log": {"partitions": 1},
        "log.retention": {"age_s": 0},
    }
    broker = Holdfast(directory, settings, journal.directory)
    broker.start()
    yield broker
    broker.kill()
    assert "Traceback" not in broker.log_text(), broker.log_text()[-6000:]


def test_an_answer_in_slices_is_whole(large: Holdfast) -> None:
    code, body = ask(large.admin_port, "GET", f"/api/v1/log/0?start=0&bytes={64 << 20}")
    assert code == 200
    assert len(body) > 60 * RECORD_BYTES
    code, part = ask(large.admin_port, "GET", f"/api/v1/log/0?start=0&bytes={3 << 20}")
    assert code == 200
    assert body.startswith(part)
    assert 3 << 20 <= len(part) <= 5 << 20


def test_unread_answers_cost_little(large: Holdfast) -> None:
    before = large.rss_bytes()
    sockets = []
    for _ in range(8):
        one = socket.create_connection(("127.0.0.1", large.admin_port), timeout=20)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        path = f"/api/v1/log/0?start=0&bytes={64 << 20}"
        one.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        sockets.append(one)
    heads = [one.recv(12, socket.MSG_WAITALL) for one in sockets]
    assert heads.count(b"HTTP/1.1 200") == READS_MAX
    assert heads.count(b"HTTP/1.1 503") == 8 - READS_MAX
    assert large.rss_bytes() - before < 64 << 20
    for one in sockets:
        one.close()

    def reads() -> bool:
        return ask(large.admin_port, "GET", "/api/v1/log/0?start=0&bytes=1")[0] == 200

    until(reads, "readers that have gone keep their places")


def test_idle_sockets_keep_nobody_out(start_holdfast: StartHoldfast) -> None:
    broker = start_holdfast()
    sockets = []
    for _ in range(200):
        one = socket.create_connection(("127.0.0.1", broker.admin_port), timeout=20)
        # Half of them begin as a reader of the log does.
        one.sendall(b"POST /api/v1/log/r" if len(sockets) % 2 else b"GET /healthz HTT")
        sockets.append(one)
    assert ask(broker.admin_port, "GET", "/healthz")[0] == 200
    # The oldest made room.
    assert sockets[0].recv(1) == b""
    assert broker.process is not None
    opened = len(list(Path(f"/proc/{broker.process.pid}/fd").iterdir()))
    assert opened < 130
    # The others are cut in time, though they send a byte now and then.
    last = sockets[-1]
    last.settimeout(0.5)
    deadline = time.monotonic() + WAIT_S
    with contextlib.suppress(ConnectionError):
        while True:
            assert time.monotonic() < deadline, "a request may take for ever"
            last.sendall(b"x")
            try:
                if last.recv(1) == b"":
                    break
            except TimeoutError:
                continue
    for one in sockets:
        one.close()
