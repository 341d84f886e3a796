"""What brokers that count nothing themselves say to one another, as their subscribers see it."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

from bench.connection import Connection, Loop
from bench.federation_load import Load
from bench.federation_members import TOPIC, Members
from holdfast.protocol.mqtt.framing import PACKET_BYTES_MAX, FrameReader
from holdfast.protocol.mqtt.packets import PUBLISH

MESSAGES: Final = 50
SILENCE_S: Final = 8.0
"""In which nothing is published: some intervals of announcements."""
DATA: Final = "federator/routing/"
CONTROL: Final = ("federator/core_ann/", "federator/memb_ann/")


@dataclass(frozen=True)
class Observed:
    copies: float
    """Of each message."""
    control_per_s: float | None
    """Announcements; None: there are none."""


class Observer:
    """Counts the topics of what one broker is given; QoS 0, so it need not answer."""

    def __init__(self, port: int, name: str, topic_filter: str, loop: Loop) -> None:
        self._connection = Connection(port, name)
        self._connection.subscribe(topic_filter, 0)
        self._reader = FrameReader(PACKET_BYTES_MAX)
        self.topics: Counter[str] = Counter()
        loop.add(self._connection, self._handle)

    def _handle(self) -> None:
        reader = self._reader
        reader.feed(self._connection.receive())
        while reader.next():
            if reader.first >> 4 != PUBLISH:
                raise ValueError(f"not a PUBLISH: 0x{reader.first:02x}")
            start = reader.start + 2
            length = int.from_bytes(reader.buffer[reader.start : start])
            self.topics[reader.buffer[start : start + length].decode()] += 1


def copies_in(topics: Counter[str]) -> int:
    """Of published messages, as brokers got them from one another."""
    return sum(count for topic, count in topics.items() if topic.startswith(DATA) or topic == TOPIC)


def control_in(topics: Counter[str]) -> int:
    return sum(count for topic, count in topics.items() if topic.startswith(CONTROL))


def observe(members: Members, messages: int = MESSAGES, silence_s: float = SILENCE_S) -> Observed:
    """Of `members.observed`. What the publisher's own client gives its broker does not count."""
    layout = members.layout
    loop = Loop()
    observers = [
        Observer(members.port(member), f"bench-observer-{member}", members.observed, loop)
        for member in range(layout.members)
        if members.beacons or member != layout.publisher
    ]

    def seen() -> Counter[str]:
        return sum((each.topics for each in observers), Counter[str]())

    try:
        with Load(members, 1) as load:
            load.await_flow()
            loop.run_for(0.5)
            before = seen()
            load.closed_loop(messages)
            load.drain(messages)
            loop.run_for(0.5)
            copies = (copies_in(seen()) - copies_in(before)) / messages
            if not members.beacons:
                return Observed(copies, None)
            before, start_s = seen(), time.monotonic()
            load.serve_for(silence_s)
            loop.run_for(0.5)
            passed_s = time.monotonic() - start_s
            return Observed(copies, (control_in(seen()) - control_in(before)) / passed_s)
    finally:
        loop.close()
