"""Decodes messages of the log to Python objects, without numpy and pyarrow."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from msgspec import Struct

from holdfast.log.batch import HEAD, HEAD_BYTES, HEADER, HEADER_BYTES
from holdfast.log.columns.chunk import Chunk
from holdfast.log.reading.topic_filter import TopicFilter
from holdfast.log.record import FLAG_PRODUCER, FLAG_QOS_MASK, FLAG_RETAIN, MESSAGE
from holdfast.protocol.mqtt import packets
from holdfast.protocol.mqtt.packets import Properties
from holdfast.protocol.mqtt.properties import decode_block

TOPICS_BYTES_MAX: Final = 1 << 20
"""The most bytes of topics whose text a cursor remembers, with TOPIC_BYTES for each."""
TOPIC_BYTES: Final = 200
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class LogMessage(Struct, frozen=True, gc=False):
    """A message of the log."""

    topic: str
    payload: bytes
    partition: int
    """The log partition. A topic is always in the same one."""
    offset: int
    """The offset in the partition. Offsets have gaps, because not every record is a message."""
    timestamp_us: int
    """Time of storage by the broker, in microseconds since 1970."""
    qos: int
    """The QoS as published."""
    retain: bool
    """The flag RETAIN as published."""
    client_id: str
    """The client id of the publisher."""
    encoded_properties: bytes
    """The MQTT 5 properties as published, encoded; empty without any."""
    producer: tuple[str, int, int] | None
    """The producer sequence: id, epoch and sequence (docs/producers.md). None without one."""

    @property
    def time(self) -> datetime:
        """Time of storage by the broker, in UTC."""
        return _EPOCH + timedelta(microseconds=self.timestamp_us)

    @property
    def properties(self) -> Properties:
        """The MQTT 5 properties by identifier (`holdfast.protocol.mqtt.properties`)."""
        block = self.encoded_properties
        return decode_block(block, 0, len(block), packets.PUBLISH) if block else {}


class MessageDecoder:
    """The decoder of one cursor, with the topics that it has seen."""

    def __init__(self, topics: TopicFilter) -> None:
        self._filter = topics
        # The text of a topic, or None if the filter does not match it.
        self._topics: dict[bytes, str | None] = {}
        self._topics_bytes = 0

    def messages(self, chunk: Chunk) -> Iterator[tuple[int, int, list[LogMessage]]]:
        """Yields the messages of each batch, with its partition and the offset at which the batch
        ends."""
        for position, start, end in zip(chunk.positions, chunk.starts, chunk.ends, strict=True):
            header = HEADER.unpack_from(chunk.data, position)
            partition: int = header[5]
            yield partition, end, self._messages_of(chunk, position, start, end)

    def _messages_of(self, chunk: Chunk, position: int, start: int, end: int) -> list[LogMessage]:
        _, length, _, _, _, partition, base, _, count, time_us, _, _ = HEADER.unpack_from(
            chunk.data, position
        )
        data = bytes(chunk.data[position : position + length])
        first = HEADER_BYTES + (start - base) * HEAD_BYTES
        heads = memoryview(data)[first : first + (end - start) * HEAD_BYTES]
        body = HEADER_BYTES + count * HEAD_BYTES
        known = self._topics
        found: list[LogMessage] = []
        offset = start - 1
        for (
            at, topic_len, client_len, producer_len, kind, flags, properties_len, payload_len,
            delta_us, epoch, _, sequence,
        ) in HEAD.iter_unpack(heads):  # fmt: skip
            offset += 1
            if kind != MESSAGE:
                continue
            at += body
            client_at = at + topic_len
            raw = data[at:client_at]
            topic = known[raw] if raw in known else self._learn(raw)
            if topic is None:
                continue
            producer_at = client_at + client_len
            properties_at = producer_at + producer_len
            payload_at = properties_at + properties_len
            producer = None
            if flags & FLAG_PRODUCER:
                producer = (data[producer_at:properties_at].decode(), epoch, sequence)
            found.append(
                LogMessage(
                    topic,
                    data[payload_at : payload_at + payload_len],
                    partition,
                    offset,
                    time_us + delta_us,
                    flags & FLAG_QOS_MASK,
                    flags & FLAG_RETAIN != 0,
                    data[client_at:producer_at].decode(),
                    data[properties_at:payload_at],
                    producer,
                )
            )
        return found

    def _learn(self, raw: bytes) -> str | None:
        self._topics_bytes += len(raw) + TOPIC_BYTES
        if self._topics_bytes > TOPICS_BYTES_MAX:
            self._topics.clear()
            self._topics_bytes = len(raw) + TOPIC_BYTES
        topic = raw.decode()
        self._topics[raw] = topic if self._filter.matches(topic) else None
        return self._topics[raw]
