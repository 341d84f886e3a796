"""A subscriber that stops reading: memory stays bounded, the others do not notice, and at QoS 1
it gets everything once it reads again."""

import socket

import pytest

from tests.e2e import wire
from tests.e2e.chaos import Crowd
from tests.e2e.chaos_clients import Publisher, Subscriber
from tests.e2e.chaos_parties import on_loopback
from tests.e2e.conftest import StartHoldfast
from tests.e2e.ledger import Interest, Ledger
from tests.e2e.ledger_checks import check

MESSAGES = 30_000
PAYLOAD_BYTES = 2048
GROWTH_BYTES_MAX = 30 << 20
"""Half of what the slow subscriber has not taken: well above the outbox and the write buffers."""


def deaf(port: int, name: str, qos: int) -> wire.Wire:
    """A durable subscriber of `load/#` with a small receive buffer that reads nothing more."""
    slow = wire.Wire(port, timeout_s=30)
    slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    slow.connect(name, expiry_s=3600)
    assert slow.subscribe(("load/#", qos)) == [qos]
    return slow


@pytest.mark.parametrize("slow_qos", [0, 1, 2])
def test_slow_consumer(start_holdfast: StartHoldfast, slow_qos: int) -> None:
    """[MQTT-4.5.0-1] [MQTT-4.6.0-5]"""
    broker = start_holdfast({"log": {"durability": "memory"}, "limits": {"inflight_max": 65535}})
    ledger = Ledger()
    publisher = Publisher(
        "p1",
        on_loopback(broker.port),
        5,
        ledger,
        ["load/a"],
        1,
        window=200,
        payload_bytes=PAYLOAD_BYTES,
    )
    fast = Subscriber("fast", on_loopback(broker.port), 5, ledger, [Interest("load/+", 1)])
    slow = deaf(broker.port, "slow", slow_qos)
    group = Crowd([publisher, fast])
    assert group.pump(10, lambda: fast.subscribed and publisher.ready)

    publisher.producing = True
    publisher.fill()
    # A first part fills what is there to be filled; the rest must not add to it.
    assert group.pump(60, lambda: len(ledger.acknowledged) > MESSAGES // 10)
    before = broker.rss_bytes()
    assert group.pump(60, lambda: len(ledger.acknowledged) > MESSAGES)
    publisher.producing = False
    assert group.pump(20, lambda: not publisher.inflight)
    assert group.pump(20, lambda: next(ledger.missing(), None) is None), "the fast one waits"
    assert check(ledger) == []
    growth = broker.rss_bytes() - before
    group.close()
    assert growth < GROWTH_BYTES_MAX, f"grew by {growth >> 20} MiB"

    if slow_qos == 0:
        slow.abort()
        with wire.Wire(broker.port) as fresh:
            fresh.connect("fresh")
            fresh.ping()
        return
    received: list[int] = []
    while len(received) < len(ledger.acknowledged):
        received.append(int(slow.message().payload.split(b" ")[1]))
    assert received == list(range(len(ledger.acknowledged)))
    slow.disconnect()
