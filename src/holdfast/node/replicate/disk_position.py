"""Tracks the progress of a node's disk, and the other nodes' memory of it.

A DiskPosition has a node's Raft term, its last committed and durable metadata entry, its count of
committed and durable records, and its count of all records that were ever durable. No part but the
third falls while the node keeps its disk. The third counts the records that are stored there, and
falls when a partition is forgotten. So a node that connects with less than another has received of
it runs on an older copy of its disk: a backup, or a snapshot of its machine. It must not continue
as if it had everything that it acknowledged. Smallest counter-example: A and C commit entry 5, B is
slow. C is put back to entry 4, A stops. B and C elect B, and another entry 5 is committed.

The count of committed records alone is not enough. A node that starts does not know which of its
records are committed, so it claims all of them. Smallest counter-example: a copy has an uncommitted
record of partition 0, which is cut off later, and lacks a committed record of partition 1. A record
that is cut off stays in the count of those that were durable, and so does one that is forgotten. So
the third part is compared only for a node without the last one.

The next heartbeat after a change carries the position. The handshake carries it too, and compares
it. A node stores the positions that it remembers once a second (`DiskMemory.encode`).
Counter-example without the file: all nodes are killed, and the disk of n1 is put back to a copy.
Nobody remembers more of it, and n1 is a majority with a node that was behind.

Records that an operator has given up are not missed. A cluster that goes on without records has a
new generation of its log (`metadata.generation`), and the handshake names it. A position that was
received in an earlier generation than the claimed one says nothing. Counter-example without it: n3
is down while n1 is restored and accepted. It returns, and n1, on which the cluster runs, has an
older copy for it.

The frame POSITION has u64, big-endian: the sender's wall clock, the clock
that it uses (both in us, see `failure.cluster_clock`), term, index, records, and, unless nothing
follows and it is 0, written. If the sender may be incomplete in partitions
(`partitions.incomplete`), their number and each follow, as u32. Bytes after that belong to later
versions.
"""

import json
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Final
from zlib import crc32

from msgspec import Struct
from msgspec.structs import replace

from holdfast.log.files.json_object import decode_object
from holdfast.log.files.layout import FORMER_MAX
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.metadata.model import PARTITIONS_MAX

FEATURE: Final = "position"
"""The feature in the handshake of a node that understands the frame POSITION."""
_FRAME: Final = struct.Struct(">QQQQQ")
_WRITTEN: Final = struct.Struct(">Q")
_NUMBER: Final = struct.Struct(">I")


class DiskPosition(Struct, frozen=True):
    """The progress of one disk. Each part but `records` only grows as long as the disk is the
    same."""

    term: int = 0
    index: int = 0
    """The last durable and committed entry of the metadata's Raft log."""
    records: int = 0
    """The durable and committed records of all partitions together."""
    written: int = 0
    """The records that were ever durable on this disk, also those that were cut off, and the resets
    of partitions. With durability "memory" a power cut may take some, and those are not counted
    before they are synced. 0: an older version with that durability."""
    generation: int = 0
    """The generation of the log. Of a claim: the newest one that the node knows. Of a remembered
    position: the newest one that this node knew then."""

    def text(self) -> str:
        text = f"{self.term}.{self.index}.{self.records}.{self.written}"
        return f"{text}.{self.generation}" if self.generation else text

    def reached(self, other: "DiskPosition") -> "DiskPosition":
        """The larger value of each part, in this generation."""
        return DiskPosition(
            max(self.term, other.term),
            max(self.index, other.index),
            max(self.records, other.records),
            max(self.written, other.written),
            self.generation,
        )

    def lacks(self, other: "DiskPosition") -> str:
        """The loss against an earlier position, as text for people; "" if there is none."""
        is_counted = self.written > 0 and other.written > 0
        if self.records < other.records and not is_counted:
            return f"{other.records - self.records} of {other.records} committed records"
        if self.index < other.index:
            return f"changes {self.index + 1} to {other.index} of the metadata"
        if self.term < other.term:
            return f"its votes since term {self.term}"
        if is_counted and self.written < other.written:
            return f"{other.written - self.written} of {other.written} records that were on it"
        return ""


def decode_position(text: str) -> DiskPosition | None:
    """The position in a handshake, or None if it cannot be compared."""
    parts = text.split(".")
    if len(parts) not in (3, 4, 5) or not all(
        part.isdecimal() and len(part) < 21 for part in parts
    ):
        return None
    return DiskPosition(*map(int, parts))


def encode_report(
    wall_us: int, agreed_us: int, position: DiskPosition, incomplete: Collection[int] = ()
) -> bytes:
    clocks = (max(wall_us, 0), max(agreed_us, 0))
    frame = _FRAME.pack(*clocks, position.term, position.index, position.records)
    if position.written or incomplete:
        frame += _WRITTEN.pack(position.written)
    if incomplete:
        frame += b"".join(map(_NUMBER.pack, (len(incomplete), *sorted(incomplete))))
    return frame


def decode_report(payload: bytes) -> tuple[int, int, DiskPosition, frozenset[int]]:
    """The wall clock, the clock that the sender uses, its position, and the partitions in which it
    may be incomplete.

    Raises `BadFrame` if the payload is too short.
    """
    if len(payload) < _FRAME.size:
        raise BadFrame(f"a position of {len(payload)} bytes, at least {_FRAME.size} are needed")
    wall_us, agreed_us, term, index, records = _FRAME.unpack_from(payload)
    start = _FRAME.size + _WRITTEN.size
    written = _WRITTEN.unpack_from(payload, _FRAME.size)[0] if len(payload) >= start else 0
    incomplete: frozenset[int] = frozenset()
    if len(payload) >= start + _NUMBER.size:
        (count,) = _NUMBER.unpack_from(payload, start)
        start += _NUMBER.size
        numbers = payload[start : start + count * _NUMBER.size]
        if count > PARTITIONS_MAX or len(numbers) < count * _NUMBER.size:
            raise BadFrame(f"a position of {len(payload)} bytes with {count} partitions")
        incomplete = frozenset(number for (number,) in _NUMBER.iter_unpack(numbers))
    return wall_us, agreed_us, DiskPosition(term, index, records, written), incomplete


Known = Mapping[str, tuple[str, DiskPosition]]
"""The incarnation and the furthest received position of each node."""


class DiskMemory:
    """The furthest positions that this node has received of the others, and the generations of the
    log that it knows, oldest first. The first one is 0, that of a new log."""

    def __init__(self) -> None:
        self.positions: dict[str, tuple[str, DiskPosition]] = {}
        self.generations = [0]

    @property
    def generation(self) -> int:
        """The newest generation that this node knows."""
        return self.generations[-1]

    def begin_generation(self, number: int) -> None:
        """Notes the generation in the metadata."""
        if number not in self.generations:
            self.generations = [0, *self.generations[1:][-FORMER_MAX:], number]

    def note(self, node: str, incarnation: str, position: DiskPosition) -> None:
        """Remembers a position. Under another incarnation or generation it replaces the old one."""
        position = replace(position, generation=self.generation)
        before = self.positions.get(node)
        if before is not None:
            if before == (incarnation, position):
                return
            if before[0] == incarnation and before[1].generation == self.generation:
                position = position.reached(before[1])
        self.positions[node] = (incarnation, position)

    def forget(self, nodes: frozenset[str]) -> None:
        """Drops every node except these."""
        for node in self.positions.keys() - nodes:
            del self.positions[node]

    def encode(self) -> bytes:
        """The content of the file: a JSON object, and its checksum in a second line. A damaged file
        could name a position that no disk had."""
        nodes = {node: [name, each.text()] for node, (name, each) in self.positions.items()}
        body = json.dumps({"nodes": nodes, "generations": self.generations}).encode()
        return b"%s\n%08x\n" % (body, crc32(body))

    def load(self, data: bytes) -> bool:
        """Takes the content of the file. Returns False, and takes nothing, if it is damaged."""
        body, _, checksum = data.rstrip(b"\n").rpartition(b"\n")
        try:
            if int(checksum, 16) != crc32(body):
                return False
            found = decode_object(body)
            generations = [int(number) for number in found["generations"]]
            positions: dict[str, tuple[str, DiskPosition]] = {}
            for node, (incarnation, text) in found["nodes"].items():
                position = decode_position(text)
                if position is not None:
                    positions[node] = (incarnation, position)
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        if generations[:1] != [0]:
            return False
        self.positions, self.generations = positions, generations
        return True


def find_loss(
    known: Known,
    node: str,
    incarnation: str,
    claimed: str,
    generations: Sequence[int] = (0,),
) -> str:
    """The loss of a node that connects, as text; "" if there is none. `known` dates from when
    the connection was opened. `claimed` must be later, or a node that just made progress would seem
    to lack it. `generations`: those that this node knows."""
    before = known.get(node)
    position = decode_position(claimed)
    if before is None or before[0] != incarnation or position is None:
        return ""
    ages = {number: age for age, number in enumerate(generations)}
    age = ages.get(position.generation, len(ages))
    if age > ages.get(before[1].generation, 0):
        return ""
    return position.lacks(before[1])
