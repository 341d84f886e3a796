"""An HTTP service that decides about the clients of a real broker."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from holdfast.protocol.mqtt import reasons
from tests.e2e import wire
from tests.e2e.brokers import Holdfast
from tests.e2e.conftest import StartHoldfast


class Service:
    """An HTTP service with a function for its replies: (status, body)."""

    def __init__(self) -> None:
        self.requests: list[dict[str, object]] = []
        self.authorization = ""
        self.connections = 0
        self.closes_kept = False
        """Whether it closes a kept connection when the next request arrives."""
        self.answer: Callable[[dict[str, object]], tuple[int, bytes]] = lambda _: (500, b"")
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            is_kept = False

            def setup(self) -> None:
                service.connections += 1
                super().setup()

            def do_POST(self) -> None:
                if self.is_kept and service.closes_kept:
                    self.close_connection = True
                    return
                self.is_kept = True
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.requests.append(body)
                service.authorization = self.headers.get("Authorization", "")
                status, data = service.answer(body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *arguments: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/"


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.server.shutdown()
    made.server.server_close()
    made.thread.join()


def login(broker: Holdfast, user: str = "", client_id: str = "c") -> tuple[wire.Wire, int]:
    client = wire.Wire(broker.port)
    flags = 0x02 | (0xC0 if user else 0)
    body = wire.text("MQTT") + bytes([5, flags, 0, 60, 0]) + wire.text(client_id)
    if user:
        body += wire.text(user) + wire.text("secret")
    client.send(wire.packet(0x10, body))
    return client, wire.read_connack(client.expect(wire.CONNACK), 5).reason


def allow(**members: object) -> tuple[int, bytes]:
    return 200, json.dumps({"result": "allow", **members}).encode()


def test_a_service_decides_and_its_connections_are_kept(
    start_holdfast: StartHoldfast, service: Service, tmp_path: Path
) -> None:
    header = tmp_path / "header"
    header.write_text("Bearer very-secret\n")
    settings = {"url": service.url, "authorization_file": str(header), "remember_s": 30.0}
    broker = start_holdfast({"security.http": settings})
    service.answer = lambda body: (
        allow(publish=["own/%u"], subscribe=[]) if body["username"] == "alice" else (403, b"")
    )
    client, reason = login(broker, "alice")
    with client:
        assert reason == 0
        assert client.publish("own/alice", b"", qos=1) in (0, 0x10)
        assert client.publish("other", b"", qos=1) == reasons.NOT_AUTHORIZED
    assert service.authorization == "Bearer very-secret"
    assert service.requests[0]["password"] == "secret"
    for user, expected in (("mallory", reasons.NOT_AUTHORIZED), ("", reasons.NOT_AUTHORIZED)):
        client, reason = login(broker, user)
        client.socket.close()
        assert reason == expected
    asked = len(service.requests)
    client, reason = login(broker, "alice")
    client.socket.close()
    assert reason == 0
    # Each process remembers its own answers.
    assert len(service.requests) < asked + broker.processes
    assert service.connections <= broker.processes
    service.answer = lambda body: (200, b'{"result": "ignore"}')
    client, reason = login(broker, "other")
    client.socket.close()
    assert reason == reasons.NOT_AUTHORIZED
    text = broker.log_text()
    assert "secret" not in text


def test_a_kept_connection_that_the_service_closes_costs_no_client_its_connection(
    start_holdfast: StartHoldfast, service: Service
) -> None:
    """A service closes idle connections, maybe in the moment of the next question."""
    broker = start_holdfast({"security.http": {"url": service.url}})
    service.answer = lambda body: allow()
    service.closes_kept = True
    for name in ("one", "two", "three"):
        client, reason = login(broker, name, name)
        client.socket.close()
        assert reason == 0
    assert service.connections == 3


def test_a_service_that_hangs_refuses_and_delays_nobody(
    start_holdfast: StartHoldfast, service: Service
) -> None:
    broker = start_holdfast({"security.http": {"url": service.url, "timeout_s": 1.0}})
    service.answer = lambda body: allow()
    one, _ = login(broker, "one", "one")
    hangs = threading.Event()

    def hang(body: dict[str, object]) -> tuple[int, bytes]:
        hangs.wait(20.0)
        return allow()

    service.answer = hang
    with one:
        waiting = [wire.Wire(broker.port) for _ in range(5)]
        for number, client in enumerate(waiting):
            body = wire.text("MQTT") + bytes([5, 2, 0, 60, 0]) + wire.text(f"w{number}")
            client.send(wire.packet(0x10, body))
        slowest = 0.0
        until = time.monotonic() + 0.7
        while time.monotonic() < until:
            began = time.monotonic()
            one.ping()
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 0.5
        for client in waiting:
            answer = wire.read_connack(client.expect(wire.CONNACK), 5)
            assert answer.reason == reasons.SERVER_UNAVAILABLE
            client.socket.close()
    hangs.set()
    assert "http_check_failed" in broker.log_text()


def test_a_service_decides_about_topics(
    start_holdfast: StartHoldfast, service: Service, tmp_path: Path
) -> None:
    """It allows, denies, breaks, replies with garbage, and hangs, which delays its client only."""
    users = tmp_path / "header"
    users.write_text("Bearer very-secret\n")
    settings = {"topic_url": service.url, "authorization_file": str(users), "timeout_s": 0.7}
    broker = start_holdfast({"security.http": settings})
    hangs = threading.Event()

    def reply(body: dict[str, object]) -> tuple[int, bytes]:
        topic = str(body["topic"])
        if topic == "hangs":
            hangs.wait(20.0)
        replies = {"no": (403, b""), "broken": (500, b""), "garbage": (200, b"<html>")}
        return replies.get(topic, (200, b'{"Ok": true}'))

    service.answer = reply
    client, reason = login(broker)
    other, _ = login(broker, client_id="other")
    with client, other:
        assert reason == 0
        asked = len(service.requests)
        for _ in range(3):
            assert client.publish("yes", b"", qos=1) in (0, 0x10)
        assert client.publish("no", b"", qos=1) == reasons.NOT_AUTHORIZED
        assert client.publish("broken", b"", qos=1) == reasons.QUOTA_EXCEEDED
        assert client.publish("garbage", b"", qos=1) == reasons.QUOTA_EXCEEDED
        assert len(service.requests) == asked + 4
        assert service.requests[asked] == {
            "client_id": "c", "clientid": "c", "username": None, "address": "127.0.0.1",
            "listener": f"127.0.0.1:{broker.port}", "action": "publish", "acc": 2, "topic": "yes",
        }  # fmt: skip
        assert service.authorization == "Bearer very-secret"
        began = time.monotonic()
        client.send(wire.publish("hangs", b"", 1, 700))
        while time.monotonic() < began + 0.5:
            pinged = time.monotonic()
            other.ping()
            assert time.monotonic() - pinged < 0.4
        assert client.expect(wire.PUBACK).reason == reasons.QUOTA_EXCEEDED
        hangs.set()
    assert "http_check_failed" in broker.log_text()
