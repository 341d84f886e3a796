"""The resident memory of a real broker before and after what a hostile client can do: each bound is
several times what is needed, and a fraction of what the attack cost without one."""

import socket

import pytest

from tests.e2e import wire
from tests.e2e.brokers import Holdfast
from tests.e2e.conftest import StartHoldfast

pytestmark = pytest.mark.long

MIB = 1 << 20
LARGE = 1_000_000
"""Bytes of a payload."""


class Growth:
    """Of the broker's memory since this object was made."""

    def __init__(self, broker: Holdfast) -> None:
        self._broker = broker
        # What is there once and for all is not counted.
        with wire.Wire(broker.port) as client:
            client.connect("warm-up", expiry_s=10)
            client.subscribe(("warm/#", 1))
            client.publish("warm/up", bytes(LARGE), qos=1, retain=True)
            client.message()
            client.publish("warm/up", b"", qos=1, retain=True)
        self._before = broker.rss_bytes()

    def mib(self) -> float:
        return (self._broker.rss_bytes() - self._before) / MIB


def settle(broker: Holdfast, name: str) -> None:
    """Everything sent so far has been dealt with, as far as it will be."""
    with wire.Wire(broker.port, timeout_s=60) as client:
        client.connect(f"settle-{name}", expiry_s=1)


class Flood:
    """The same packets again and again; what the broker has not taken goes first the next time."""

    def __init__(self, client: wire.Wire, packets: bytes) -> None:
        self._socket = client.socket
        self._packets = memoryview(packets)
        self._at = 0

    def push(self) -> None:
        """Send the rest of one round, as far as the broker takes it within a second."""
        self._socket.settimeout(1.0)
        while self._at < len(self._packets):
            try:
                self._at += self._socket.send(self._packets[self._at : self._at + 65_536])
            except TimeoutError:
                return
        self._at = 0


def test_user_properties_of_connect(start_holdfast: StartHoldfast) -> None:
    """Kept, they cost 2 MiB for each connection."""
    broker = start_holdfast({})
    growth = Growth(broker)
    clients = []
    for number in range(60):
        client = wire.Wire(broker.port)
        client.connect(f"c{number}", props=[(wire.USER_PROPERTY, ("k", "v"))] * 10_000)
        clients.append(client)
    assert growth.mib() < 60
    for client in clients:
        client.socket.close()


@pytest.mark.parametrize(("prefix", "limit_mib"), [("$SYS/", 30), ("t/", 200)])
def test_long_topics(start_holdfast: StartHoldfast, prefix: str, limit_mib: int) -> None:
    """Refused ones are not remembered, others within a bound."""
    broker = start_holdfast({})
    growth = Growth(broker)
    with wire.Wire(broker.port, timeout_s=60) as client:
        client.connect("c")
        for number in range(3000):
            client.send(wire.publish(f"{prefix}{number}/" + "x" * 60_000, b""))
        client.ping()
        assert growth.mib() < limit_mib


def test_retained_store(start_holdfast: StartHoldfast) -> None:
    broker = start_holdfast({"limits": {"retained_bytes": 32 * MIB}})
    growth = Growth(broker)
    with wire.Wire(broker.port, timeout_s=60) as client:
        client.connect("c")
        for number in range(150):
            client.publish(f"r/{number}", bytes(LARGE), qos=1, retain=True)
        assert growth.mib() < 32 + 60


@pytest.mark.parametrize("kind", ["retained", "SUBSCRIBE"])
def test_floods_of_what_is_logged(start_holdfast: StartHoldfast, kind: str) -> None:
    """Not throttled, 400 MB of either cost 150 to 410 MiB."""
    broker = start_holdfast({"limits": {"pending_bytes_max": 4 * MIB}})
    growth = Growth(broker)
    if kind == "retained":
        packets = wire.publish("flood", bytes(100_000), retain=True) * 50
    else:
        filters = [(f"f/{number}/" + "x" * 100, 1) for number in range(400)]
        packets = b"".join(wire.subscribe(number, filters) for number in range(1, 20))
    worst = 0.0
    with wire.Wire(broker.port, timeout_s=60) as client:
        client.connect("flood", expiry_s=100)
        flood = Flood(client, packets)
        for _ in range(40):
            flood.push()
            worst = max(worst, growth.mib())
    assert worst < 80


def unread(port: int, name: str) -> wire.Wire:
    client = wire.Wire(port, timeout_s=60)
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    client.connect(name, clean=False, expiry_s=1000)
    return client


def test_resumes_by_clients_that_do_not_read(start_holdfast: StartHoldfast) -> None:
    """Sent as a whole, four of them cost 840 MiB and more."""
    broker = start_holdfast({})
    names = [f"c{number}" for number in range(4)]
    clients = [unread(broker.port, name) for name in names]
    for client in clients:
        client.subscribe(("t", 1))
    with wire.Wire(broker.port, timeout_s=60) as publisher:
        publisher.connect("p")
        for _ in range(150):
            publisher.publish("t", bytes(LARGE), qos=1)
            for client in clients:
                client.expect(wire.PUBLISH)
    for client in clients:
        client.socket.close()
    growth = Growth(broker)
    clients = [unread(broker.port, name) for name in names]
    settle(broker, "resumes")
    assert growth.mib() < 80
    for client in clients:
        client.socket.close()


def test_unacknowledged_messages_of_a_shared_group(start_holdfast: StartHoldfast) -> None:
    """Kept by its member, twice, 150 of 1 MB cost 300 MiB."""
    broker = start_holdfast({})
    growth = Growth(broker)
    with wire.Wire(broker.port, timeout_s=60) as member, wire.Wire(broker.port) as publisher:
        member.connect("m")
        member.subscribe(("$share/g/t", 1))
        publisher.connect("p")
        for _ in range(150):
            publisher.publish("t", bytes(LARGE), qos=1)
            member.expect(wire.PUBLISH)
        assert growth.mib() < 60
        # Another member gets all of them.
        with wire.Wire(broker.port, timeout_s=60) as other:
            other.connect("o")
            other.subscribe(("$share/g/t", 1))
            member.socket.close()
            for _ in range(150):
                assert len(other.message().payload) == LARGE
        assert growth.mib() < 60
