"""What no client should send: the connection ends, nobody else notices, nothing is left behind.

The `start_holdfast` fixture fails the test when the broker's log holds a traceback.
"""

import random
import time

import pytest

from tests.e2e import wire
from tests.e2e.brokers import Holdfast
from tests.e2e.conftest import StartHoldfast

SETTINGS = {"limits": {"connect_timeout_s": 1.0, "packet_bytes": 1 << 20}}
CONNECT = wire.connect("garbage")


class Neighbours:
    """A healthy pair of clients on the same broker."""

    def __init__(self, broker: Holdfast) -> None:
        self.publisher = wire.Wire(broker.port)
        self.subscriber = wire.Wire(broker.port)
        self.publisher.connect("healthy-publisher")
        self.subscriber.connect("healthy-subscriber")
        self.subscriber.subscribe(("healthy", 1))
        self.count = 0

    def check(self) -> None:
        self.count += 1
        payload = b"%d" % self.count
        self.publisher.publish("healthy", payload, qos=1)
        message = self.subscriber.message()
        assert (message.topic, message.payload) == ("healthy", payload)


BEFORE_CONNECT = {
    "http": b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n",
    "tls client hello": bytes.fromhex("16030100a5010000a10303") + bytes(160),
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "publish first": wire.publish("t", b"x"),
    "ping first": wire.packet(wire.PINGREQ << 4),
    "five length bytes": b"\x10\xff\xff\xff\xff\x01",
    "unknown protocol": wire.packet(0x10, wire.text("AMQP") + b"\x05\x02\0\0\0" + wire.text("c")),
    "unknown level": wire.packet(0x10, wire.text("MQTT") + b"\x09\x02\0\0\0" + wire.text("c")),
    "reserved flag": wire.packet(0x10, wire.text("MQTT") + b"\x05\x03\0\0\0" + wire.text("c")),
    "will qos 3": wire.packet(0x10, wire.text("MQTT") + b"\x04\x1e\0\0" + wire.text("c") * 3),
    "client id not utf-8": wire.packet(0x10, CONNECT[2:13] + wire.text(b"\xff\xfe")),
    "length beyond the packet": wire.packet(0x10, wire.text("MQTT") + b"\x05\x02\0\0\0\xff\xff"),
    "too large": b"\x10\xff\xff\xff\x7f" + bytes(1000),
}
AFTER_CONNECT = {
    "second connect": CONNECT,
    "reserved packet type": b"\x00\x00",
    "connack from a client": b"\x20\x03\0\0\0",
    "suback from a client": b"\x90\x04\0\1\0\0",
    "subscribe flags": b"\x80" + wire.subscribe(1, [("t", 0)])[1:],
    "subscribe without filters": wire.subscribe(1, []),
    "subscribe qos 3": wire.subscribe(1, [("t", 3)]),
    "subscribe packet id 0": wire.subscribe(0, [("t", 0)]),
    "filter not utf-8": wire.packet(0x82, b"\0\1\0" + wire.text(b"\xc3\x28") + b"\0"),
    "publish qos 3": b"\x36\x06\0\1t\0\1\0",
    "publish wildcard topic": wire.publish("a/#", b"x"),
    "publish empty topic": wire.publish("", b"x"),
    "publish packet id 0": wire.publish("t", b"x", 1, 0),
    "publish null in topic": wire.publish("t\0t", b"x"),
    "publish unknown alias": wire.publish("", b"x", props=[(wire.TOPIC_ALIAS, 7)]),
    "publish alias 0": wire.publish("t", b"x", props=[(wire.TOPIC_ALIAS, 0)]),
    "publish duplicate property": wire.publish(
        "t", b"x", props=[(wire.MESSAGE_EXPIRY, 1), (wire.MESSAGE_EXPIRY, 2)]
    ),
    "publish subscription id": wire.publish("t", b"x", props=[(wire.SUBSCRIPTION_ID, 1)]),
    "publish too large": b"\x30\x80\x80\x80\x01" + bytes(1000),
    "properties beyond the packet": b"\x30\x05\0\1t\x7fx",
    "pubrel flags": b"\x60\x02\0\1",
    "ping with a body": b"\xc0\x01x",
    "unsubscribe without filters": wire.unsubscribe(1, []),
    "auth without a method": b"\xf0\x00",
    "disconnect flags": b"\xe1\x00",
}


@pytest.mark.parametrize("after_connect", [False, True])
def test_wrong_bytes(start_holdfast: StartHoldfast, after_connect: bool) -> None:
    """[MQTT-4.13.1-1] [MQTT-3.1.0-1] [MQTT-3.1.0-2] [MQTT-3.1.4-1] [MQTT-3.1.2-2] [MQTT-3.1.2-3]
    [MQTT-3.3.1-4] [MQTT-3.3.2-2] [MQTT-3.3.2-8] [MQTT-3.3.4-6] [MQTT-3.6.1-1] [MQTT-3.8.1-1]
    [MQTT-3.8.3-2] [MQTT-3.8.3-5] [MQTT-3.10.3-2] [MQTT-4.7.3-1] [MQTT-4.7.3-2]"""
    broker = start_holdfast(SETTINGS)
    neighbours = Neighbours(broker)
    wrong = AFTER_CONNECT if after_connect else BEFORE_CONNECT
    for name, data in wrong.items():
        with wire.Wire(broker.port) as bad:
            if after_connect:
                assert bad.connect("garbage").reason == 0
            bad.send(data)
            try:
                answers = bad.wait_closed()
            except TimeoutError:
                pytest.fail(f"{name}: the connection stays open")
            kinds = [answer.kind for answer in answers]
            allowed = wire.DISCONNECT if after_connect else wire.CONNACK
            assert kinds in ([], [allowed]), f"{name}: answered with packets {kinds}"
            if kinds == [wire.DISCONNECT]:
                assert answers[0].reason >= 0x80, name
            elif kinds:
                assert answers[0].body[1] >= 1, name
        neighbours.check()


def test_half_packets_and_early_ends(start_holdfast: StartHoldfast) -> None:
    """Every prefix of a CONNECT and of a PUBLISH, and then the end of the stream."""
    broker = start_holdfast(SETTINGS)
    neighbours = Neighbours(broker)
    whole = wire.publish("half", b"x" * 30, 2, 1, props=[(wire.USER_PROPERTY, ("a", "b"))])
    for stream in (CONNECT, whole):
        for end in range(1, len(stream)):
            bad = wire.Wire(broker.port)
            if stream is whole:
                bad.connect("garbage")
            bad.send(stream[:end])
            if end % 2:
                bad.abort()
            else:
                bad.socket.close()
    neighbours.check()


def test_slow_connect(start_holdfast: StartHoldfast) -> None:
    """A CONNECT that drips in, or never comes, is cut after connect_timeout_s."""
    broker = start_holdfast(SETTINGS)
    neighbours = Neighbours(broker)
    silent = wire.Wire(broker.port)
    dripping = wire.Wire(broker.port)
    started = time.monotonic()

    def drip() -> None:
        for byte in wire.connect("c" * 200):
            dripping.send(bytes([byte]))
            neighbours.check()
            time.sleep(0.2)  # the dripping itself

    with pytest.raises(ConnectionError):
        drip()
    assert silent.wait_closed() == []
    assert time.monotonic() - started < 5
    neighbours.check()


def test_huge_lengths_take_no_memory(start_holdfast: StartHoldfast) -> None:
    """Many connections that announce 256 MB each and send little of it."""
    broker = start_holdfast({"limits": {"connect_timeout_s": 30.0}})
    neighbours = Neighbours(broker)
    neighbours.check()
    before = broker.rss_bytes()
    held = []
    for index in range(50):
        bad = wire.Wire(broker.port)
        if index % 2:
            bad.connect(f"huge-{index}")
            bad.send(b"\x30\xff\xff\xff\x7f\0\1t\0" + bytes(1000))
        else:
            bad.send(b"\x10\xff\xff\xff\x7f" + bytes(1000))
        held.append(bad)
    neighbours.check()
    assert broker.rss_bytes() - before < 10 << 20
    for bad in held:
        bad.socket.close()
    neighbours.check()


def test_random_bytes(start_holdfast: StartHoldfast) -> None:
    """Noise before and after CONNECT, from a fixed seed."""
    broker = start_holdfast(SETTINGS)
    neighbours = Neighbours(broker)
    rng = random.Random(20)
    streams = [CONNECT, *AFTER_CONNECT.values(), *BEFORE_CONNECT.values()]
    for index in range(300):
        data = bytearray(rng.choice(streams) + rng.choice(streams))
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with wire.Wire(broker.port) as bad:
            if index % 3:
                bad.connect(f"noise-{index}")
            bad.send(bytes(data))
    neighbours.check()
    assert broker.admin("/healthz")[0] == 200
