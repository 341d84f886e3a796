"""Finds the offsets of consumer groups, retained messages of topics that only the broker publishes.

A lake that was registered is a group whose name begins with LAKE. Retention keeps what it has not
read, within a limit of its own.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
from msgspec import Struct

from holdfast.log.journal.retention import Pin
from holdfast.node.rights import LOG_PREFIX
from holdfast.node.session.message import Message
from holdfast.protocol.topics.retained import RetainedScan, RetainedTrie

PREFIX: Final = LOG_PREFIX + "groups/"
LAKE: Final = "lake."
VISITS: Final = 256
"""The topics that one step of a scan visits."""


class StoredOffset(Struct):
    """The payload of a retained message. Its form is a promise: later versions read it."""

    offset: int
    at_us: int
    by: str


def scan_groups(
    retained: RetainedTrie[Message], name: str = ""
) -> Iterator[Iterable[tuple[str, int, StoredOffset]]]:
    """Yields the committed offsets of one group, or of all, as group, partition and offset. Each
    step is short."""
    filter = f"{PREFIX}{name}/#" if name else f"{PREFIX}#"
    scan = RetainedScan(retained, filter, True, "")
    while not scan.done:
        found = []
        for topic, message in scan.next(VISITS, VISITS):
            group, _, partition = topic.removeprefix(PREFIX).partition("/")
            try:
                stored = msgspec.json.decode(message.payload, type=StoredOffset)
                found.append((group, int(partition), stored))
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
                continue  # A client's message, from before these topics were the broker's alone.
        yield found


class LakePins:
    """The pins of the registered lakes, which a scan of the groups finds."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._positions: dict[str, list[int]] = {}

    def add(self, found: Iterable[tuple[str, int, StoredOffset]]) -> None:
        """Adds one step of a scan."""
        for group, partition, stored in found:
            if group.startswith(LAKE) and 0 <= partition < self._partitions:
                positions = self._positions.setdefault(group, [0] * self._partitions)
                positions[partition] = stored.offset

    def pins(self, bytes_max: int) -> list[Pin]:
        """Returns the pins. `bytes_max`: see `Pin`."""
        return [Pin(name, positions, bytes_max) for name, positions in self._positions.items()]
