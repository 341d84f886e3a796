"""Publishers and subscribers that keep a bounded number of messages under way, for each QoS.

A Flow is one topic with its publisher and subscribers. It publishes while fewer than `lag_max`
messages are between the publisher and its slowest subscriber, and, above QoS 0, while the
publisher has a free packet id in its window. So the broker is kept busy, never flooded.
"""

from collections.abc import Sequence

from bench import wire
from bench.channel import READ_BYTES
from bench.connection import Connection
from bench.wire import Frame, Ids

NO_IDS = Ids(b"", b"")


class Subscriber:
    """Counts QoS 0 messages; every byte is compared with the expected stream."""

    def __init__(self, connection: Connection, frame: Frame) -> None:
        self.connection = connection
        self.frame = frame
        self.received = 0
        self._stream_at = 0
        self._expected = frame.blank * (READ_BYTES // frame.bytes + 2)

    def handle(self) -> None:
        data = self.connection.receive()
        if not self._expected.startswith(data, self._stream_at):
            raise ValueError(f"not the frames that were published: {data[:80]!r}")
        whole, self._stream_at = divmod(self._stream_at + len(data), self.frame.bytes)
        self.received += whole

    def is_settled(self) -> bool:
        return True


class Qos1Subscriber(Subscriber):
    """Acknowledges all messages of a read with one write."""

    def handle(self) -> None:
        data = self.connection.receive()
        count = len(data) // self.frame.bytes
        end = count * self.frame.bytes
        self.connection.rest = data[end:]
        if count:
            ids = self.frame.ids_of(data[:end])
            self.connection.send(wire.acks(wire.PUBACK, ids))
            self.received += count


class Qos2Subscriber(Subscriber):
    """Answers PUBLISH with PUBREC and PUBREL with PUBCOMP, all of a read with one write."""

    def __init__(self, connection: Connection, frame: Frame) -> None:
        super().__init__(connection, frame)
        self.completed = 0

    def handle(self) -> None:
        data = self.connection.receive()
        published, released, end = self._split(data)
        self.connection.rest = data[end:]
        reply = wire.acks(wire.PUBREC, self.frame.ids_of(published))
        reply += wire.acks(wire.PUBCOMP, wire.acked_ids(released, wire.PUBREL))
        if reply:
            self.connection.send(reply)
        self.received += len(published) // self.frame.bytes
        self.completed += len(released) // wire.ACK_BYTES

    def _split(self, data: bytes) -> tuple[bytes, bytes, int]:
        """The whole PUBLISH and the whole PUBREL packets in `data`, and where the rest begins."""
        published: list[bytes] = []
        released: list[bytes] = []
        at, length, frame_bytes = 0, len(data), self.frame.bytes
        while at < length:
            if data[at] == wire.PUBREL:
                end, packets = at + wire.ACK_BYTES, released
            else:
                end, packets = at + frame_bytes, published
            if end > length:
                break
            packets.append(data[at:end])
            at = end
        return b"".join(published), b"".join(released), at

    def is_settled(self) -> bool:
        return self.completed == self.received


class Publisher:
    """Sends QoS 0 messages."""

    def __init__(self, connection: Connection, frame: Frame) -> None:
        self.connection = connection
        self.frame = frame
        self.sent = 0

    def room(self) -> int:
        """How many messages it may send now for all that its own window says."""
        return 1 << 30

    def publish(self, count: int) -> None:
        self.connection.send(self.frame.blank * count)
        self.sent += count

    def handle(self) -> None:
        data = self.connection.receive()
        raise ValueError(f"a QoS 0 publisher was sent {data[:80]!r}")

    def is_settled(self) -> bool:
        return True


class Qos1Publisher(Publisher):
    """Keeps at most `window` messages unacknowledged."""

    def __init__(self, connection: Connection, frame: Frame, window: int) -> None:
        super().__init__(connection, frame)
        self.window = window
        self.free = Ids.count_from_one(window)

    def room(self) -> int:
        return len(self.free.high)

    def publish(self, count: int) -> None:
        used, self.free = self.free.split(count)
        self.connection.send(self.frame.batch(used))
        self.sent += count

    def handle(self) -> None:
        self.free += wire.acked_ids(self._whole_acks(), wire.PUBACK)

    def _whole_acks(self) -> bytes:
        data = self.connection.receive()
        end = len(data) // wire.ACK_BYTES * wire.ACK_BYTES
        self.connection.rest = data[end:]
        return data[:end]

    def is_settled(self) -> bool:
        return len(self.free.high) == self.window


class Qos2Publisher(Qos1Publisher):
    """Keeps at most `window` messages between PUBLISH and PUBCOMP."""

    def handle(self) -> None:
        stored, completed = wire.split_acks(self._whole_acks(), wire.PUBREC, wire.PUBCOMP)
        if stored.high:
            self.connection.send(wire.acks(wire.PUBREL, stored))
        self.free += completed


SUBSCRIBERS = (Subscriber, Qos1Subscriber, Qos2Subscriber)


def publisher(connection: Connection, frame: Frame, window: int) -> Publisher:
    if frame.qos == 0:
        return Publisher(connection, frame)
    return (Qos1Publisher, Qos2Publisher)[frame.qos - 1](connection, frame, window)


class Flow:
    """One topic's publisher and subscribers."""

    def __init__(
        self, source: Publisher, sinks: Sequence[Subscriber], *, lag_max: int, batch: int
    ) -> None:
        self.source = source
        self.sinks = sinks
        self.lag_max = lag_max
        """Messages between the publisher and its slowest subscriber, at most."""
        self.batch = batch
        """Messages in one socket write; 0: all that the bounds allow at the moment."""

    def fill(self) -> bool:
        """Publishes with one socket write if there is room; says whether it did."""
        under_way = self.source.sent - min(sink.received for sink in self.sinks)
        room = min(self.lag_max - under_way, self.source.room())
        count = self.batch or room
        if count <= 0 or count > room:
            return False
        self.source.publish(count)
        return True

    def delivered(self) -> int:
        return sum(sink.received for sink in self.sinks)

    def missing(self) -> int:
        return self.source.sent * len(self.sinks) - self.delivered()

    def is_settled(self) -> bool:
        """Everything has arrived and every acknowledgement has been exchanged."""
        return (
            self.missing() == 0
            and self.source.is_settled()
            and all(sink.is_settled() for sink in self.sinks)
        )
