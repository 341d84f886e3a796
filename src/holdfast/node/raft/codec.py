"""Raft messages and snapshots as bytes, equal in frames between nodes and in files.

All integers are little-endian::

    message     kind u8 · from u8 length, text · to u8 length, text · term u64 · the rest by kind
    entry       term u64 · kind u8 · length u32 · data        (its index follows from its place)
    snapshot    index u64 · term u64 · membership u32 length, JSON · size u32 of the data ·
                the data, compressed with zlib, to the end
"""

import struct
import zlib
from collections.abc import Iterable
from typing import Final

from holdfast.node.frame_kinds import BadFrame
from holdfast.node.raft.log import EntryKind, LogEntry, Membership, RaftSnapshot
from holdfast.node.raft.messages import (
    Append,
    AppendReply,
    Install,
    Message,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)

SNAPSHOT_BYTES_MAX: Final = 64 << 20
"""The most bytes of a snapshot's data. A cluster of 1,024 nodes and 65,536 partitions has 8 MB."""

_VOTE_REQUEST: Final = 1
_VOTE_REPLY: Final = 2
_APPEND: Final = 3
_APPEND_REPLY: Final = 4
_INSTALL: Final = 5
_TIMEOUT_NOW: Final = 6

_HEAD: Final = struct.Struct("<Q")
_VOTE_REQUEST_BODY: Final = struct.Struct("<QQB")
_VOTE_REPLY_BODY: Final = struct.Struct("<B")
_APPEND_BODY: Final = struct.Struct("<QQQ")
_APPEND_REPLY_BODY: Final = struct.Struct("<BQQQ")
_ENTRY: Final = struct.Struct("<QBI")
_SNAPSHOT: Final = struct.Struct("<QQI")
_U32: Final = struct.Struct("<I")
_TRIAL: Final = 1
_TRANSFER: Final = 2
_GRANTED: Final = 2


def encode_message(sender: str, receiver: str, message: Message) -> bytes:
    kind, body = _encode_body(message)
    return b"".join(
        (bytes((kind,)), _name(sender), _name(receiver), _HEAD.pack(message.term), body)
    )


def decode_message(payload: bytes) -> tuple[str, str, Message]:
    """The sender, the receiver and the message.

    Raises `BadFrame` if the payload is invalid.
    """
    try:
        kind = payload[0]
        sender, at = _read_name(payload, 1)
        receiver, at = _read_name(payload, at)
        (term,) = _HEAD.unpack_from(payload, at)
        return sender, receiver, _decode_body(kind, term, payload, at + _HEAD.size)
    except (struct.error, IndexError):
        raise BadFrame("a Raft message that is cut short") from None


def _encode_body(message: Message) -> tuple[int, bytes]:
    if isinstance(message, Append):
        head = _APPEND_BODY.pack(message.prev_index, message.prev_term, message.commit)
        return _APPEND, head + encode_entries(message.entries)
    if isinstance(message, AppendReply):
        return _APPEND_REPLY, _APPEND_REPLY_BODY.pack(
            message.is_accepted, message.index, message.hint_index, message.hint_term
        )
    if isinstance(message, VoteRequest):
        flags = message.is_trial * _TRIAL + message.is_transfer * _TRANSFER
        return _VOTE_REQUEST, _VOTE_REQUEST_BODY.pack(message.last_index, message.last_term, flags)
    if isinstance(message, VoteReply):
        flags = message.is_trial * _TRIAL + message.is_granted * _GRANTED
        return _VOTE_REPLY, _VOTE_REPLY_BODY.pack(flags)
    if isinstance(message, Install):
        return _INSTALL, encode_snapshot(message.snapshot)
    return _TIMEOUT_NOW, b""


def _decode_body(kind: int, term: int, payload: bytes, at: int) -> Message:
    if kind == _APPEND:
        prev_index, prev_term, commit = _APPEND_BODY.unpack_from(payload, at)
        entries = decode_entries(payload, at + _APPEND_BODY.size, prev_index + 1)
        return Append(term, prev_index, prev_term, commit, entries)
    if kind == _INSTALL:
        return Install(term, decode_snapshot(payload[at:]))
    message: Message
    if kind == _APPEND_REPLY:
        accepted, index, hint_index, hint_term = _APPEND_REPLY_BODY.unpack_from(payload, at)
        message = AppendReply(term, bool(accepted), index, hint_index, hint_term)
        at += _APPEND_REPLY_BODY.size
    elif kind == _VOTE_REQUEST:
        index, last_term, flags = _VOTE_REQUEST_BODY.unpack_from(payload, at)
        message = VoteRequest(term, index, last_term, bool(flags & _TRIAL), bool(flags & _TRANSFER))
        at += _VOTE_REQUEST_BODY.size
    elif kind == _VOTE_REPLY:
        (flags,) = _VOTE_REPLY_BODY.unpack_from(payload, at)
        message = VoteReply(term, bool(flags & _GRANTED), bool(flags & _TRIAL))
        at += _VOTE_REPLY_BODY.size
    elif kind == _TIMEOUT_NOW:
        message = TimeoutNow(term)
    else:
        raise BadFrame(f"a Raft message of kind {kind}")
    if at != len(payload):
        raise BadFrame(f"a Raft message with {len(payload) - at} bytes too many")
    return message


def _name(name: str) -> bytes:
    data = name.encode()
    return bytes((len(data),)) + data


def _read_name(payload: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + payload[at]
    data = payload[at + 1 : end]
    if end > len(payload):
        raise BadFrame("a Raft message that is cut short")
    try:
        return data.decode(), end
    except UnicodeDecodeError:
        raise BadFrame(f"a Raft message with the name {data!r}") from None


def encode_entries(entries: Iterable[LogEntry]) -> bytes:
    pieces = []
    for entry in entries:
        pieces.append(_ENTRY.pack(entry.term, entry.kind, len(entry.data)))
        pieces.append(entry.data)
    return b"".join(pieces)


def decode_entries(payload: bytes, at: int, index: int) -> tuple[LogEntry, ...]:
    """The entries to the end of the payload, the first one with this index.

    Raises `BadFrame` or `struct.error` if the payload is invalid.
    """
    entries: list[LogEntry] = []
    while at < len(payload):
        term, kind, length = _ENTRY.unpack_from(payload, at)
        at += _ENTRY.size
        data = payload[at : at + length]
        if len(data) < length:
            raise BadFrame("a Raft entry that is cut short")
        if kind == EntryKind.MEMBERS:
            Membership.decode(data)
        elif kind not in (EntryKind.NOTHING, EntryKind.COMMAND):
            raise BadFrame(f"a Raft entry of kind {kind}")
        entries.append(LogEntry(index + len(entries), term, kind, data))
        at += length
    return tuple(entries)


def encode_snapshot(snapshot: RaftSnapshot) -> bytes:
    membership = snapshot.membership.encode()
    return b"".join(
        (
            _SNAPSHOT.pack(snapshot.index, snapshot.term, len(membership)),
            membership,
            _U32.pack(len(snapshot.data)),
            zlib.compress(snapshot.data, 1),
        )
    )


def decode_snapshot(payload: bytes) -> RaftSnapshot:
    """The snapshot in a payload. Its data is unpacked only up to the stated size, so a small
    payload cannot fill the memory.

    Raises `BadFrame` if the payload is invalid.
    """
    try:
        index, term, length = _SNAPSHOT.unpack_from(payload)
        at = _SNAPSHOT.size + length
        membership = Membership.decode(payload[_SNAPSHOT.size : at])
        (size,) = _U32.unpack_from(payload, at)
    except struct.error:
        raise BadFrame("a Raft snapshot that is cut short") from None
    if size > SNAPSHOT_BYTES_MAX:
        raise BadFrame(f"a Raft snapshot of {size} bytes, the maximum is {SNAPSHOT_BYTES_MAX}")
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(payload[at + _U32.size :], size + 1)
    except zlib.error as error:
        raise BadFrame(f"a Raft snapshot that cannot be unpacked: {error}") from None
    if len(data) != size or not unpacker.eof or unpacker.unused_data:
        raise BadFrame("a Raft snapshot whose data has another size than it says")
    return RaftSnapshot(index, term, membership, data)
