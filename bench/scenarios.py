"""What is measured: one row of the table for each entry, with its target."""

from dataclasses import dataclass
from enum import StrEnum

PAYLOAD_BYTES = 64


class Figure(StrEnum):
    """What a scenario compares."""

    CPU = "cpu"
    """Broker CPU a delivered message, Holdfast over Mosquitto; the target is a maximum."""
    RATE = "rate"
    """Delivered messages a second, Holdfast over Mosquitto; the target is a minimum."""
    LATENCY = "latency"
    """99th percentile from publish to delivery in ms, Holdfast's; the target is a maximum."""
    MEMORY = "memory"
    """Resident bytes a connection, Holdfast's; the target is a maximum."""


@dataclass(frozen=True)
class Scenario:
    name: str
    what: str
    figure: Figure
    target: float
    qos: int = 0
    topics: int = 1
    """Each with one publisher and `subscribers` subscribers, all on connections of their own."""
    subscribers: int = 1
    lag_max: int = 900
    """Messages under way on a topic; below the 1,000 at which an outbox may overflow."""
    batch: int = 0
    """Messages in one socket write; 0: all that the bounds allow at the moment."""
    window: int = 100
    rate: float = 0.0
    """Messages a second in all, each in its own socket write; 0: as fast as the bounds allow."""
    connections: int = 0
    transport: str = "tcp"
    """The transport of the clients below MQTT: tcp, tls or websocket."""
    feature: str = ""
    """Not empty: Holdfast with this feature (`bench.features`) is compared with Holdfast without,
    in place of Mosquitto."""
    durability: str = "memory"
    """Holdfast's setting. Mosquitto always runs without persistence."""


SCENARIOS = (
    Scenario("qos0-1to1", "QoS 0, 1 to 1, 20 messages a write", Figure.CPU, 0.6, batch=20),
    Scenario(
        "qos0-100to100",
        "QoS 0, 100 to 100 on 100 topics, one message a write",
        Figure.CPU,
        0.6,
        topics=100,
        lag_max=50,
        batch=1,
    ),
    Scenario(
        "qos0-100to100-batched",
        "QoS 0, 100 to 100 on 100 topics, 10 messages a write",
        Figure.CPU,
        0.6,
        topics=100,
        lag_max=40,
        batch=10,
    ),
    Scenario(
        "qos0-fanout",
        "QoS 0, 1 to 100 fan-out, 10 messages a write",
        Figure.CPU,
        0.1,
        subscribers=100,
        lag_max=100,
        batch=10,
    ),
    Scenario(
        "qos0-fanout-single",
        "QoS 0, 1 to 100 fan-out, one message a write",
        Figure.CPU,
        0.1,
        subscribers=100,
        lag_max=100,
        batch=1,
    ),
    Scenario("qos1-1to1", "QoS 1, 1 to 1, window 100", Figure.CPU, 0.6, qos=1, lag_max=200),
    Scenario(
        "qos1-50to50", "QoS 1, 50 to 50 on 50 topics", Figure.CPU, 0.6, 1, topics=50, lag_max=200
    ),
    Scenario(
        "qos1-50to50-single",
        "QoS 1, 50 to 50 on 50 topics, one message a write",
        Figure.CPU,
        0.6,
        qos=1,
        topics=50,
        lag_max=200,
        batch=1,
    ),
    Scenario(
        "tls-qos0-100to100",
        "QoS 0 over TLS, 100 to 100 on 100 topics, one message a write",
        Figure.CPU,
        0.8,
        topics=100,
        lag_max=50,
        batch=1,
        transport="tls",
    ),
    Scenario(
        "tls-qos1-50to50",
        "QoS 1 over TLS, 50 to 50 on 50 topics",
        Figure.CPU,
        0.8,
        qos=1,
        topics=50,
        lag_max=200,
        transport="tls",
    ),
    Scenario(
        "websocket-qos0-100to100",
        "QoS 0 over WebSocket, 100 to 100 on 100 topics, one message a write",
        Figure.CPU,
        0.8,
        topics=100,
        lag_max=50,
        batch=1,
        transport="websocket",
    ),
    Scenario(
        "websocket-qos1-50to50",
        "QoS 1 over WebSocket, 50 to 50 on 50 topics",
        Figure.CPU,
        0.8,
        qos=1,
        topics=50,
        lag_max=200,
        transport="websocket",
    ),
    Scenario("qos2-1to1", "QoS 2, 1 to 1, window 100", Figure.CPU, 0.6, qos=2, lag_max=200),
    Scenario(
        "idle-1000",
        "QoS 0, 1,000 subscribers on 1,000 topics, a message a second each, one every ms",
        Figure.CPU,
        0.6,
        topics=1000,
        rate=1000.0,
    ),
    Scenario(
        "idle-1000-broadcast",
        "QoS 0, 1,000 subscribers of one topic, one message a second",
        Figure.CPU,
        0.6,
        subscribers=1000,
        rate=1.0,
    ),
    Scenario(
        "acl-10000",
        "QoS 0, 1 to 1, 10,000 lines of ACL over none",
        Figure.CPU,
        1.1,
        batch=20,
        feature="acl",
    ),
    Scenario(
        "hooks-idle",
        "QoS 0, 1 to 1, hooks that do nothing over none",
        Figure.CPU,
        1.02,
        batch=20,
        feature="hooks",
    ),
    Scenario(
        "fsync-qos1-1to1",
        "QoS 1, 1 to 1, fdatasync before PUBACK",
        Figure.RATE,
        1.0,
        qos=1,
        lag_max=200,
        durability="fsync",
    ),
    Scenario(
        "fsync-qos1-50to50",
        "QoS 1, 50 to 50 on 50 topics, fdatasync before PUBACK",
        Figure.RATE,
        1.0,
        qos=1,
        topics=50,
        lag_max=200,
        durability="fsync",
    ),
    Scenario(
        "fsync-qos1-paced",
        "QoS 1, 50 to 50 at 2,000 messages/s, one a write, fdatasync before PUBACK",
        Figure.CPU,
        2.25,
        qos=1,
        topics=50,
        lag_max=200,
        batch=1,
        rate=2000.0,
        durability="fsync",
    ),
    Scenario(
        "fsync-latency",
        "QoS 1, 1 to 1 at 2,000 messages/s, fdatasync before PUBACK",
        Figure.LATENCY,
        5.0,
        qos=1,
        rate=2000.0,
        durability="fsync",
    ),
    Scenario(
        "connects",
        "10,000 clients connect, 64 at a time; CPU of each",
        Figure.CPU,
        1.0,
        connections=10_000,
    ),
    Scenario(
        "connections",
        "8,000 idle connections, memory of each beyond the first 1,000",
        Figure.MEMORY,
        2000.0,
        connections=8000,
    ),
)


def by_name(name: str) -> Scenario:
    for scenario in SCENARIOS:
        if scenario.name == name:
            return scenario
    raise KeyError(name)
