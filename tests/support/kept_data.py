"""The content of the data directories that are kept of each version: what clients do before, and
what they find afterwards."""

from tests.e2e import wire

FOR_EVER = 0xFFFF_FFFF
MESSAGES = 40
SHARED = "$share/team/jobs/#"


def begin(port: int) -> None:
    """Sessions, subscriptions, a shared group, retained messages, and the first half of the
    messages, of which the subscriber acknowledges none."""
    with wire.Wire(port) as subscriber, wire.Wire(port) as publisher:
        subscriber.connect("sub", expiry_s=FOR_EVER)
        subscriber.subscribe(("a/#", 2), (SHARED, 1))
        publisher.connect("pub", expiry_s=FOR_EVER)
        publisher.publish("a/0", b"unacknowledged", 1)
        subscriber.expect(wire.PUBLISH)
        subscriber.abort()
        publish_numbers(publisher, range(MESSAGES // 2))
        for topic, payload in (("kept/1", b"x"), ("kept/2", b"y"), ("kept/2", b"")):
            publisher.publish(topic, payload, 1, retain=True)
        publisher.disconnect()


def finish(port: int) -> None:
    """The rest of the messages, and a QoS 2 publish without its release."""
    with wire.Wire(port) as publisher:
        publisher.connect("pub", clean=False, expiry_s=FOR_EVER)
        publish_numbers(publisher, range(MESSAGES // 2, MESSAGES))
        for number in range(5):
            publisher.publish(f"jobs/{number}", b"%d" % number, 1)
        publisher.send(wire.publish("a/half", b"half", 2, 999))
        assert publisher.expect(wire.PUBREC).packet_id == 999
        publisher.abort()


def publish_numbers(publisher: wire.Wire, numbers: range) -> None:
    for number in numbers:
        props = [(wire.USER_PROPERTY, ("number", str(number)))]
        publisher.publish(f"a/{number % 4}", b"%d" % number, 1 + number % 2, props=props)


def check(port: int) -> None:
    """Everything is there, once and in order."""
    with wire.Wire(port) as publisher:
        assert publisher.connect("pub", clean=False, expiry_s=FOR_EVER).session_present
        publisher.send(wire.publish("a/half", b"half", 2, 999, dup=True))
        assert publisher.expect(wire.PUBREC).reason == 0
        publisher.send(wire.ack(wire.PUBREL, 999))
        assert publisher.expect(wire.PUBCOMP).reason == 0
    with wire.Wire(port) as subscriber:
        assert subscriber.connect("sub", clean=False, expiry_s=FOR_EVER).session_present
        found: dict[str, list[bytes]] = {}
        for _ in range(MESSAGES + 1 + 5 + 1):
            message = subscriber.message()
            found.setdefault(message.topic, []).append(message.payload)
            if message.topic.startswith("a/") and message.payload.isdigit():
                assert message.values(wire.USER_PROPERTY) == [("number", message.payload.decode())]
        expected = {f"a/{k}": [b"%d" % n for n in range(k, MESSAGES, 4)] for k in range(4)}
        expected["a/0"].insert(0, b"unacknowledged")
        expected |= {f"jobs/{n}": [b"%d" % n] for n in range(5)} | {"a/half": [b"half"]}
        assert found == expected
        subscriber.subscribe(("kept/#", 1))
        message = subscriber.message()
        assert (message.topic, message.payload) == ("kept/1", b"x")
        subscriber.ping()
        assert not [frame for frame in subscriber.inbox if frame.kind == wire.PUBLISH]
