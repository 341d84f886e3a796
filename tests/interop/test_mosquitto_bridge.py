"""A Debian Mosquitto with a bridge to Holdfast: in and out, every QoS, across restarts."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import wire
from tests.e2e.brokers import MOSQUITTO, Broker, Holdfast, Mosquitto

pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")
BRIDGED_S = 40.0
"""A bridge that was refused tries again after 5 s or more, whatever restart_timeout says."""
QOS = pytest.mark.parametrize("qos", [0, 1, 2])


def bridge_lines(remote: Broker, version: str, extra: str = "") -> str:
    """`out/<qos>/...` goes from Mosquitto to the remote, `in/<qos>/...` comes from there."""
    topics = "\n".join(
        f"topic out/{qos}/# out {qos}\ntopic in/{qos}/# in {qos}" for qos in range(3)
    )
    return (
        f"connection uplink\naddress 127.0.0.1:{remote.port}\nbridge_protocol_version {version}\n"
        f"remote_clientid bridge\ncleansession false\nrestart_timeout 1\n{topics}\n{extra}\n"
    )


@pytest.fixture(params=["mqttv311", "mqttv50"])
def bridge(
    request: pytest.FixtureRequest, holdfast_broker: Holdfast, tmp_path: Path
) -> Iterator[Mosquitto]:
    """A Mosquitto that bridges to `holdfast_broker`."""
    directory = tmp_path / "bridge"
    directory.mkdir()
    started = Mosquitto(directory, bridge_lines(holdfast_broker, request.param), 100)
    started.start()
    yield started
    started.kill()


def wait_bridged(local: Broker, remote: Broker) -> None:
    """Until a message on every bridged topic has passed: the bridge's subscriptions stand."""
    with wire.Wire(local.port) as near, wire.Wire(remote.port) as far:
        near.connect()
        far.connect()
        near.subscribe(("in/+/probe", 1))
        far.subscribe(("out/+/probe", 1))
        missing = {f"{way}/{qos}/probe" for way in ("in", "out") for qos in range(3)}
        deadline = time.monotonic() + BRIDGED_S
        while missing:
            assert time.monotonic() < deadline, f"the bridge does not carry {sorted(missing)}"
            for topic in missing:
                (far if topic.startswith("in") else near).publish(topic, b"", 1)
            for reader in (near, far):
                try:
                    while True:
                        missing.discard(reader.message(0.1).topic)
                except TimeoutError:
                    pass


@QOS
@pytest.mark.parametrize("way", ["in", "out"])
def test_both_ways(bridge: Mosquitto, holdfast_broker: Holdfast, way: str, qos: int) -> None:
    wait_bridged(bridge, holdfast_broker)
    source, target = (holdfast_broker, bridge) if way == "in" else (bridge, holdfast_broker)
    with wire.Wire(target.port) as reader, wire.Wire(source.port) as writer:
        reader.connect()
        writer.connect()
        reader.subscribe((f"{way}/{qos}/t/+", 2))
        for number in range(300):
            writer.publish(f"{way}/{qos}/t/x", b"%d" % number, qos)
        found = [reader.message() for _ in range(300)]
    assert [int(message.payload) for message in found] == list(range(300))
    assert {message.qos for message in found} == {qos}


@pytest.mark.parametrize("qos", [1, 2])
def test_queued_while_holdfast_is_down(
    bridge: Mosquitto, holdfast_broker: Holdfast, qos: int
) -> None:
    """kill -9 of Holdfast: the bridge keeps its messages and sends them again; QoS 2 arrives once
    where the bridge has a session here (over MQTT 5 it asks for none)."""
    wait_bridged(bridge, holdfast_broker)
    with wire.Wire(holdfast_broker.port) as reader:
        reader.connect("reader", expiry_s=600)
        reader.subscribe((f"out/{qos}/t", 2))
    with wire.Wire(bridge.port) as writer:
        writer.connect()
        for number in range(100):
            writer.publish(f"out/{qos}/t", b"%d" % number, qos)
            if number == 30:
                holdfast_broker.kill()
        holdfast_broker.start()
    with wire.Wire(holdfast_broker.port) as reader:
        assert reader.connect("reader", clean=False, expiry_s=600).session_present
        found: list[int] = []
        while 99 not in found:
            found.append(int(reader.message(BRIDGED_S).payload))
    if qos == 2 and "mqttv311" in bridge.extra:
        assert found == list(range(100))
    assert list(dict.fromkeys(found)) == list(range(100))


@pytest.mark.parametrize("qos", [1, 2])
def test_kept_while_the_bridge_is_down(
    bridge: Mosquitto, holdfast_broker: Holdfast, qos: int
) -> None:
    """The bridge's session at Holdfast collects what is for it, restarts of Holdfast included."""
    if "mqttv50" in bridge.extra:
        pytest.skip("Mosquitto 2.0.11 bridges over MQTT 5 without a session expiry interval")
    wait_bridged(bridge, holdfast_broker)
    bridge.kill()
    with wire.Wire(holdfast_broker.port) as writer:
        writer.connect()
        for number in range(100):
            writer.publish(f"in/{qos}/t", b"%d" % number, qos)
    holdfast_broker.kill()
    # The new Mosquitto reads its bridge's session as soon as it reaches Holdfast: its own
    # subscriber must be there before.
    bridge.start()
    with wire.Wire(bridge.port) as reader:
        reader.connect()
        reader.subscribe((f"in/{qos}/t", 2))
        holdfast_broker.start()
        found = [int(reader.message(BRIDGED_S).payload) for _ in range(100)]
    assert list(dict.fromkeys(found)) == list(range(100))


def test_a_burst_of_qos_2(bridge: Mosquitto, holdfast_broker: Holdfast) -> None:
    """Mosquitto stores 20 unfinished QoS 2 messages, and drops what it is sent beyond them."""
    wait_bridged(bridge, holdfast_broker)
    with wire.Wire(bridge.port) as reader, wire.Wire(holdfast_broker.port) as writer:
        reader.connect()
        reader.subscribe(("in/2/burst", 2))
        writer.connect()
        writer.send(b"".join(wire.publish("in/2/burst", b"%d" % n, 2, n + 500) for n in range(100)))
        found = [int(reader.message(BRIDGED_S).payload) for _ in range(100)]
    assert found == list(range(100))


@pytest.mark.parametrize("version", ["mqttv311", "mqttv50"])
def test_one_topic_in_both_directions(
    holdfast_broker: Holdfast, tmp_path: Path, version: str
) -> None:
    """No echo: a bridge's own messages do not come back. Over MQTT 5 it subscribes with no local,
    over 3.1.1 it says what it is with the highest bit of the protocol level. [MQTT-3.8.3-3]"""
    directory = tmp_path / "both"
    directory.mkdir()
    lines = bridge_lines(holdfast_broker, version, "topic both/# both 1")
    local = Mosquitto(directory, lines, 100)
    local.start()
    try:
        wait_bridged(local, holdfast_broker)
        with wire.Wire(local.port) as near, wire.Wire(holdfast_broker.port) as far:
            for client in (near, far):
                client.connect()
                client.subscribe(("both/#", 1))
            near.publish("both/t", b"from near", 1)
            far.publish("both/t", b"from far", 1)
            for client in (near, far):
                found = {client.message().payload, client.message().payload}
                assert found == {b"from near", b"from far"}
                with pytest.raises(TimeoutError):
                    client.message(0.5)
    finally:
        local.kill()
