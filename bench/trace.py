"""What a client process saw, one fixed-size entry at a time, for another process to follow.

An entry is written with one system call, so a reader never sees half of one, and what was
written survives the writer. Times are CLOCK_MONOTONIC, the same for all processes of a machine.
"""

import os
import struct
import time
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

_ENTRY: Final = struct.Struct("<BQQ")


class Event(IntEnum):
    SENT = 1
    """Handed to the client library."""
    CONFIRMED = 2
    """The library says that the broker has it."""
    DELIVERED = 3
    REDELIVERED = 4
    """Delivered with the DUP flag: the broker says that it may have sent it before."""
    SUBSCRIBED = 5
    """The sequence is 0."""
    FAILED = 6
    """The library gave the message up."""


class Entry(NamedTuple):
    event: Event
    sequence: int
    at_s: float
    """As time.monotonic()."""


class TraceWriter:
    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: Event, sequence: int) -> None:
        os.write(self._descriptor, _ENTRY.pack(event, sequence, time.monotonic_ns()))

    def close(self) -> None:
        os.close(self._descriptor)


class TraceReader:
    """Follows a trace that may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self.entries: list[Entry] = []
        """All that was read so far, in the order in which it was written."""

    def read(self) -> list[Entry]:
        """What has been written since the last call; it is in `entries` too."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = len(data) // _ENTRY.size * _ENTRY.size
        self._at += whole
        fresh = [
            Entry(Event(event), sequence, at_ns / 1e9)
            for event, sequence, at_ns in _ENTRY.iter_unpack(data[:whole])
        ]
        self.entries += fresh
        return fresh
