"""Payloads of the frames between a partition's leader and its followers. All integers are
little-endian. A frame has one entry for each partition that has news::

    FOLLOW         u8 length, incarnation of the sender, then per partition
                   u16 partition, u32 epoch, u32 request, u32 last epoch, u64 end, u64 durable end
    FOLLOW_FROM    u16 partition, u32 epoch, u32 request, u8 action, u32 cut epoch, u64 offset,
                   u64 high watermark
    REPLICATE      u32 count, u32 epoch of the leader for each batch, the batches
    REPLICATE_ACK  u64 bytes of batches received on this link, then per partition
                   u16 partition, u32 epoch, u64 durable end
    COMMIT         u16 partition, u32 epoch, u64 high watermark

A REPLICATE_ACK with an epoch above the leader's, or a FOLLOW_FROM with NEWER, announces that there
is a newer leader.
"""

from struct import Struct, error, unpack_from
from typing import Final

from holdfast.log.batch import Batch, CorruptBatch
from holdfast.node.frame_kinds import BadFrame

GO_ON: Final = 1
"""Batches from `offset` follow; the follower's log ends there."""
CUT: Final = 2
"""The leader's log has nothing above `offset` of `cut epoch`, and none of the epochs between that
and the follower's last. The follower cuts its log there and asks again. With cut epoch 0 it cuts at
`offset` itself."""
RESET: Final = 3
"""The leader's log begins at `offset` and cannot be joined to the follower's."""
NEWER: Final = 4
"""`epoch` is above that of the request."""
ASK: Final = 5
"""The follower must ask again, because the leader no longer has the next batch."""
ACTIONS: Final = (GO_ON, CUT, RESET, NEWER, ASK)

FOLLOW_ENTRY: Final = Struct("<HIIIQQ")
FOLLOW_FROM_ENTRY: Final = Struct("<HIIBIQQ")
OFFSET_ENTRY: Final = Struct("<HIQ")
EPOCH: Final = Struct("<I")
RECEIVED: Final = Struct("<Q")
PLACE: Final = Struct("<14xHQII16x")
"""The partition, base offset, epoch and count in a batch header."""

FollowEntry = tuple[int, int, int, int, int, int]
FollowFromEntry = tuple[int, int, int, int, int, int, int]
OffsetEntry = tuple[int, int, int]


def encode_follow(incarnation: str, entries: list[bytes]) -> bytes:
    name = incarnation.encode()
    return b"".join([bytes([len(name)]), name, *entries])


def decode_follow(payload: bytes) -> tuple[str, list[FollowEntry]]:
    if not payload or len(payload) < 1 + payload[0]:
        raise BadFrame("FOLLOW without an incarnation")
    start = 1 + payload[0]
    try:
        incarnation = payload[1:start].decode()
        entries: list[FollowEntry] = list(FOLLOW_ENTRY.iter_unpack(payload[start:]))
    except (error, UnicodeDecodeError) as failure:
        raise BadFrame(f"FOLLOW of {len(payload)} bytes: {failure}") from None
    return incarnation, entries


def decode_follow_from(payload: bytes) -> list[FollowFromEntry]:
    try:
        entries: list[FollowFromEntry] = list(FOLLOW_FROM_ENTRY.iter_unpack(payload))
    except error as failure:
        raise BadFrame(f"FOLLOW_FROM of {len(payload)} bytes: {failure}") from None
    for entry in entries:
        if entry[3] not in ACTIONS:
            raise BadFrame(f"FOLLOW_FROM with action {entry[3]}")
    return entries


def encode_ack(received: int, entries: list[bytes]) -> bytes:
    return b"".join([RECEIVED.pack(received), *entries])


def decode_ack(payload: bytes) -> tuple[int, list[OffsetEntry]]:
    if len(payload) < RECEIVED.size:
        raise BadFrame(f"REPLICATE_ACK of {len(payload)} bytes")
    received: int = RECEIVED.unpack_from(payload)[0]
    return received, decode_offsets("REPLICATE_ACK", payload[RECEIVED.size :])


def decode_offsets(kind: str, payload: bytes) -> list[OffsetEntry]:
    """The entries of a COMMIT, or of a REPLICATE_ACK after its count.

    Raises `BadFrame` if the length does not fit.
    """
    try:
        return list(OFFSET_ENTRY.iter_unpack(payload))
    except error as failure:
        raise BadFrame(f"{kind} of {len(payload)} bytes: {failure}") from None


def replicate_parts(epochs: list[bytes], batches: list[bytes]) -> list[bytes]:
    """The payload of a REPLICATE frame in pieces. `epochs` has the leader's epoch for each batch,
    packed with EPOCH."""
    return [EPOCH.pack(len(batches)), *epochs, *batches]


def decode_replicate(payload: bytes) -> list[tuple[int, Batch]]:
    """The (epoch of the leader, batch) pairs in order, with verified checksums.

    Raises `BadFrame` if the payload or a batch is invalid.
    """
    if len(payload) < EPOCH.size:
        raise BadFrame(f"REPLICATE of {len(payload)} bytes")
    count: int = EPOCH.unpack_from(payload)[0]
    at = EPOCH.size * (1 + count)
    if len(payload) < at:
        raise BadFrame(f"REPLICATE of {len(payload)} bytes for {count} batches")
    epochs: tuple[int, ...] = unpack_from(f"<{count}I", payload, EPOCH.size)
    found: list[tuple[int, Batch]] = []
    for epoch in epochs:
        try:
            batch = Batch(payload, at)
        except CorruptBatch as damage:
            raise BadFrame(f"REPLICATE, batch at byte {at}: {damage}") from None
        if not batch.count:
            raise BadFrame(f"REPLICATE, batch at byte {at}: no records")
        if batch.epoch > epoch:
            raise BadFrame(
                f"a batch of epoch {batch.epoch} from the leader of epoch {epoch} "
                f"of partition {batch.partition}"
            )
        found.append((epoch, batch))
        at += batch.length
    if at != len(payload):
        raise BadFrame(f"REPLICATE with {len(payload) - at} bytes after its last batch")
    return found


def range_of(batch: bytes) -> tuple[int, int, int, int]:
    """The partition, base offset, end offset and epoch of an encoded batch.

    Raises `BadFrame` if the header is incomplete.
    """
    try:
        partition, base, epoch, count = PLACE.unpack_from(batch)
    except error as failure:
        raise BadFrame(f"batch of {len(batch)} bytes: {failure}") from None
    return partition, base, base + count, epoch
