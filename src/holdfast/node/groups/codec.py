"""Encodes GROUP frames, between a group's coordinator and the nodes with members.

- TELL (node to coordinator, JSON): all that the node has of all groups of some home partitions.
- HEARD (back, JSON): the coordinator has taken the TELL.
- REPORT (node to coordinator, packed): the changes of one group since then.
- ASSIGN (coordinator to node, packed): records for group members.
- ASK (coordinator to node, JSON): the coordinator requests a TELL.

`control_frames` has the frames in JSON.
"""

import struct
from dataclasses import dataclass, field
from typing import Final

from holdfast.log import record as log_record
from holdfast.log.batch import Batch, CorruptBatch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.record import Record
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.groups.control_frames import ASSIGN, REPORT, Place
from holdfast.node.session.message import Message, stored_message

_PLACE: Final = struct.Struct("<HQ")
# operation, home, epoch, number, key length, members, durable, limit, done, returned, start
_REPORT: Final = struct.Struct("<BHIQHIIIIII")
# At the end of a report; older versions neither write nor read it: changed, denied
_RIGHTS: Final = struct.Struct("<BI")
# operation, home, epoch, number, key length, records
_ASSIGN: Final = struct.Struct("<BHIQHI")


@dataclass
class AgentReport:
    """A REPORT frame: the changes of one group at one node."""

    home: int
    epoch: int
    number: int
    key: str
    members: int
    durable: int
    limit: int
    done: list[Place]
    returned: list[Place]
    start: list[int]
    # Those of `returned` that no member at the node may read. An older version does not report
    # them.
    denied: list[Place] = field(default_factory=list)
    # True if members have joined or left since the last report. The node may then accept records
    # that it returned before.
    has_changed: bool = False


@dataclass
class Assign:
    """An ASSIGN frame: records of one group for one node."""

    home: int
    epoch: int
    number: int
    key: str
    messages: list[Message]


def encode_report(report: AgentReport) -> bytes:
    key = report.key.encode()
    head = _REPORT.pack(
        REPORT,
        report.home,
        report.epoch,
        report.number,
        len(key),
        report.members,
        report.durable,
        report.limit,
        len(report.done),
        len(report.returned),
        len(report.start),
    )
    parts = [head, key]
    for partition, offset in report.done:
        parts.append(_PLACE.pack(partition, offset))
    for partition, offset in report.returned:
        parts.append(_PLACE.pack(partition, offset))
    parts.append(struct.pack(f"<{len(report.start)}Q", *report.start))
    if report.denied or report.has_changed:
        parts.append(_RIGHTS.pack(report.has_changed, len(report.denied)))
        for partition, offset in report.denied:
            parts.append(_PLACE.pack(partition, offset))
    return b"".join(parts)


def decode_report(payload: bytes) -> AgentReport:
    """Decodes a REPORT frame. Raises BadFrame when it is malformed."""
    try:
        _, home, epoch, number, key_length, members, durable, limit, done, returned, start = (
            _REPORT.unpack_from(payload)
        )
        at = _REPORT.size
        key = payload[at : at + key_length].decode()
        at += key_length
        places = _places(payload, at, done + returned)
        at += _PLACE.size * len(places)
        positions = list(struct.unpack_from(f"<{start}Q", payload, at))
        at += 8 * start
        has_changed, denied = 0, 0
        if at < len(payload):
            has_changed, denied = _RIGHTS.unpack_from(payload, at)
        denied_places = _places(payload, at + _RIGHTS.size, denied) if denied else []
    except (struct.error, ValueError) as error:
        raise BadFrame(f"report on a group: {error}") from None
    return AgentReport(
        home,
        epoch,
        number,
        key,
        members,
        durable,
        limit,
        places[:done],
        places[done:],
        positions,
        denied_places,
        has_changed != 0,
    )


def _places(payload: bytes, at: int, count: int) -> list[Place]:
    """Decodes `count` places from offset `at`. Raises struct.error when the payload is too
    short."""
    end = at + _PLACE.size * count
    if end > len(payload):
        raise struct.error(f"{count} places are not in {len(payload)} bytes")
    return list(_PLACE.iter_unpack(payload[at:end]))


def encode_assign(assign: Assign) -> bytes:
    key = assign.key.encode()
    messages = assign.messages
    head = _ASSIGN.pack(ASSIGN, assign.home, assign.epoch, assign.number, len(key), len(messages))
    parts = [head, key]
    builder = BatchBuilder(0, 0)
    for message in messages:
        parts.append(_PLACE.pack(message.partition, message.offset))
        builder.add(
            Record(
                builder.partition,
                log_record.MESSAGE,
                flags=message.qos | (log_record.FLAG_RETAIN if message.retain else 0),
                timestamp_us=message.timestamp_us,
                topic=message.topic,
                client_id=message.publisher,
                # The timestamps of a batch are relative to its first record, and these records are
                # in any order. So the sequence contains the timestamp.
                sequence=message.timestamp_us,
                properties=message.properties,
                payload=message.payload,
            )
        )
    parts.append(builder.build(0))
    return b"".join(parts)


def decode_assign(payload: bytes) -> Assign:
    """Decodes an ASSIGN frame. Raises BadFrame when it is malformed."""
    try:
        _, home, epoch, number, key_length, count = _ASSIGN.unpack_from(payload)
        at = _ASSIGN.size
        key = payload[at : at + key_length].decode()
        at += key_length
        places = _places(payload, at, count)
        batch = Batch(payload, at + _PLACE.size * count)
    except (struct.error, ValueError, CorruptBatch) as error:
        raise BadFrame(f"records for a group: {error}") from None
    if batch.count != count:
        raise BadFrame(f"{count} places for {batch.count} records")
    messages: list[Message] = []
    for record, (partition, offset) in zip(batch.records(), places, strict=True):
        message = stored_message(record, record.flags & log_record.FLAG_QOS_MASK, record.sequence)
        message.partition = partition
        message.offset = offset
        messages.append(message)
    return Assign(home, epoch, number, key, messages)
