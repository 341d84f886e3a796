"""The codec of GROUP frames, between the coordinator of a group and the nodes with group members.

- TELL (node to coordinator, JSON): all that the node has of all groups of some home partitions.
- HEARD (back, JSON): the coordinator has taken the TELL.
- REPORT (node to coordinator, packed): the changes of one group since then.
- ASSIGN (coordinator to node, packed): records for group members.
- ASK (coordinator to node, JSON): the coordinator requests a TELL.

A place is the (partition, offset) of a record.
"""

import json
import struct
from dataclasses import dataclass, field
from typing import Final

from holdfast.broker.session.message import Message
from holdfast.cluster.context import fields_of, number_of, text_of
from holdfast.cluster.frame_kinds import BadFrame
from holdfast.protocol.mqtt.properties import expiry_of
from holdfast.storage import record as log_record
from holdfast.storage.record import Batch, BatchBuilder, CorruptBatch, Record

Place = tuple[int, int]

TELL: Final = 1
HEARD: Final = 2
REPORT: Final = 3
ASSIGN: Final = 4
ASK: Final = 5

_PLACE: Final = struct.Struct("<HQ")
# operation, home, epoch, number, key length, members, durable, limit, done, returned, start
_REPORT: Final = struct.Struct("<BHIQHIIIIII")
# At the end of a report; older versions neither write nor read it: changed, denied
_RIGHTS: Final = struct.Struct("<BI")
# operation, home, epoch, number, key length, records
_ASSIGN: Final = struct.Struct("<BHIQHI")


@dataclass
class NodeCapacity:
    """The capacity and the records of one node in one group.

    `durable`: the number of members whose sessions outlive their connections. `limit`: the most
    records that the node wants at a time. `start`: the position at which the group begins if the
    log has none.
    """

    key: str
    members: int
    durable: int
    limit: int
    held: list[Place] = field(default_factory=list)
    finished: list[Place] = field(default_factory=list)
    start: list[int] | None = None


@dataclass
class Tell:
    """A TELL frame. `homes`: (partition, epoch of its leader) of each home partition that it
    covers."""

    number: int
    homes: list[tuple[int, int]]
    stocks: list[NodeCapacity]


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


def encode_tell(tell: Tell) -> bytes:
    stocks = [
        {
            "key": stock.key,
            "members": stock.members,
            "durable": stock.durable,
            "limit": stock.limit,
            "held": stock.held,
            "finished": stock.finished,
            "start": stock.start,
        }
        for stock in tell.stocks
    ]
    fields = {"number": tell.number, "homes": tell.homes, "groups": stocks}
    return bytes((TELL,)) + json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def decode_tell(payload: bytes) -> Tell:
    """Decodes a TELL frame. Raises BadFrame when it is malformed, as all decoders here do."""
    fields = fields_of(payload[1:], "number", "homes", "groups")
    groups = fields["groups"]
    if not isinstance(groups, list):
        raise BadFrame("groups are no list")
    stocks: list[NodeCapacity] = []
    for group in groups:
        if not isinstance(group, dict):
            raise BadFrame("a group is no object")
        try:
            start = group["start"]
            stocks.append(
                NodeCapacity(
                    text_of(group, "key"),
                    number_of(group, "members"),
                    number_of(group, "durable"),
                    number_of(group, "limit"),
                    _pairs(group["held"]),
                    _pairs(group["finished"]),
                    None if start is None else [int(offset) for offset in start],
                )
            )
        except (KeyError, ValueError, TypeError) as error:
            raise BadFrame(f"a group: {error!r}") from None
    return Tell(number_of(fields, "number"), _pairs(fields["homes"]), stocks)


def _pairs(value: object) -> list[tuple[int, int]]:
    if not isinstance(value, list):
        raise BadFrame("pairs are no list")
    try:
        return [(int(first), int(second)) for first, second in value]
    except (ValueError, TypeError) as error:
        raise BadFrame(f"pairs: {error}") from None


def encode_heard(number: int, homes: list[tuple[int, int]]) -> bytes:
    return bytes((HEARD,)) + json.dumps({"number": number, "homes": homes}).encode()


def decode_heard(payload: bytes) -> tuple[int, list[tuple[int, int]]]:
    """Decodes a HEARD frame into its number and homes. Raises BadFrame when it is malformed."""
    fields = fields_of(payload[1:], "number", "homes")
    return number_of(fields, "number"), _pairs(fields["homes"])


def encode_ask(homes: list[tuple[int, int]]) -> bytes:
    return bytes((ASK,)) + json.dumps({"homes": homes}).encode()


def decode_ask(payload: bytes) -> list[tuple[int, int]]:
    """Decodes an ASK frame into its homes. Raises BadFrame when it is malformed."""
    return _pairs(fields_of(payload[1:], "homes")["homes"])


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
        message = Message(
            record.topic,
            record.payload,
            record.flags & log_record.FLAG_QOS_MASK,
            record.flags & log_record.FLAG_RETAIN != 0,
            record.properties,
            expiry_of(record.properties),
            record.sequence,
            record.client_id,
        )
        message.partition = partition
        message.offset = offset
        messages.append(message)
    return Assign(home, epoch, number, key, messages)
