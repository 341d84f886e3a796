"""A QoS 1 load that follows the clock: a publisher at every node, its subscriber at the next one.

Every message carries the moment it was handed to the socket, and its number within its topic: so
the subscribers see what is missing, repeated or out of order. A cluster that stalls is shown every
message that became due meanwhile.
"""

import select
import struct
import time
from dataclasses import dataclass, field
from typing import Final

from bench import wire
from bench.connection import Connection
from bench.scenarios import PAYLOAD_BYTES
from bench.wire import Frame

TOPICS: Final = 24
"""Of each publisher; in as many partitions, nearly: so that every node leads some."""
DRAIN_TIMEOUT_S: Final = 20.0
WINDOW: Final = 0xFFFF
_STAMP: Final = struct.Struct("!qQ")


class Overloaded(RuntimeError):
    """All packet ids of a publisher wait for their acknowledgement."""


@dataclass
class Timings:
    """Of one stretch of time, in ms and as they came."""

    puback_ms: list[float] = field(default_factory=list)
    delivery_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    """By how much the generator itself missed the moment a message was due."""

    def add(self, other: "Timings") -> None:
        self.puback_ms += other.puback_ms
        self.delivery_ms += other.delivery_ms
        self.late_ms += other.late_ms


class Lane:
    """One publisher, its topics, and the subscriber of these."""

    def __init__(self, name: int, port: int, sink_port: int) -> None:
        self.frames = [
            Frame(f"steady/{name}/{topic:04}", 1, PAYLOAD_BYTES) for topic in range(TOPICS)
        ]
        self.frame = self.frames[0]
        """All are of one size."""
        self.sink = Connection(sink_port, f"sink-{name}")
        self.sink.subscribe(f"steady/{name}/+", 1)
        self.source = Connection(port, f"source-{name}")
        for connection in (self.sink, self.source):
            connection.socket.setblocking(False)
        self.sent = 0
        self.sent_ns: dict[bytes, int] = {}
        self.delivered = 0
        self.strayed = 0
        """Deliveries that did not carry the number after the one before."""
        self._expected: dict[bytes, int] = {}

    def publish(self) -> int:
        """Returns the time. Raises Overloaded."""
        packet_id = struct.pack("!H", self.sent % WINDOW + 1)
        if packet_id in self.sent_ns:
            raise Overloaded(f"{WINDOW:,} messages are unacknowledged")
        number, topic = divmod(self.sent, TOPICS)
        packet = self.frames[topic].batch(wire.Ids(packet_id[:1], packet_id[1:]))
        now_ns = time.monotonic_ns()
        _STAMP.pack_into(packet, self.frame.payload_at, now_ns, number)
        self.source.send(packet)
        self.sent_ns[packet_id] = now_ns
        self.sent += 1
        return now_ns

    def handle_puback(self, timings: Timings) -> None:
        data = self.source.receive()
        now_ns = time.monotonic_ns()
        end = len(data) // wire.ACK_BYTES * wire.ACK_BYTES
        self.source.rest = data[end:]
        for at in range(0, end, wire.ACK_BYTES):
            timings.puback_ms.append((now_ns - self.sent_ns.pop(data[at + 2 : at + 4])) / 1e6)

    def handle_delivery(self, timings: Timings) -> None:
        frame = self.frame
        data = self.sink.receive()
        now_ns = time.monotonic_ns()
        end = len(data) // frame.bytes * frame.bytes
        self.sink.rest = data[end:]
        for at in range(0, end, frame.bytes):
            sent_ns, number = _STAMP.unpack_from(data, at + frame.payload_at)
            topic = data[at : at + frame.id_at]
            if number != self._expected.get(topic, 0):
                self.strayed += 1
            self._expected[topic] = number + 1
            timings.delivery_ms.append((now_ns - sent_ns) / 1e6)
        if end:
            self.delivered += end // frame.bytes
            high, low = (
                data[frame.id_at : end : frame.bytes],
                data[frame.id_at + 1 : end : frame.bytes],
            )
            self.sink.send(wire.acks(wire.PUBACK, wire.Ids(high, low)))

    def is_settled(self) -> bool:
        return not self.sent_ns and self.delivered >= self.sent

    def close(self) -> None:
        self.sink.close()
        self.source.close()


class PacedLoad:
    """`ports`: of the nodes. Raises ConnectionLost when one of them closes a connection."""

    def __init__(self, ports: list[int]) -> None:
        self.lanes = [
            Lane(number, port, ports[(number + 1) % len(ports)])
            for number, port in enumerate(ports)
        ]
        self.timings = Timings()
        self._sources = {lane.source.socket: lane for lane in self.lanes}
        self._sinks = {lane.sink.socket: lane for lane in self.lanes}
        self._sockets = [*self._sources, *self._sinks]

    def run_for(self, duration_s: float, rate: float) -> Timings:
        """What was seen of it; what is still under way comes with the next. Raises Overloaded."""
        start_ns = time.monotonic_ns()
        interval_ns = 1e9 / rate
        late_ms = self.timings.late_ms
        for number in range(int(duration_s * rate)):
            due_ns = start_ns + int(number * interval_ns)
            while (left_ns := due_ns - time.monotonic_ns()) > 0:
                self._serve(left_ns / 1e9)
            sent_ns = self.lanes[number % len(self.lanes)].publish()
            late_ms.append((sent_ns - due_ns) / 1e6)
            if sent_ns - due_ns > interval_ns:
                # Behind the clock: nothing would be read before it has caught up.
                self._serve(0.0)
        return self.take()

    def take(self) -> Timings:
        taken, self.timings = self.timings, Timings()
        return taken

    def drain(self) -> None:
        """Return when everything was acknowledged and has arrived, or time is over."""
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while time.monotonic() < deadline and not all(lane.is_settled() for lane in self.lanes):
            self._serve(0.1)

    def missing(self) -> int:
        """Not acknowledged, or not delivered."""
        return sum(max(len(lane.sent_ns), lane.sent - lane.delivered, 0) for lane in self.lanes)

    def strayed(self) -> int:
        return sum(lane.strayed for lane in self.lanes)

    def sent(self) -> int:
        return sum(lane.sent for lane in self.lanes)

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()

    def _serve(self, timeout_s: float) -> None:
        """What arrives within the time. select(2) waits in microseconds, epoll in ms."""
        blocked = [each for lane in self.lanes for each in (lane.source, lane.sink) if each.unsent]
        writable = [each.socket for each in blocked]
        readable, writable, _ = select.select(self._sockets, writable, [], max(0.0, timeout_s))
        for each in readable:
            lane = self._sinks.get(each)
            if lane is not None:
                lane.handle_delivery(self.timings)
            else:
                self._sources[each].handle_puback(self.timings)
        for connection in blocked:
            if connection.socket in writable:
                connection.flush()
