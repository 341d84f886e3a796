"""The codec of GROUP frames, between the coordinator of a group and the nodes with group members.

- TELL (node to coordinator, JSON): all that the node has of all groups of some home partitions.
- HEARD (back, JSON): the coordinator has taken the TELL.
- REPORT (node to coordinator, packed): the changes of one group since then.
- ASSIGN (coordinator to node, packed): records for group members.
- ASK (coordinator to node, JSON): the coordinator requests a TELL.

A frame begins with one byte, its operation. All decoders raise `BadFrame` when it is malformed.
"""

import struct
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct, json
from msgspec import field as json_field

from holdfast.broker.session.message import Message, stored_message
from holdfast.cluster.frame_kinds import BadFrame, decode_json
from holdfast.storage import record as log_record
from holdfast.storage.batch import Batch, CorruptBatch
from holdfast.storage.batch_builder import BatchBuilder
from holdfast.storage.record import Record

TELL: Final = 1
HEARD: Final = 2
REPORT: Final = 3
ASSIGN: Final = 4
ASK: Final = 5

Place = tuple[int, int]
"""The partition and the offset of a record."""


class NodeCapacity(Struct):
    """The capacity and the records of one node in one group.

    `durable`: the number of members whose sessions outlive their connections. `limit`: the most
    records that the node wants at a time. `start`: the position at which the group begins if the
    log has none.
    """

    key: str
    members: int
    durable: int
    limit: int
    assigned: list[Place] = json_field(name="held", default_factory=list)
    finished: list[Place] = []
    start: list[int] | None = None


class FullReport(Struct):
    """A TELL frame. `homes`: (partition, epoch of its leader) of each home partition that it
    covers."""

    number: int
    homes: list[tuple[int, int]]
    capacities: list[NodeCapacity] = json_field(name="groups")


class _Heard(Struct):
    number: int
    homes: list[tuple[int, int]]


class _Ask(Struct):
    homes: list[tuple[int, int]]


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


_TELL: Final = json.Decoder(FullReport)
_HEARD: Final = json.Decoder(_Heard)
_ASK: Final = json.Decoder(_Ask)


def encode_full_report(tell: FullReport) -> bytes:
    return bytes((TELL,)) + json.encode(tell)


def decode_full_report(payload: bytes) -> FullReport:
    return decode_json(_TELL, payload[1:], "a TELL")


def encode_report_ack(number: int, homes: list[tuple[int, int]]) -> bytes:
    return bytes((HEARD,)) + json.encode(_Heard(number, homes))


def decode_report_ack(payload: bytes) -> tuple[int, list[tuple[int, int]]]:
    """The number and the homes of a HEARD frame."""
    heard = decode_json(_HEARD, payload[1:], "a HEARD")
    return heard.number, heard.homes


def encode_report_request(homes: list[tuple[int, int]]) -> bytes:
    return bytes((ASK,)) + json.encode(_Ask(homes))


def decode_report_request(payload: bytes) -> list[tuple[int, int]]:
    """The homes of an ASK frame."""
    return decode_json(_ASK, payload[1:], "an ASK").homes
