"""Gathers the records of one partition into a batch."""

from struct import Struct
from typing import Final
from zlib import crc32

from holdfast.log.batch import (
    ATTRIBUTE_STATE,
    DELTA_US_MAX,
    FORMAT,
    HEAD,
    HEAD_BYTES,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    Batch,
    HeadFields,
    batch_bytes,
)
from holdfast.log.record import CONTROL, FLAG_AUDIENCE, MESSAGE, STATE_FLAGS, Record

_pack_head: Final = HEAD.pack
_unpack_head: Final = HEAD.unpack_from
# The fields of a head that depend on the other records: body_start, timestamp_delta_us.
_HEAD_MOVED: Final = Struct("<I16xI16x")


def _delta_us(timestamp_us: int, base_us: int) -> int:
    """The difference for the 32 bits of a head; a clock that steps back counts as no step."""
    delta = timestamp_us - base_us
    if delta < 0:
        return 0
    return delta if delta <= DELTA_US_MAX else DELTA_US_MAX


class BatchBuilder:
    """Collects records of one partition until they are written as one batch."""

    def __init__(self, partition: int, base_offset: int) -> None:
        self.partition = partition
        self.base_offset = base_offset
        # Whether a record gets the time that the batch has for it. Counter-example: the clock steps
        # back, the leader applies the record as it was added, and a follower as it reads it.
        self.corrects_times = False
        self.records: list[Record | None] | None = None
        """The records as they were added, None for those of another batch. None: nobody wants
        them."""
        # The epoch under which the batch was opened; `build` takes it as an argument.
        self.epoch = 0
        self.base_timestamp_us = 0
        # Of the newest record.
        self.last_delta_us = 0
        self.attributes = 0
        self.count = 0
        self.body_bytes = 0
        # The topic of each record; b"" for one that is not a message.
        self.topics: list[bytes] = []
        self._heads: list[bytes] = []
        self._body: list[bytes] = []

    def add(self, record: Record) -> int:
        """Adds a record, sets its offset and returns it. The caller keeps a batch below
        BATCH_BYTES_MAX and closes it within an hour (`timestamp_delta_us` has 32 bits)."""
        if self.count == 0:
            self.base_timestamp_us = record.timestamp_us
        delta = record.timestamp_us - self.base_timestamp_us
        if not 0 <= delta <= DELTA_US_MAX:
            delta = _delta_us(record.timestamp_us, self.base_timestamp_us)
            if self.corrects_times:
                record.timestamp_us = self.base_timestamp_us + delta
        if delta > self.last_delta_us:
            self.last_delta_us = delta
        kind = record.kind
        flags = record.flags
        if (kind != MESSAGE or flags & STATE_FLAGS) and kind != CONTROL:
            self.attributes |= ATTRIBUTE_STATE
        topic = record.topic
        client_id = record.client_id
        producer = record.producer
        properties = record.properties
        payload = record.payload
        topic_len = len(topic)
        client_id_len = len(client_id)
        producer_len = len(producer)
        properties_len = len(properties)
        payload_len = len(payload)
        body_bytes = self.body_bytes
        self._heads.append(
            _pack_head(
                body_bytes,
                topic_len,
                client_id_len,
                producer_len,
                kind,
                flags,
                properties_len,
                payload_len,
                delta,
                record.producer_epoch,
                record.ticket,
                record.sequence,
            )
        )
        body = self._body
        body.append(topic)
        body.append(client_id)
        if producer_len:
            body.append(producer)
        if properties_len:
            body.append(properties)
        body.append(payload)
        self.topics.append(topic if kind == MESSAGE else b"")
        self.body_bytes = (
            body_bytes + topic_len + client_id_len + producer_len + properties_len + payload_len
        )
        if flags & FLAG_AUDIENCE:
            body.append(record.audience)
            self.body_bytes += len(record.audience)
        if self.records is not None:
            self.records.append(record)
        offset = record.offset = self.base_offset + self.count
        self.count += 1
        return offset

    def add_void(self, count: int, timestamp_us: int) -> None:
        """Adds records without a content, for offsets that no other record may have."""
        assert self.count == 0, "void records behind others"
        self.base_timestamp_us = timestamp_us
        self._heads.append(_pack_head(0, 0, 0, 0, CONTROL, 0, 0, 0, 0, 0, 0, 0) * count)
        self.topics = [b""] * count
        self.count = count

    def move_last(self, record: Record) -> "BatchBuilder":
        """Moves the newest record to a builder of its own, at the same offset, and returns that."""
        moved = BatchBuilder(self.partition, self.base_offset + self.count - 1)
        moved.epoch = self.epoch
        moved.add(record)
        self.records = None
        self._heads.pop()
        self.topics.pop()
        self.count -= 1
        self.body_bytes -= moved.body_bytes
        del self._body[-len(moved._body) :]
        self.attributes = 0
        self.last_delta_us = 0
        for heads in self._heads:
            for fields in HEAD.iter_unpack(heads):
                kind: int = fields[4]
                flags: int = fields[5]
                delta_us: int = fields[8]
                if (kind != MESSAGE or flags & STATE_FLAGS) and kind != CONTROL:
                    self.attributes |= ATTRIBUTE_STATE
                self.last_delta_us = max(self.last_delta_us, delta_us)
        return moved

    def extend(self, batch: Batch) -> int:
        """Adds the records of another batch unchanged, and returns the offset of the first."""
        body = batch.start + HEADER_BYTES + batch.count * HEAD_BYTES
        if self.count == 0:
            self.base_timestamp_us = batch.base_timestamp_us
            self._heads.append(bytes(batch.raw_heads()))
        else:
            self._add_moved_heads(batch)
        self._body.append(batch.data[body : body + batch.body_bytes])
        topics, newest_us = batch.topics()
        newest_us = _delta_us(batch.base_timestamp_us + newest_us, self.base_timestamp_us)
        if newest_us > self.last_delta_us:
            self.last_delta_us = newest_us
        self.attributes |= batch.attributes & ATTRIBUTE_STATE
        self.topics.extend(topics)
        if self.records is not None:
            self.records.extend([None] * batch.count)
        self.body_bytes += batch.body_bytes
        offset = self.base_offset + self.count
        self.count += batch.count
        return offset

    def pick(self, batch: Batch, index: int, *, is_stub: bool) -> None:
        """Adds one record of another batch, with its time there. `is_stub`: only its ticket and
        client id, as a CONTROL record."""
        heads = batch.start + HEADER_BYTES
        at = heads + index * HEAD_BYTES
        fields: HeadFields = _unpack_head(batch.data, at)
        kind = fields[4]
        topic = b""
        if is_stub:
            body = batch.client_id(index)
            lengths = (0, len(body), 0, CONTROL, 0, 0, 0, fields[8], 0, fields[10], 0)
            self._heads.append(_pack_head(self.body_bytes, *lengths))
        else:
            start = heads + batch.count * HEAD_BYTES + fields[0]
            body = batch.data[start : batch.body_end(index)]
            # All but its place in the body stays.
            rest = batch.data[at + 4 : at + HEAD_BYTES]
            self._heads.append(self.body_bytes.to_bytes(4, "little") + rest)
            if kind == MESSAGE:
                topic = body[: fields[1]]
            if (kind != MESSAGE or fields[5] & STATE_FLAGS) and kind != CONTROL:
                self.attributes |= ATTRIBUTE_STATE
        self.base_timestamp_us = batch.base_timestamp_us
        self.last_delta_us = max(self.last_delta_us, fields[8])
        self._body.append(body)
        self.topics.append(topic)
        self.body_bytes += len(body)
        self.count += 1

    def _add_moved_heads(self, batch: Batch) -> None:
        """Adds the heads, with positions and times relative to this batch."""
        moved_by = self.body_bytes
        later_by = batch.base_timestamp_us - self.base_timestamp_us
        heads = bytes(batch.raw_heads())
        at = 0
        for each in _HEAD_MOVED.iter_unpack(heads):
            fields: tuple[int, int] = each
            start = (fields[0] + moved_by).to_bytes(4, "little")
            delta = _delta_us(fields[1] + later_by, 0).to_bytes(4, "little")
            end = at + HEAD_BYTES
            self._heads.append(start + heads[at + 4 : at + 20] + delta + heads[at + 24 : end])
            at = end

    @property
    def size_bytes(self) -> int:
        """The bytes of the batch if it were built now."""
        return batch_bytes(self.count, self.body_bytes)

    def build(self, epoch: int, group: int = 0, attributes: int = 0) -> bytes:
        """The encoded batch. `group` and `attributes` are those of a batch in a write group."""
        length = self.size_bytes
        padding = length - HEADER_BYTES - self.count * HEAD_BYTES - self.body_bytes
        header = HEADER.pack(
            MAGIC,
            length,
            0,
            FORMAT,
            self.attributes | attributes,
            self.partition,
            self.base_offset,
            epoch,
            self.count,
            self.base_timestamp_us,
            self.body_bytes,
            group,
        )
        rest = b"".join([header[12:], *self._heads, *self._body, bytes(padding)])
        return b"".join([header[:8], crc32(rest).to_bytes(4, "little"), rest])

    def parsed(self, data: bytes) -> Batch:
        """The Batch of the bytes that `build` returned, without parsing them again."""
        batch = Batch(data, check=False)
        batch.set_topics(self.topics, self.last_delta_us)
        batch.known = self.records
        return batch
