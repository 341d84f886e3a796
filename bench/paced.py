"""Scenarios at a fixed rate: many quiet subscribers, and latency."""

import select
import struct
import time

from bench import wire
from bench.connection import Connection, Loop
from bench.flows import Publisher, Subscriber
from bench.measurement import Measurement, Sample, percentile
from bench.scenarios import PAYLOAD_BYTES, Scenario
from bench.wire import Frame

DRAIN_TIMEOUT_S = 5.0
_TIME = struct.Struct("!q")


def run_spread(
    scenario: Scenario, port: int, broker_pid: int, warm_up_s: float, measure_s: float
) -> Measurement:
    """Publishes to each topic in turn, at even intervals, from one connection."""
    loop = Loop()
    frames = [Frame(f"bench/{topic:04}", 0, PAYLOAD_BYTES) for topic in range(scenario.topics)]
    sinks = []
    for topic, frame in enumerate(frames):
        for index in range(scenario.subscribers):
            connection = Connection(port, f"sub-{topic:04}-{index:04}")
            connection.subscribe(f"bench/{topic:04}", 0)
            sinks.append(Subscriber(connection, frame))
            loop.add(connection, sinks[-1].handle)
    source = Connection(port, "pub")
    loop.add(source, Publisher(source, frames[0]).handle)
    start = time.monotonic()
    sent = 0

    def sample_after(duration_s: float) -> Sample:
        nonlocal sent
        end = time.monotonic() + duration_s
        while (now := time.monotonic()) < end:
            while sent < (now - start) * scenario.rate:
                source.send(frames[sent % len(frames)].blank)
                sent += 1
            loop.run_once(0.001)
        return Sample(broker_pid, sum(sink.received for sink in sinks))

    measurement = sample_after(warm_up_s).until(sample_after(measure_s))
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    expected = sent * scenario.subscribers
    while time.monotonic() < deadline and sum(sink.received for sink in sinks) < expected:
        loop.run_once(0.1)
    measurement.missing = expected - sum(sink.received for sink in sinks)
    loop.close()
    return measurement


class Probe:
    """One publisher and one subscriber of timed QoS 1 messages.

    A message carries the moment it was handed to the socket. Publishing follows the clock
    alone, so a broker that stalls is shown every message that became due meanwhile. `sink_port`:
    of the subscriber, where it is another node's; `topics`: published to in turn; `name`: the
    begin of the topics and of the client ids.
    """

    def __init__(
        self,
        port: int,
        rate: float,
        *,
        sink_port: int | None = None,
        topics: int = 1,
        name: str = "bench",
        transport: str = "tcp",
    ) -> None:
        self.frames = [Frame(f"{name}/{topic:04}", 1, PAYLOAD_BYTES) for topic in range(topics)]
        self.frame = self.frames[0]
        """All are of one size."""
        self.rate = rate
        self.sink = Connection(sink_port or port, f"{name}-sub", transport)
        self.sink.subscribe(f"{name}/0000" if topics == 1 else f"{name}/+", 1)
        self.source = Connection(port, f"{name}-pub", transport)
        self.sent = 0
        self.acked = 0
        self.sent_ns: dict[bytes, int] = {}
        self.delivery_ms: list[float] = []
        self.puback_ms: list[float] = []
        self.late_ms: list[float] = []
        """By how much the generator itself missed the moment a message was due."""
        for connection in (self.sink, self.source):
            connection.socket.setblocking(False)

    def publish(self, due_ns: int) -> None:
        packet_id = struct.pack("!H", self.sent % 0xFFFF + 1)
        if packet_id in self.sent_ns:
            raise ValueError("65,535 messages are unacknowledged: the broker does not keep up")
        frame = self.frames[self.sent % len(self.frames)]
        packet = frame.batch(wire.Ids(packet_id[:1], packet_id[1:]))
        now_ns = time.monotonic_ns()
        _TIME.pack_into(packet, self.frame.payload_at, now_ns)
        if self.source.channel.write(packet) != len(packet):
            raise ValueError("the publisher's socket is full: the broker does not keep up")
        self.sent_ns[packet_id] = now_ns
        self.late_ms.append((now_ns - due_ns) / 1e6)
        self.sent += 1

    def handle_delivery(self) -> None:
        data = self.sink.receive()
        now_ns = time.monotonic_ns()
        end = len(data) // self.frame.bytes * self.frame.bytes
        self.sink.rest = data[end:]
        for at in range(0, end, self.frame.bytes):
            (sent_ns,) = _TIME.unpack_from(data, at + self.frame.payload_at)
            self.delivery_ms.append((now_ns - sent_ns) / 1e6)
        if end:
            high = data[self.frame.id_at : end : self.frame.bytes]
            low = data[self.frame.id_at + 1 : end : self.frame.bytes]
            self.sink.send(wire.acks(wire.PUBACK, wire.Ids(high, low)))

    def handle_puback(self) -> None:
        data = self.source.receive()
        now_ns = time.monotonic_ns()
        end = len(data) // wire.ACK_BYTES * wire.ACK_BYTES
        self.source.rest = data[end:]
        for at in range(0, end, wire.ACK_BYTES):
            self.puback_ms.append((now_ns - self.sent_ns.pop(data[at + 2 : at + 4])) / 1e6)
            self.acked += 1

    def wait(self, timeout_s: float) -> None:
        """Serves what arrives within `timeout_s`. select(2) waits in microseconds, epoll in ms."""
        sockets = [self.sink.socket, self.source.socket]
        readable, _, _ = select.select(sockets, [], [], max(0.0, timeout_s))
        if self.sink.socket in readable:
            self.handle_delivery()
        if self.source.socket in readable:
            self.handle_puback()

    def run_for(self, duration_s: float) -> None:
        start_ns = time.monotonic_ns()
        interval_ns = int(1e9 / self.rate)
        for number in range(int(duration_s * self.rate)):
            due_ns = start_ns + number * interval_ns
            while (left_ns := due_ns - time.monotonic_ns()) > 0:
                self.wait(left_ns / 1e9)
            self.publish(due_ns)

    def drain(self) -> None:
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while time.monotonic() < deadline and (
            len(self.delivery_ms) < self.sent or self.acked < self.sent
        ):
            self.wait(0.1)


def run_latency(
    scenario: Scenario, port: int, broker_pid: int, warm_up_s: float, measure_s: float
) -> Measurement:
    probe = Probe(port, scenario.rate)
    probe.run_for(warm_up_s)
    before = Sample(broker_pid, len(probe.delivery_ms))
    published_before, acked_before = probe.sent, probe.acked
    probe.run_for(measure_s)
    measurement = before.until(Sample(broker_pid, len(probe.delivery_ms)))
    probe.drain()
    measurement.missing = probe.sent - min(len(probe.delivery_ms), probe.acked)
    deliveries = sorted(probe.delivery_ms[published_before:])
    pubacks = sorted(probe.puback_ms[acked_before:])
    late = sorted(probe.late_ms[published_before:])
    if deliveries and pubacks:
        measurement.other = {
            "delivery_p50_ms": percentile(deliveries, 0.50),
            "delivery_p99_ms": percentile(deliveries, 0.99),
            "delivery_max_ms": deliveries[-1],
            "puback_p50_ms": percentile(pubacks, 0.50),
            "puback_p99_ms": percentile(pubacks, 0.99),
            "generator_late_p99_ms": percentile(late, 0.99),
        }
    return measurement
