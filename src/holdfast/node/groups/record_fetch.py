"""Reads records for a shared group's coordinator from the log."""

from typing import Final

from holdfast.log.reading.interest import ReadInterest
from holdfast.log.record import Record
from holdfast.node.delivery.log_replay import READ_RECORDS_MAX, message_of
from holdfast.node.delivery.transmission import READ_BYTES_MAX
from holdfast.node.effects import ReadLog
from holdfast.node.groups.control_frames import Place
from holdfast.node.node_state import NodeState
from holdfast.node.session.message import Message
from holdfast.node.session.session import Group

FETCH_SPAN: Final = 1000
"""The distance in offsets within which returned records of a partition are read together."""


def request_read(
    state: NodeState, reader: Group, filter_: str, positions: list[int], limits: list[int]
) -> None:
    """Requests a read of the records that match `filter_`, for `reader`."""
    state.stats.log_reads += 1
    interests = [ReadInterest(filter_, None)]
    effect = ReadLog(reader, None, positions, limits, interests, READ_RECORDS_MAX, READ_BYTES_MAX)
    state.effects.append(effect)


class RecordFetch:
    """The read of returned records, which have left the coordinator's memory."""

    def __init__(self, state: NodeState, name: str, filter_: str) -> None:
        self._state = state
        self._name = name
        self._filter = filter_
        self._reader: Group | None = None
        self._limits: list[int] = []
        # The records that are not read yet.
        self.places: dict[Place, None] = {}

    @property
    def is_reading(self) -> bool:
        return self._reader is not None

    def is_by(self, reader: Group) -> bool:
        """True if the result for `reader` belongs to this read."""
        return self._reader is reader

    def start(self, to_assign: dict[Place, None]) -> None:
        """Takes the first records of each partition out of `to_assign` and reads them."""
        positions = list(self._state.delivered)
        limits = list(positions)
        first: dict[int, int] = {}
        for partition, offset in sorted(to_assign):
            begin = first.setdefault(partition, offset)
            if offset < begin + FETCH_SPAN:
                del to_assign[(partition, offset)]
                self.places[(partition, offset)] = None
                positions[partition] = begin
                limits[partition] = offset + 1
        self._limits = limits
        self._reader = Group(self._name, self._filter)
        self._reader.start_read()
        request_read(self._state, self._reader, self._filter, positions, limits)

    def take(self, records: list[Record]) -> list[Message]:
        """Returns the wanted ones of the records that were read."""
        found: list[Message] = []
        for record in records:
            if self.places.pop((record.partition, record.offset), 0) is None:
                found.append(message_of(record))
        return found

    def pause(self) -> dict[Place, None]:
        """Ends the read. Returns the records that are not read."""
        self._reader = None
        places = self.places
        self.places = {}
        return places

    def finish(self, positions: list[int], done: bool) -> list[Place]:
        """Reads on, or ends the read. Returns the records that retention has deleted."""
        reader = self._reader
        if self.places and not done and reader is not None:
            request_read(self._state, reader, self._filter, positions, self._limits)
            return []
        lost = list(self.pause())
        self._state.stats.dropped_lost += len(lost)
        return lost
