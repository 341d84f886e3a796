"""How far what is on a node's disk has got, and what the other nodes remember of it.

No part of a DiskPosition falls as long as the node keeps its disk: its Raft term, the last of the
metadata's entries that is committed and durable there, and the number of committed records that
are durable there. So a node that connects with less than another one has received of it runs on an
older copy of its disk: a backup, a snapshot of its machine. It must not go on as if it had what it
had acknowledged. Smallest counter-example: A and C commit entry 5, B is slow. C is put back to
entry 4, A stops. B and C elect B, and another entry 5 is committed.

The positions are sent with each heartbeat, and in the handshake, which is where they are compared.
A node remembers them while it runs. The frame POSITION: u64 each of the sender's wall clock, the
clock that it goes by (both in us, see cluster_clock), term, index, records; big-endian. What
follows is for later versions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Final

from holdfast.cluster.frame_kinds import BadFrame

FEATURE: Final = "position"
"""In the features that a node names in the handshake: it understands the frame POSITION."""
_FRAME: Final = Struct(">QQQQQ")


@dataclass(frozen=True, slots=True)
class DiskPosition:
    term: int = 0
    index: int = 0
    """Of the metadata's Raft."""
    records: int = 0
    """Of all partitions together."""

    def text(self) -> str:
        return f"{self.term}.{self.index}.{self.records}"

    def reached(self, other: "DiskPosition") -> "DiskPosition":
        """The larger of each."""
        return DiskPosition(
            max(self.term, other.term),
            max(self.index, other.index),
            max(self.records, other.records),
        )

    def lacks(self, other: "DiskPosition") -> str:
        """What there was once, for people; "": nothing."""
        if self.records < other.records:
            return f"{other.records - self.records} of {other.records} committed records"
        if self.index < other.index:
            return f"changes {self.index + 1} to {other.index} of the metadata"
        if self.term < other.term:
            return f"its votes since term {self.term}"
        return ""


def decode_position(text: str) -> DiskPosition | None:
    """None: the peer claims nothing that can be compared."""
    parts = text.split(".")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) < 21 for part in parts):
        return None
    return DiskPosition(int(parts[0]), int(parts[1]), int(parts[2]))


def encode_report(wall_us: int, agreed_us: int, position: DiskPosition) -> bytes:
    clocks = (max(wall_us, 0), max(agreed_us, 0))
    return _FRAME.pack(*clocks, position.term, position.index, position.records)


def decode_report(payload: bytes) -> tuple[int, int, DiskPosition]:
    """(wall clock, the clock that the sender goes by, position). Raises BadFrame."""
    if len(payload) < _FRAME.size:
        raise BadFrame(f"a position of {len(payload)} bytes, at least {_FRAME.size} are needed")
    wall_us, agreed_us, term, index, records = _FRAME.unpack_from(payload)
    return wall_us, agreed_us, DiskPosition(term, index, records)


Known = Mapping[str, tuple[str, DiskPosition]]
"""By node its incarnation and the furthest that was received of it."""


class DiskMemory:
    """What this node has received of the others since it started."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, DiskPosition]] = {}

    def note(self, node: str, incarnation: str, position: DiskPosition) -> None:
        before = self.known.get(node)
        if before is not None and before[0] == incarnation:
            position = position.reached(before[1])
        self.known[node] = (incarnation, position)

    def forget(self, nodes: frozenset[str]) -> None:
        """All but these."""
        for node in self.known.keys() - nodes:
            del self.known[node]


def lost_since(known: Known, node: str, incarnation: str, claimed: str) -> str:
    """What a node that connects had, by what was known when the connection was opened, and claims
    to have no more; "": nothing. `claimed` must have been written later than `known`."""
    before = known.get(node)
    position = decode_position(claimed)
    if before is None or before[0] != incarnation or position is None:
        return ""
    return position.lacks(before[1])
