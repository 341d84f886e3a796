"""The cost of a QoS 1 message in the core alone: no socket, no file, one thread.

    python -m bench.core [--rounds 600] [--publishers 50]

As many publishers as subscribers, each with a topic of its own; 20 messages of 64 bytes from each
publisher in a round. The processor's time of this thread counts, and of all rounds the shortest:
other work on the machine makes a round longer and never shorter, so two versions can be compared at
any load. Printed in microseconds a message, from its PUBLISH to the PUBACK of its subscriber.
"""

import argparse
import time
from typing import Final

from holdfast.broker.config import NodeConfig
from holdfast.broker.effects import Effect
from holdfast.broker.node import Node
from holdfast.broker.runtime import Runtime
from holdfast.broker.session.connection import Connection
from holdfast.broker.session.listener_rules import ListenerRules
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.publish import Publish
from holdfast.storage.journal.journal import Journal
from holdfast.storage.journal.segment import WriteGroup

PARTITIONS: Final = 16
MESSAGES: Final = 20
PAYLOAD: Final = b"x" * 64
WARM_ROUNDS: Final = 50
LEVEL: Final = 4
NOW_S: Final = 1000.0
WALL_US: Final = 1_700_000_000_000_000


class Disk:
    """Takes each group and keeps none."""

    is_full = False
    free_bytes = 1 << 40

    def __init__(self) -> None:
        self.group: WriteGroup | None = None

    def submit(self, group: WriteGroup) -> None:
        self.group = group

    def space(self) -> int:
        return self.free_bytes


class Sockets:
    """Collects what each client is sent."""

    def __init__(self) -> None:
        self.sent: dict[Connection, bytes] = {}

    def touch(self) -> None:
        """The rounds take their turns themselves."""

    def flush(self, dirty: list[Connection]) -> None:
        for connection in dirty:
            connection.dirty = False
            data = b"".join(connection.out)
            connection.out.clear()
            connection.out_bytes = 0
            self.sent[connection] = self.sent.get(connection, b"") + data

    def carry_out(self, effect: Effect) -> None:
        """A round has no other effects."""


class NoReads:
    """Nobody is behind, so nothing is read."""

    def read_log(self, effect: object, done: object) -> None:
        raise AssertionError("a subscriber is behind")

    def fetch(self, effect: object, done: object) -> None:
        raise AssertionError("a delivery is sent again")

    def find_starts(self, effect: object, done: object) -> None:
        raise AssertionError("a subscription begins in the past")


class Core:
    """A node with publishers and subscribers."""

    def __init__(self, publishers: int) -> None:
        journal = Journal(PARTITIONS)
        journal.continue_at([0] * PARTITIONS, 0)
        config = NodeConfig(partitions=PARTITIONS, memory_durability=True, sys_interval_s=0)
        self.node = Node(config, journal)
        self.disk = Disk()
        self.sockets = Sockets()
        self.runtime = Runtime(self.node, self.disk, NoReads(), self.sockets)
        self.runtime.begin(NOW_S, WALL_US)
        self.node.start()
        numbers = range(publishers)
        self.publishers = [self._connect(f"p{number}") for number in numbers]
        self.subscribers = [self._connect(f"s{number}") for number in numbers]
        for number, subscriber in enumerate(self.subscribers):
            request = m.SubscriptionRequest(f"bench/{number}", 1)
            self._send(subscriber, m.Subscribe(1, [request]))
        self.sockets.sent.clear()
        self.blocks = [
            b"".join(map(_packet, [number] * MESSAGES, range(MESSAGES))) for number in numbers
        ]

    def _connect(self, client_id: str) -> Connection:
        connection = self.node.handle_connected("127.0.0.1:1", ListenerRules("bench"))
        connection.transport = self
        self._send(connection, m.Connect(LEVEL, True, 0, client_id, None, None, None, {}))
        return connection

    def _send(self, connection: Connection, packet: m.Packet) -> None:
        self.node.handle_data(connection, encode(packet, LEVEL))
        self.runtime.turn()

    def round(self) -> None:
        """Publish, deliver and acknowledge all messages."""
        self.runtime.begin(NOW_S, WALL_US)
        for publisher, block in zip(self.publishers, self.blocks, strict=True):
            self.node.handle_data(publisher, block)
        self.runtime.turn()
        group = self.disk.group
        if group is not None:
            self.disk.group = None
            self.runtime.group_written(group)
        sent, self.sockets.sent = self.sockets.sent, {}
        for subscriber in self.subscribers:
            self.node.handle_data(subscriber, _acknowledge(sent[subscriber]))
        self.runtime.turn()


def _packet(number: int, packet_id: int) -> bytes:
    topic = f"bench/{number}".encode()
    return encode(Publish(topic, PAYLOAD, 1, False, False, packet_id + 1, b"", 0, -1), LEVEL)


def _acknowledge(data: bytes) -> bytes:
    """The PUBACKs for these PUBLISH packets, each of less than 128 bytes."""
    at = 0
    acks = []
    while at < len(data):
        topic_bytes = data[at + 2] << 8 | data[at + 3]
        acks.append(b"\x40\x02" + data[at + 4 + topic_bytes : at + 6 + topic_bytes])
        at += 2 + data[at + 1]
    return b"".join(acks)


def measure(rounds: int, publishers: int) -> float:
    """Return the microseconds a message of the shortest round."""
    core = Core(publishers)
    for _ in range(WARM_ROUNDS):
        core.round()
    shortest_ns = 1 << 62
    for _ in range(rounds):
        began_ns = time.thread_time_ns()
        core.round()
        shortest_ns = min(shortest_ns, time.thread_time_ns() - began_ns)
    return shortest_ns / 1000 / (publishers * MESSAGES)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.core")
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--publishers", type=int, default=50)
    options = parser.parse_args()
    print(
        f"core, QoS 1, one to one: {measure(options.rounds, options.publishers):.3f} µs a message"
    )


if __name__ == "__main__":
    main()
