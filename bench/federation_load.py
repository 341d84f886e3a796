"""One publisher at a member and subscribers at others: how long messages take between them.

Every message carries its number and the moment it was handed to the socket. Publisher and
subscribers are in this process, so both times are of one clock. Numbers from PROBES on are messages
that look whether there is a way yet.
"""

import select
import statistics
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bench import wire
from bench.connection import Connection
from bench.federation_members import (
    BEACON_INTERVAL_S,
    BEACON_TOPIC,
    TOPIC,
    Members,
    MembersFailed,
)
from bench.measurement import percentile
from bench.scenarios import PAYLOAD_BYTES
from bench.wire import Frame, Ids

FLOW_TIMEOUT_S: Final = 60.0
"""Until a message gets through to all subscribers."""
ACKNOWLEDGE_TIMEOUT_S: Final = 20.0
DRAIN_TIMEOUT_S: Final = 20.0
"""For what is under way at the end; what comes later counts as lost."""
PROBE_INTERVAL_S: Final = 0.1
SETTLE_S: Final = 1.0
"""Without an arrival, until nothing is under way any more."""
PROBES: Final = 1 << 62
PACKET_IDS: Final = 65_535
_STAMP: Final = struct.Struct("!qQ")


@dataclass(frozen=True)
class Latency:
    """At one subscriber, in ms."""

    mean_ms: float
    p50_ms: float
    p99_ms: float
    max_ms: float


def latency_of(times_ms: Sequence[float]) -> Latency | None:
    """None of none."""
    if not times_ms:
        return None
    ordered = sorted(times_ms)
    return Latency(
        statistics.fmean(ordered),
        percentile(ordered, 0.50),
        percentile(ordered, 0.99),
        ordered[-1],
    )


class Sink:
    """A subscriber; it answers what its QoS wants."""

    def __init__(self, port: int, name: str, frame: Frame) -> None:
        self.connection = Connection(port, name)
        self.connection.subscribe(TOPIC, frame.qos)
        self.connection.socket.setblocking(False)
        self.times_ms: dict[int, float] = {}
        """Of first arrivals, by number."""
        self.duplicates = 0
        self.reordered = 0
        """First arrivals behind that of a higher number."""
        self.probe = 0
        """The newest one that came; 0: none."""
        self.arrived_s = time.monotonic()
        self._frame = frame
        self._newest = -1

    def handle(self) -> None:
        """Raises ValueError for what is none of our messages."""
        data = self.connection.receive()
        now_ns = time.monotonic_ns()
        frame = self._frame
        stored, released = bytearray(), bytearray()
        at = 0
        while at < len(data):
            if data[at] == wire.PUBREL:
                end = at + wire.ACK_BYTES
                if end > len(data):
                    break
                released += data[at + 2 : end]
            else:
                end = at + frame.bytes
                if end > len(data):
                    break
                self._take(data[at:end], now_ns)
                stored += data[at + frame.id_at : at + frame.payload_at]
            at = end
        self.connection.rest = data[at:]
        answer = b""
        if frame.qos and stored:
            kind = wire.PUBACK if frame.qos == 1 else wire.PUBREC
            answer += wire.acks(kind, _ids(stored))
        if released:
            answer += wire.acks(wire.PUBCOMP, _ids(released))
        if answer:
            self.connection.send(answer)

    def _take(self, packet: bytes, now_ns: int) -> None:
        frame = self._frame
        # The DUP flag may differ.
        if (
            packet[0] & ~8 != frame.first_byte
            or packet[1 : frame.id_at] != frame.blank[1 : frame.id_at]
        ):
            raise ValueError(f"not a message of this benchmark: {packet[:80]!r}")
        sent_ns, number = _STAMP.unpack_from(packet, frame.payload_at)
        self.arrived_s = now_ns / 1e9
        if number >= PROBES:
            self.probe = max(self.probe, number)
        elif number in self.times_ms:
            self.duplicates += 1
        else:
            self.times_ms[number] = (now_ns - sent_ns) / 1e6
            self.reordered += number < self._newest
            self._newest = max(self._newest, number)


class Source:
    """A publisher that knows which of its packet ids are in use."""

    def __init__(self, port: int, name: str, frame: Frame) -> None:
        self.connection = Connection(port, name)
        self.connection.socket.setblocking(False)
        self.pending: set[bytes] = set()
        self._frame = frame
        self._sent = 0

    def publish(self, number: int) -> None:
        frame = self._frame
        if frame.qos:
            packet_id = struct.pack("!H", self._sent % PACKET_IDS + 1)
            if packet_id in self.pending:
                raise MembersFailed(f"{PACKET_IDS:,} messages are unacknowledged")
            self.pending.add(packet_id)
            packet = frame.batch(_ids(packet_id))
        else:
            packet = bytearray(frame.blank)
        _STAMP.pack_into(packet, frame.payload_at, time.monotonic_ns(), number)
        self.connection.send(packet)
        self._sent += 1

    def handle(self) -> None:
        data = self.connection.receive()
        end = len(data) // wire.ACK_BYTES * wire.ACK_BYTES
        self.connection.rest = data[end:]
        stored = bytearray()
        for at in range(0, end, wire.ACK_BYTES):
            packet_id = data[at + 2 : at + 4]
            if data[at] == wire.PUBREC:
                stored += packet_id
            else:
                self.pending.discard(packet_id)
        if stored:
            self.connection.send(wire.acks(wire.PUBREL, _ids(stored)))


def _ids(packed: bytes | bytearray) -> Ids:
    return Ids(bytes(packed[0::2]), bytes(packed[1::2]))


class Load:
    """`with Load(members, qos)`: subscribers at the members of the layout, a publisher at its own,
    and a way between them."""

    def __init__(self, members: Members, qos: int) -> None:
        layout = members.layout
        frame = Frame(TOPIC, qos, PAYLOAD_BYTES)
        name = f"bench-q{qos}"
        self.qos = qos
        self.sinks = {
            member: Sink(members.port(member), f"{name}-sink-{member}", frame)
            for member in layout.subscribers
        }
        self.source = Source(members.port(layout.publisher), f"{name}-source", frame)
        self._beacons = [
            Connection(members.port(member), f"{name}-beacon-{member}")
            for member in (layout.subscribers if members.beacons else ())
        ]
        self._beacon = Frame(BEACON_TOPIC, 0, 0).blank
        self._beacon_due_s = 0.0
        self._probe = PROBES
        users: list[Sink | Source] = [*self.sinks.values(), self.source]
        self._connections = {each.connection.socket: each for each in users}

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._connections.values():
            each.connection.close()
        for connection in self._beacons:
            connection.close()

    def await_flow(self, settle_s: float = SETTLE_S) -> None:
        """Until messages reach all subscribers, and none is under way. Raises MembersFailed."""
        deadline_s = time.monotonic() + FLOW_TIMEOUT_S
        first = self._probe + 1
        while not all(sink.probe >= first for sink in self.sinks.values()):
            self._check(deadline_s, "a message to reach all subscribers")
            self._probe += 1
            self.source.publish(self._probe)
            self.serve_for(PROBE_INTERVAL_S)
        while self.source.pending or time.monotonic() - settle_s < max(
            sink.arrived_s for sink in self.sinks.values()
        ):
            self._check(deadline_s, "nothing to be under way")
            self.serve(PROBE_INTERVAL_S)

    def warm_up(self, count: int) -> None:
        """So many that are not measured, and until none is under way."""
        self._closed_loop(range(self._probe + 1, self._probe + count + 1))
        self._probe += count
        self.await_flow()

    def closed_loop(self, count: int) -> None:
        """Publishes 0 to `count`, each when the one before was acknowledged; at QoS 0, one after
        the other."""
        self._closed_loop(range(count))

    def _closed_loop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.source.publish(number)
            deadline_s = time.monotonic() + ACKNOWLEDGE_TIMEOUT_S
            self.serve(0.0)
            while self.source.pending or self.source.connection.unsent:
                self._check(deadline_s, "a message to be acknowledged")
                self.serve(PROBE_INTERVAL_S)

    def paced(self, count: int, rate: float) -> None:
        """Publishes 0 to `count` by the clock, whatever becomes of them."""
        start_s = time.monotonic()
        for number in range(count):
            due_s = start_s + number / rate
            self.serve_for(due_s - time.monotonic())
            self.source.publish(number)

    def drain(self, count: int) -> None:
        """Until all `count` have come to all and everything is acknowledged, or time is over."""
        deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        while time.monotonic() < deadline_s and (
            self.source.pending or any(len(sink.times_ms) < count for sink in self.sinks.values())
        ):
            self.serve(PROBE_INTERVAL_S)
        # One that comes twice comes soon.
        self.serve_for(PROBE_INTERVAL_S)

    def serve_for(self, duration_s: float) -> None:
        end_s = time.monotonic() + duration_s
        while (left_s := end_s - time.monotonic()) > 0:
            self.serve(left_s)

    def serve(self, timeout_s: float) -> None:
        """What arrives within the time. select(2) waits in microseconds, epoll in ms."""
        now_s = time.monotonic()
        if self._beacons and now_s >= self._beacon_due_s:
            self._beacon_due_s = now_s + BEACON_INTERVAL_S
            for connection in self._beacons:
                connection.socket.sendall(self._beacon)
        blocked = {one: each for one, each in self._connections.items() if each.connection.unsent}
        readable, writable, _ = select.select(
            [*self._connections], [*blocked], [], max(0.0, timeout_s)
        )
        for one in readable:
            self._connections[one].handle()
        for one in writable:
            self._connections[one].connection.flush()

    def _check(self, deadline_s: float, what: str) -> None:
        if time.monotonic() > deadline_s:
            raise MembersFailed(f"waited in vain for {what} (QoS {self.qos})")
