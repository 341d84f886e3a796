"""A QoS 0 message with RETAIN becomes the retained one in the same step as it is delivered: for the
same subscriber anew, and for a newcomer. Mosquitto's own tests (03-pattern-matching) rely on it."""

import pytest

from tests.e2e import wire
from tests.e2e.brokers import Broker

ROUNDS = 20


@pytest.mark.parametrize("version", [4, 5])
def test_retained_right_after_the_live_copy(broker: Broker, unique: str, version: int) -> None:
    topic = f"{unique}/a"
    with (
        wire.Wire(broker.port, version) as subscriber,
        wire.Wire(broker.port, version) as newcomer,
        wire.Wire(broker.port, version) as publisher,
    ):
        subscriber.connect(f"{unique}-s")
        newcomer.connect(f"{unique}-n")
        publisher.connect(f"{unique}-p")
        for number in range(ROUNDS):
            subscriber.subscribe((f"{unique}/#", 0))
            if number:
                assert subscriber.message().payload == b"%d" % (number - 1)
            publisher.publish(topic, b"%d" % number, retain=True)
            live = subscriber.message()
            assert (live.payload, live.retain) == (b"%d" % number, False)
            subscriber.send(wire.unsubscribe(1000, [f"{unique}/#"], version))
            for client in (subscriber, newcomer):
                client.subscribe((f"{unique}/+", 0))
                again = client.message()
                assert (again.payload, again.retain) == (b"%d" % number, True)
                client.send(wire.unsubscribe(1001, [f"{unique}/+"], version))
            # Else the next live copy might come here, too.
            newcomer.expect(wire.UNSUBACK)
