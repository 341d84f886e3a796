"""Frames of reads at another node: FETCH and FETCHED.

A FETCH is JSON. A FETCHED is the length of its head, the head as JSON, and the records: their
partitions, offsets and times, then one batch with the rest of them. Decoders raise `BadFrame`.
"""

import struct
from collections.abc import Sequence
from typing import Annotated, Final

from msgspec import Meta, Struct, json

from holdfast.log.batch import Batch, CorruptBatch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.record import MESSAGE, Record
from holdfast.node.frame_kinds import BadFrame, decode_json
from holdfast.protocol.topics.names import InvalidFilter, check_filter

FETCHED_BYTES: Final = 256 << 10
"""The bytes of records at which a FETCHED is closed. A single larger record has one of its own."""

NOT_STORED: Final = 1
"""The node does not store the partition, or its disk is damaged."""
BEHIND: Final = 2
"""The node has not applied the records yet."""
BELOW_START: Final = 3
"""The node's log begins above the records."""
BUSY: Final = 4
"""The node serves the most reads that it may for the asking node."""
OTHER_LOG: Final = 5
"""The two nodes have different generations of the log."""

NOWHERE: Final = (1 << 63) - 1
"""The offset at which a lake has found a start in a partition without such a record."""

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Partition = Annotated[int, Meta(ge=0, le=(1 << 16) - 1)]

_LENGTH: Final = struct.Struct("<I")
# partition, offset, timestamp
_PLACE: Final = struct.Struct("<HQQ")


class ReadRange(Struct, array_like=True):
    """A range of a partition. FindStarts: `start` is 0, `end` the limit of the start."""

    partition: Partition
    start: Count
    end: Count


class FetchFrame(Struct, kw_only=True, omit_defaults=True):
    """FETCH: a read of records that match filters, or with `wanted` of single records, or with
    `queries` a search for starts."""

    number: Count
    generation: Count = 0
    ranges: list[ReadRange]
    records_max: Count = 0
    bytes_max: Count = 0
    filters: list[tuple[str, int]] = []
    """Each with the index of its `starts`; -1: it counts from the ranges on."""
    starts: list[list[Count]] = []
    """The offset of each range from which a filter counts."""
    wanted: list[tuple[Partition, Count]] = []
    queries: list[tuple[str, int, Count, list[Count]]] = []
    """The fields of each StartQuery. Its offsets are those of the ranges."""
    log: str = ""
    """The id of the log. Like `left`, only a lake is sent it."""
    left: list[dict[str, Count]] = []
    """For each query of the last records the topics of which some were found already, with the
    number that is still to be found."""


class StartEntry(Struct, array_like=True):
    """A FoundStart: the offset of each range, and the floor of each topic."""

    offsets: list[Count]
    floors: list[tuple[str, Count]]
    error: str
    size_bytes: Count = 0


class FetchedFrame(Struct, kw_only=True, omit_defaults=True):
    """The head of a FETCHED. All fields but the first three are in the last piece alone."""

    number: Count
    piece: Count = 0
    more: bool = False
    refused: list[tuple[Partition, int, Count]] = []
    """Partition, reason, and where the log begins."""
    positions: list[Count] = []
    """Those after the read, of each range. A refused one stays where it was."""
    lost: Count = 0
    looked_at: Count = 0
    """The number of wanted records that were looked at."""
    starts: list[StartEntry] = []


_encode: Final = json.Encoder().encode
_FETCH: Final = json.Decoder(FetchFrame)
_FETCHED: Final = json.Decoder(FetchedFrame)


def encode_fetch(frame: FetchFrame) -> bytes:
    return _encode(frame)


def decode_fetch(payload: bytes, partitions: int) -> FetchFrame:
    """Decodes a FETCH about a log of so many partitions."""
    frame = decode_json(_FETCH, payload, "a FETCH")
    numbers = [each.partition for each in frame.ranges] + [each[0] for each in frame.wanted]
    if any(number >= partitions for number in numbers):
        raise BadFrame(f"a FETCH from partition {max(numbers)}, the log has {partitions}")
    if len({each.partition for each in frame.ranges}) != len(frame.ranges):
        raise BadFrame("a FETCH that names a partition twice")
    if any(len(each) != len(frame.ranges) for each in frame.starts):
        raise BadFrame("a FETCH with starts of other partitions")
    try:
        for filter, index in frame.filters:
            check_filter(filter)
            if not -1 <= index < len(frame.starts):
                raise BadFrame(f"a FETCH without the start {index}")
        for filter, _, _, offsets in frame.queries:
            check_filter(filter)
            if offsets and len(offsets) != len(frame.ranges):
                raise BadFrame("a FETCH with offsets of other partitions")
    except InvalidFilter as error:
        raise BadFrame(f"a FETCH with a filter that is none: {error}") from None
    return frame


def encode_fetched(head: FetchedFrame, records: Sequence[Record]) -> list[bytes]:
    """Encodes an answer: pieces of about FETCHED_BYTES, the last of them with `head`."""
    payloads: list[bytes] = []
    at = 0
    while True:
        begin = at
        size_bytes = 0
        while at < len(records) and (at == begin or size_bytes < FETCHED_BYTES):
            record = records[at]
            size_bytes += len(record.topic) + len(record.payload) + len(record.properties)
            at += 1
        if at == len(records):
            head.piece = len(payloads)
            payloads.append(_encode_piece(head, records[begin:]))
            return payloads
        piece = FetchedFrame(number=head.number, piece=len(payloads), more=True)
        payloads.append(_encode_piece(piece, records[begin:at]))


def _encode_piece(head: FetchedFrame, records: Sequence[Record]) -> bytes:
    data = _encode(head)
    parts = [_LENGTH.pack(len(data)), data]
    if records:
        parts.append(_LENGTH.pack(len(records)))
        builder = BatchBuilder(0, 0)
        for record in records:
            # The times of a batch are within an hour of its first record; these may not be.
            offset = record.offset
            parts.append(_PLACE.pack(record.partition, offset, record.timestamp_us))
            builder.add(record)
            record.offset = offset
        parts.append(builder.build(0))
    return b"".join(parts)


def decode_fetched(payload: bytes) -> tuple[FetchedFrame, list[Record]]:
    """Decodes a piece of an answer."""
    try:
        (length,) = _LENGTH.unpack_from(payload)
        head = decode_json(_FETCHED, payload[_LENGTH.size : _LENGTH.size + length], "a FETCHED")
        at = _LENGTH.size + length
        return head, _decode_records(payload, at) if at < len(payload) else []
    except (struct.error, ValueError, CorruptBatch) as error:
        raise BadFrame(f"records that were read: {error}") from None


def _decode_records(payload: bytes, at: int) -> list[Record]:
    """Decodes the records of a piece. Raises struct.error, ValueError or CorruptBatch when they are
    malformed."""
    (count,) = _LENGTH.unpack_from(payload, at)
    end = at + _LENGTH.size + count * _PLACE.size
    places = _PLACE.iter_unpack(payload[at + _LENGTH.size : end])
    batch = Batch(payload, end)
    records = batch.records()
    for record, (partition, offset, timestamp_us) in zip(records, places, strict=True):
        record.topic.decode()
        if record.kind != MESSAGE:
            raise ValueError(f"a record of kind {record.kind}, which is no message")
        record.partition = partition
        record.offset = offset
        record.timestamp_us = timestamp_us
    return records
