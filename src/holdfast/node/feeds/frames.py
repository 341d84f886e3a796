"""Payloads of the frames of feeds. All integers are little-endian::

    FEED_FROM   per partition: u16 partition, u32 epoch, u32 request, u64 position, u32 count,
                then the pending records of the sender: u32 ticket, u16 length, client id.
                With epoch 0 the feed of the partition ends. If another request for the
                partition follows, `request` is the epoch of its position
    FEED        parts in order, each u8 kind, u32 request, then
                RECORDS   u64 mark, u32 count, an u64 offset per record, a batch. With a count of 0
                          the records have the offsets of the batch
                MARK      u64 mark
                ALIGNED   u32 count, then tickets as in FEED_FROM
                BEGINS    u64 start of the leader's log, which is above the position
                LACKS     u64 end of the leader's log, which is below the position
    FEED_ACK    u64 bytes of FEED frames that the sender has applied on this link

A record of which the receiver needs only the end of its wait has kind CONTROL, a ticket and a
client id.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct, error, unpack_from
from typing import Final

from holdfast.log.batch import Batch, CorruptBatch
from holdfast.node.frame_kinds import BadFrame

RECORDS: Final = 1
MARK: Final = 2
ALIGNED: Final = 3
BEGINS: Final = 4
LACKS: Final = 5

_FROM: Final = Struct("<HIIQI")
_TICKET: Final = Struct("<IH")
_PART: Final = Struct("<BI")
_COUNT: Final = Struct("<I")
_OFFSET: Final = Struct("<Q")
_RECORDS: Final = Struct("<BIQI")
_MARK: Final = Struct("<BIQ")
_ALIGNED: Final = Struct("<BII")

Tickets = list[tuple[int, bytes]]
"""Tickets of pending records, each with the client id."""


@dataclass
class FeedFrom:
    """A request for the feed of one partition."""

    partition: int
    epoch: int
    request: int
    position: int
    """The node has applied what it needs below this offset."""
    tickets: Tickets = field(default_factory=list)
    marked: int = 0
    """The epoch under which the position was reached; 0: it is not known."""


class FeedPart:
    """One part of a FEED frame."""

    def __init__(self, kind: int, request: int) -> None:
        self.kind = kind
        self.request = request
        self.offset = 0
        """The mark, or the start or end of the leader's log."""
        self.batch: Batch | None = None
        self.offsets: Sequence[int] = ()
        """The offsets of the records in the batch."""
        self.tickets: Tickets = []
        self.size_bytes = 0


def encode_feed_from(requests: list[FeedFrom]) -> bytes:
    parts: list[bytes] = []
    for each in requests:
        if each.marked:
            parts.append(_FROM.pack(each.partition, 0, each.marked, 0, 0))
        head = (each.partition, each.epoch, each.request, each.position, len(each.tickets))
        parts.append(_FROM.pack(*head))
        parts.append(_encode_tickets(each.tickets))
    return b"".join(parts)


def _encode_tickets(tickets: Tickets) -> bytes:
    return b"".join([_TICKET.pack(ticket, len(name)) + name for ticket, name in tickets])


def _decode_tickets(payload: bytes, at: int, count: int) -> tuple[Tickets, int]:
    found: Tickets = []
    for _ in range(count):
        ticket, length = _TICKET.unpack_from(payload, at)
        at += _TICKET.size
        name = payload[at : at + length]
        if len(name) != length:
            raise BadFrame("a feed with a client id that is cut off")
        found.append((ticket, name))
        at += length
    return found, at


def decode_feed_from(payload: bytes) -> list[FeedFrom]:
    """The requests of a FEED_FROM. Raises `BadFrame` when it is malformed."""
    found: list[FeedFrom] = []
    at = 0
    try:
        while at < len(payload):
            partition, epoch, request, position, count = _FROM.unpack_from(payload, at)
            tickets, at = _decode_tickets(payload, at + _FROM.size, count)
            marked = 0
            if epoch and found and (found[-1].partition, found[-1].epoch) == (partition, 0):
                marked = found.pop().request
            found.append(FeedFrom(partition, epoch, request, position, tickets, marked))
    except error as failure:
        raise BadFrame(f"FEED_FROM of {len(payload)} bytes: {failure}") from None
    return found


def records_part(request: int, mark: int, batch: bytes, offsets: list[int]) -> bytes:
    """`offsets`: empty if the records have those of the batch."""
    head = _RECORDS.pack(RECORDS, request, mark, len(offsets))
    return b"".join([head, *[_OFFSET.pack(each) for each in offsets], batch])


def offset_part(kind: int, request: int, offset: int) -> bytes:
    return _MARK.pack(kind, request, offset)


def aligned_part(request: int, tickets: Tickets) -> bytes:
    return _ALIGNED.pack(ALIGNED, request, len(tickets)) + _encode_tickets(tickets)


def decode_feed(payload: bytes) -> list[FeedPart]:
    """The parts of a FEED, with verified checksums. Raises `BadFrame` when it is malformed."""
    found: list[FeedPart] = []
    at = 0
    try:
        while at < len(payload):
            kind, request = _PART.unpack_from(payload, at)
            begin = at
            at += _PART.size
            part = FeedPart(kind, request)
            if kind == ALIGNED:
                (count,) = _COUNT.unpack_from(payload, at)
                part.tickets, at = _decode_tickets(payload, at + _COUNT.size, count)
            elif kind in (RECORDS, MARK, BEGINS, LACKS):
                (part.offset,) = _OFFSET.unpack_from(payload, at)
                at += _OFFSET.size
                if kind == RECORDS:
                    at = _decode_records(payload, at, part)
            else:
                raise BadFrame(f"a part of kind {kind} in a FEED")
            part.size_bytes = at - begin
            found.append(part)
    except (error, CorruptBatch) as failure:
        raise BadFrame(f"FEED of {len(payload)} bytes, at byte {at}: {failure}") from None
    return found


def _decode_records(payload: bytes, at: int, part: FeedPart) -> int:
    (count,) = _COUNT.unpack_from(payload, at)
    at += _COUNT.size
    if count * _OFFSET.size > len(payload) - at:
        raise BadFrame(f"{count} offsets in a FEED of {len(payload)} bytes")
    part.offsets = list(unpack_from(f"<{count}Q", payload, at))
    at += count * _OFFSET.size
    batch = Batch(payload, at)
    if not count:
        part.offsets = list(range(batch.base_offset, batch.end_offset))
    if not batch.count or len(part.offsets) != batch.count:
        raise BadFrame(f"{count} offsets for the {batch.count} records of a batch")
    before = -1
    for offset in part.offsets:
        if offset <= before:
            raise BadFrame(f"offset {offset} after {before} in a FEED")
        before = offset
    if before >= part.offset:
        raise BadFrame(f"offset {before} at or above the mark, {part.offset}")
    part.batch = batch
    return at + batch.length


def encode_feed_ack(received_bytes: int) -> bytes:
    return _OFFSET.pack(received_bytes)


def decode_feed_ack(payload: bytes) -> int:
    if len(payload) != _OFFSET.size:
        raise BadFrame(f"FEED_ACK of {len(payload)} bytes")
    received: int = _OFFSET.unpack(payload)[0]
    return received
