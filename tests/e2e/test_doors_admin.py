"""Strangers at the admin port: no state of a connection before proof keeps others out."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from holdfast.api.admin import CONNECTIONS_MAX
from holdfast.api.log_sender import FIRST_BYTES, READERS_MAX
from tests.e2e.brokers import Holdfast
from tests.e2e.test_admin_access import ask, made_token

HOST = b"Host: localhost\r\n"
READER_HEAD = FIRST_BYTES + b"HTTP/1.1\r\n" + HOST
STATES = {
    "silent": b"",
    "part of a head": b"GET /healthz HTTP/1.1\r\n",
    "part of a body": b"POST /api/v1/login HTTP/1.1\r\n" + HOST + b"Content-Length: 99\r\n\r\n{",
    "unread replies": (b"GET /console/style.css HTTP/1.1\r\n" + HOST + b"\r\n") * 1000,
    "unread refusals": (b"GET /nothing HTTP/1.1\r\n" + HOST + b"\r\n") * 1000,
    "beginning of a reader": FIRST_BYTES[:10],
    "part of a reader's head": READER_HEAD,
    "refused reader": READER_HEAD + b"Content-Length: 9\r\n\r\n",
}
"""The bytes of a stranger before it stops reading and writing."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Holdfast, str]]:
    broker = Holdfast(tmp_path_factory.mktemp("doors"), {})
    token = made_token(broker.data, "reader")
    broker.start()
    yield broker, token
    broker.kill()
    assert "Traceback" not in broker.log_text(), broker.log_text()[-6000:]


def held(port: int, sent: bytes, count: int) -> Iterator[socket.socket]:
    for _ in range(count):
        one = socket.socket()
        # A small window, so that few replies are enough to stop the node's writing.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.settimeout(5)
        one.connect(("127.0.0.1", port))
        one.setblocking(False)
        with contextlib.suppress(OSError):
            one.send(sent)
        yield one


@pytest.mark.parametrize("state", STATES)
def test_strangers_make_room(node: tuple[Holdfast, str], state: str) -> None:
    broker, token = node
    count = max(CONNECTIONS_MAX, READERS_MAX) + 6
    with contextlib.ExitStack() as stack:
        for one in held(broker.admin_port, STATES[state], count):
            stack.enter_context(one)
        for _ in range(5):
            assert ask(broker.admin_port, "GET", "/healthz").status == 200
            assert ask(broker.admin_port, "GET", "/readyz").status == 200
            assert ask(broker.admin_port, "GET", "/api/v1/log", token).status == 200
            log_read = ask(broker.admin_port, "POST", "/api/v1/log/read", token, {"ranges": 1})
            # It is a request that the node reads, and not one without room.
            assert log_read.status == 400


def test_health_has_places_of_its_own(node: tuple[Holdfast, str]) -> None:
    """Callers with credentials that read nothing take no place of health checks."""
    broker, token = node
    head = f"GET /api/v1/openapi.json HTTP/1.1\r\nAuthorization: Bearer {token}\r\n"
    with contextlib.ExitStack() as stack:
        sent = (head.encode() + HOST + b"\r\n") * 100
        for one in held(broker.admin_port, sent, CONNECTIONS_MAX):
            stack.enter_context(one)
        assert ask(broker.admin_port, "GET", "/healthz").status == 200
        assert ask(broker.admin_port, "GET", "/readyz").status == 200
