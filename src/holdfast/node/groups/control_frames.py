"""Operations of GROUP frames, and the frames in JSON: TELL, HEARD and ASK.

A frame begins with one byte, its operation. All decoders raise `BadFrame` when it is malformed.
"""

from typing import Final

from msgspec import Struct, field, json

from holdfast.node.frame_kinds import decode_json

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
    assigned: list[Place] = field(name="held", default_factory=list)
    finished: list[Place] = []
    start: list[int] | None = None


class FullReport(Struct):
    """A TELL frame. `homes`: (partition, epoch of its leader) of each home partition that it
    covers."""

    number: int
    homes: list[tuple[int, int]]
    capacities: list[NodeCapacity] = field(name="groups")


class _Heard(Struct):
    number: int
    homes: list[tuple[int, int]]


class _Ask(Struct):
    homes: list[tuple[int, int]]


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
