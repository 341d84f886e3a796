"""Durable state of this broker's member of a federation, as committed records define it.

A value has a key. Only the federator in force changes values: the IDENTITY value has its start, and
every record has the start of the federator that appended it.

Invariant: a record of an earlier start than the newest one changes nothing. The log itself is the
fence. Counter-example: the node of the federator is cut off, and another node begins start 8. The
records of start 7 arrive later, and one of them removes a message that start 8 has taken over.

Invariant: `entries` gives the identity first. A record that is ignored over a snapshot then has its
effect in the values, which are read later.
"""

import struct
from collections.abc import Iterator
from typing import Final

from holdfast.log.partition import partition_of
from holdfast.log.record import Record
from holdfast.node.session.session import FEDERATION_KEY

IDENTITY: Final = b"identity"
"""The key of the value that a start writes first."""
_HEAD: Final = struct.Struct(">QI")


class MemberValues:
    """The values by key, and the start that may change them."""

    def __init__(self) -> None:
        self.start = 0
        self.values: dict[bytes, bytes] = {}

    def apply(self, record: Record) -> None:
        """Applies a FEDERATION record."""
        key, start = record.client_id, record.sequence
        if key == IDENTITY:
            if start <= self.start:
                return
            self.start = start
        elif start != self.start:
            return
        if record.payload:
            self.values[key] = record.payload
        else:
            self.values.pop(key, None)

    def entries(self) -> Iterator[bytes | None]:
        """Yields the entries of a snapshot, and None for a value that is gone by now."""
        for key in [IDENTITY, *[key for key in self.values if key != IDENTITY]]:
            value = self.values.get(key)
            yield None if value is None else _HEAD.pack(self.start, len(key)) + key + value

    def restore(self, data: bytes) -> None:
        """Loads an entry. Raises `struct.error` or `ValueError` for one that is none."""
        start, key_bytes = _HEAD.unpack_from(data)
        at = _HEAD.size + key_bytes
        if len(data) <= at:
            raise ValueError("a value of the federation's member without a content")
        key = data[_HEAD.size : at]
        if key == IDENTITY:
            self.start = start
        self.values[key] = data[at:]

    def clear(self) -> None:
        self.start = 0
        self.values.clear()


def member_home(partitions: int) -> int:
    """The partition of the member's records: the home of the federation's session."""
    return partition_of(FEDERATION_KEY, partitions)
