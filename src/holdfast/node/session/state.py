"""Encodes a session's state for the log: payloads of SESSION and CURSOR records.

SESSION payloads are JSON, because they are rare and worth reading in `holdfast log dump`. CURSOR
payloads are packed, because an active durable session writes up to twenty a second::

    u16 positions, u16 entries
    positions * (u16 partition, u64 next offset to read)
    entries * (u16 packet id, u8 operation, u8 qos, u8 source, u16 partition, u64 offset)

source: 0 a match of the session's own subscriptions, 1 a retained message for a new subscription,
otherwise the tag of the shared group that gave the record.
operation: 0 the packet id is free, 3 the offset is finished though no logged position has passed
it (the packet id is 0; in a group's record a member has the message), otherwise the Inflight state.
Every field sets one key to a value, so replaying records that a snapshot already contains changes
nothing.

An entry that frees packet id 0, which no message has, says that an operator has moved the session:
its new positions do not prove that it was sent what is below them.
"""

import struct
from itertools import starmap
from typing import Final, TypeVar

from holdfast.log.record import Record
from holdfast.node.session.session import TAG_MIN, Inflight, Session

EntryT = TypeVar("EntryT")

_COUNTS: Final = struct.Struct("<HH")
_POSITION: Final = struct.Struct("<HQ")
_ENTRY: Final = struct.Struct("<HBBBHQ")

ENTRIES_MAX: Final = 65_535
"""The most entries of one payload."""

FREE: Final = 0
DONE: Final = 3

RETAINED: Final = 1

MOVED: Final[dict[int, Inflight | None]] = {0: None}
"""The changes of packet ids in the record of a move."""


class CursorState:
    """The content of one CURSOR record."""

    def __init__(self) -> None:
        # (partition, next offset to read)
        self.positions: list[tuple[int, int]] = []
        # (packet id, the Inflight that uses it; None: the id is free)
        self.inflight: list[tuple[int, Inflight | None]] = []
        # (partition, offset)
        self.done: list[tuple[int, int]] = []
        # Whether an operator has set the positions.
        self.is_move = False


def encode_cursor(
    positions: list[tuple[int, int]],
    changes: dict[int, Inflight | None],
    done: list[tuple[int, int]],
) -> bytes:
    """The payload of a CURSOR record."""
    parts = [_COUNTS.pack(len(positions), len(changes) + len(done))]
    parts += starmap(_POSITION.pack, positions)
    for packet_id, entry in changes.items():
        if entry is None:
            parts.append(_ENTRY.pack(packet_id, FREE, 0, 0, 0, 0))
        else:
            parts.append(
                _ENTRY.pack(
                    packet_id,
                    entry.state,
                    entry.qos,
                    RETAINED if entry.is_retained else entry.group_tag,
                    entry.partition,
                    entry.offset,
                )
            )
    for partition, offset in done:
        parts.append(_ENTRY.pack(0, DONE, 0, 0, partition, offset))
    return b"".join(parts)


def cursor_state(
    positions: list[tuple[int, int]],
    changes: dict[int, Inflight | None],
    done: list[tuple[int, int]],
) -> CursorState:
    """The content of the payload that `encode_cursor` makes of the same. It shares no entry."""
    cursor = CursorState()
    cursor.positions = positions
    cursor.done = done
    for packet_id, entry in changes.items():
        if entry is None or entry.state == FREE:
            if packet_id:
                cursor.inflight.append((packet_id, None))
            else:
                cursor.is_move = True
            continue
        known = Inflight(entry.partition, entry.offset, entry.qos, entry.is_retained)
        if not entry.is_retained:
            known.group_tag = entry.group_tag
        known.state = entry.state
        known.logged = True
        cursor.inflight.append((packet_id, known))
    return cursor


def decode_cursor(payload: bytes, partitions: int = 1 << 32) -> CursorState:
    """The content of a CURSOR payload of a log with so many partitions. Raises `struct.error` or
    `ValueError` if it is not one."""
    cursor = CursorState()
    position_count, entry_count = _COUNTS.unpack_from(payload, 0)
    at = _COUNTS.size
    end = at + position_count * _POSITION.size
    if len(payload) < end:
        raise ValueError("a cursor that ends within its positions")
    # 64 positions of each session that is opened: so the loop is in C.
    cursor.positions = list(_POSITION.iter_unpack(payload[at:end]))
    if cursor.positions and max(cursor.positions)[0] >= partitions:
        raise ValueError(f"a cursor with a position in partition {max(cursor.positions)[0]}")
    at = end
    for _ in range(entry_count):
        packet_id, state, qos, source, partition, offset = _ENTRY.unpack_from(payload, at)
        at += _ENTRY.size
        if state == FREE and packet_id == 0:
            cursor.is_move = True
        elif state == FREE:
            cursor.inflight.append((packet_id, None))
        elif partition >= partitions:
            raise ValueError(f"a cursor with a record of partition {partition}")
        elif state == DONE:
            cursor.done.append((partition, offset))
        else:
            entry = Inflight(partition, offset, qos, source == RETAINED)
            if source >= TAG_MIN:
                entry.group_tag = source
            entry.state = state
            entry.logged = True
            cursor.inflight.append((packet_id, entry))
    return cursor


def cursor_in(record: Record, partitions: int) -> CursorState:
    """The content of a CURSOR record, as `decode_cursor`."""
    content = record.content
    if isinstance(content, CursorState):
        return content
    return decode_cursor(record.payload, partitions)


def continues(inflight: dict[int, Inflight], packet_id: int) -> bool:
    """Whether a message that is sent now with this id comes last in the sending order.

    Another node may have assigned later ids since. Counter-example: 98 and 99 are inflight, and
    messages with 71 and 72 are sent. The next node would send 71 first.
    """
    ids: dict[int, Inflight | None] = {**inflight, packet_id: None}
    return next(reversed(in_sending_order(ids))) == packet_id


def in_sending_order(inflight: dict[int, EntryT]) -> dict[int, EntryT]:
    """The entries in the order in which they were sent.

    QoS 2 ids are logged at once and QoS 1 ids later, so the log has another order. Ids are assigned
    in sequence, starting over at 1, so the oldest follows the widest gap in the circle.
    [MQTT-4.6.0-1]
    """
    ids = sorted(inflight)
    if len(ids) < 2:
        return inflight
    oldest = 0
    widest = 0
    for index, packet_id in enumerate(ids):
        gap = (packet_id - ids[index - 1]) % 65535
        if gap > widest:
            widest = gap
            oldest = index
    return {packet_id: inflight[packet_id] for packet_id in ids[oldest:] + ids[:oldest]}


def complete_inflight(session: Session) -> None:
    """Orders the recorded inflight messages of a session as they are sent again."""
    if session.inflight:
        session.inflight = in_log_order(session.inflight)
    for entry in session.inflight.values():
        entry.logged = True
    session.replaying = bool(session.inflight or session.done)


def in_log_order(inflight: dict[int, Inflight]) -> dict[int, Inflight]:
    """The entries of `in_sending_order`, those of the session's own subscriptions in the order of
    their partition. After a crash the cursor sends QoS 1 messages again under new ids, in between
    QoS 2 messages that keep theirs. So the ids do not have the order then."""
    ordered = in_sending_order(inflight)
    by_partition: dict[int, list[int]] = {}
    for packet_id, entry in ordered.items():
        if not entry.is_retained and not entry.group_tag:
            by_partition.setdefault(entry.partition, []).append(packet_id)
    sorted_ids = {
        partition: iter(sorted(ids, key=lambda each: inflight[each].offset))
        for partition, ids in by_partition.items()
    }
    result: dict[int, Inflight] = {}
    for packet_id, entry in ordered.items():
        if not entry.is_retained and not entry.group_tag:
            packet_id = next(sorted_ids[entry.partition])
        result[packet_id] = inflight[packet_id]
    return result
