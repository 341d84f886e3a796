"""Rewrites a log's batches in the form of a cluster's node.

Invariant: the offset, the time and the content of each message stay, and so do positions and length
of each batch. Only these change:

- the epoch of the batch, and its place in a write group;
- records of sessions and groups become CONTROL records, which recovery passes. The two kinds of
  nodes read them differently: a cluster's record of a group says what is finished, and a single
  broker's what a member has. Records at the end define the state again (`definitions`);
- messages no longer name a session epoch, unless their QoS 2 packet id is still in use.

Smallest counter-example for the last rule: a client's session with epoch 9 sent packet id 5, and
ended. After the conversion the client begins again, with epoch 1. Recovery would find packet id 5
in use, and the client's next message with that id would be taken for a repetition.
"""

import struct
from collections.abc import Mapping
from typing import Final
from zlib import crc32

from holdfast.log.batch import (
    ATTRIBUTE_GROUPED,
    ATTRIBUTE_MORE,
    ATTRIBUTE_STATE,
    HEAD_BYTES,
    HEADER_BYTES,
    Batch,
)
from holdfast.log.record import (
    CONTROL,
    CURSOR,
    FLAG_PACKET_ID,
    FLAG_WILL,
    MESSAGE,
    RELEASE,
    SESSION,
    STATE_FLAGS,
    WILL,
)

OF_SESSIONS: Final = frozenset({SESSION, CURSOR, RELEASE, WILL})
"""The kinds of records that define sessions and groups."""
_CHECKED: Final = 12
"""The position behind the checksum, where the bytes begin that it covers."""
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_CRC: Final = 8
_ATTRIBUTES: Final = 13
_EPOCH: Final = 24
_GROUP: Final = 44
_HEAD_KIND: Final = 10
_HEAD_FLAGS: Final = 11
_HEAD_EPOCH: Final = 24
_HEAD_SEQUENCE: Final = 32

PacketIds = Mapping[tuple[bytes, int, int], int]
"""The QoS 2 packet ids in use, by client id, partition and packet id, with the epoch of their
session."""


def rewrite(batch: Batch, epoch: int, in_use: PacketIds) -> Batch:
    """The batch under another epoch, without records of sessions."""
    content = bytearray(batch.content())
    attributes = batch.attributes & ~(ATTRIBUTE_STATE | ATTRIBUTE_GROUPED | ATTRIBUTE_MORE)
    if batch.attributes & ATTRIBUTE_STATE and _rewrite_heads(batch, content, in_use):
        attributes |= ATTRIBUTE_STATE
    content[_ATTRIBUTES] = attributes
    _U32.pack_into(content, _EPOCH, epoch)
    _U32.pack_into(content, _GROUP, 0)
    _U32.pack_into(content, _CRC, crc32(memoryview(content)[_CHECKED:]))
    return Batch(bytes(content), check=False)


def _rewrite_heads(batch: Batch, content: bytearray, in_use: PacketIds) -> bool:
    """Whether a record is left that recovery must apply."""
    has_state = False
    for index, (kind, flags, _) in enumerate(batch.heads()):
        head = HEADER_BYTES + index * HEAD_BYTES
        if kind in OF_SESSIONS:
            content[head + _HEAD_KIND] = CONTROL
            continue
        if kind == MESSAGE and flags & (FLAG_WILL | FLAG_PACKET_ID):
            flags = _rewrite_message(batch, index, content, head, in_use)
        has_state |= flags & STATE_FLAGS != 0 if kind == MESSAGE else kind != CONTROL
    return has_state


def _rewrite_message(
    batch: Batch, index: int, content: bytearray, head: int, in_use: PacketIds
) -> int:
    """The flags of the message at `head`, changed in `content`."""
    flags = content[head + _HEAD_FLAGS] & ~FLAG_WILL
    if flags & FLAG_PACKET_ID:
        (packet_id,) = _U64.unpack_from(content, head + _HEAD_SEQUENCE)
        epoch = in_use.get((batch.client_id(index), batch.partition, packet_id))
        if epoch is None:
            flags &= ~FLAG_PACKET_ID
        else:
            _U32.pack_into(content, head + _HEAD_EPOCH, epoch)
    content[head + _HEAD_FLAGS] = flags
    return flags
