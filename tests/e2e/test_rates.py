"""A client above its rate beside one that keeps to it, against a real broker."""

import re
import time

from tests.e2e import wire
from tests.e2e.conftest import StartHoldfast

FLOOD = 3000
RATE = 100


def test_a_flood_costs_another_client_nothing(start_holdfast: StartHoldfast) -> None:
    broker = start_holdfast({"rates.client": {"messages_per_s": RATE}})
    with (
        wire.Wire(broker.port) as receiver,
        wire.Wire(broker.port, 4) as loud,
        wire.Wire(broker.port) as quiet,
    ):
        receiver.connect("receiver")
        receiver.subscribe(("t/#", 0))
        loud.connect("loud")
        quiet.connect("quiet")
        began = time.monotonic()
        message = wire.publish("t/loud", b"x" * 100, 0, 0, 4, False, False, ())
        loud.send(message * FLOOD)
        waits = []
        for number in range(40):
            sent = time.monotonic()
            assert quiet.publish("t/quiet", b"%d" % number, qos=1) == 0
            waits.append(time.monotonic() - sent)
        seen = {"t/loud": 0, "t/quiet": 0}
        while seen["t/loud"] < 2 * RATE or seen["t/quiet"] < 40:
            seen[receiver.message().topic] += 1
        passed_s = time.monotonic() - began
        # The burst of a second came at once, and one message may be in debt.
        assert seen["t/loud"] <= RATE * (passed_s + 1) + 2
        assert passed_s >= 0.9
        assert sorted(waits)[20] < 0.2
        status, text = broker.admin("/metrics")
        assert status == 200
        throttled = re.search(r"holdfast_inputs_throttled_total\{[^}]*\} (\S+)", text)
        assert throttled is not None
        assert float(throttled[1]) > 0
