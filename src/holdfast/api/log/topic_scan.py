"""Finds the newest messages of one topic, by the log's list of each topic's messages."""

from typing import Final

from holdfast.api.views.records import LogPage, RecordQuery, encode_positions, log_record
from holdfast.log.partition import partition_of
from holdfast.log.reading.cursor import LogReader
from holdfast.log.record import Record
from holdfast.protocol.topics.names import has_wildcard

SEGMENTS_MAX: Final = 200
"""The most segments of the log whose lists one request reads."""
FETCH_RECORDS: Final = 100
"""The most messages that one step reads."""
READ_BYTES_MAX: Final = 32 << 20
"""The most bytes of payloads that one request reads."""


def is_topic(filter: str) -> bool:
    """Whether a filter is one topic."""
    return bool(filter) and not has_wildcard(filter)


class TopicScan:
    """The scan for one page, like `RecordScan`. `step` runs in a thread."""

    def __init__(self, reader: LogReader, query: RecordQuery) -> None:
        self._reader = reader
        self._query = query
        topic = query.filter.encode()
        self._partition = partition_of(topic, len(query.start))
        self._first = query.bounds[self._partition]
        start = query.start[self._partition]
        self._history = reader.starts.topic_history(topic, self._partition, start)
        self._at = 0
        self._segments = 0
        self._size_bytes = 0
        # Messages of the topic at this offset and later are in the page, or not chosen.
        self._position = start
        self._found: list[Record] = []

    def is_done(self) -> bool:
        """Whether the page is full, the log at its end, or the budget spent."""
        if len(self._found) >= self._query.limit or self._size_bytes >= READ_BYTES_MAX:
            return True
        if self._at < len(self._history.offsets):
            return self._history.offsets[self._at] < self._first
        return self._is_searched() or self._segments >= SEGMENTS_MAX

    def _is_searched(self) -> bool:
        return self._history.is_done() or self._history.searched <= self._first

    def step(self) -> None:
        """Reads some messages that are found, or searches one more segment."""
        offsets = self._history.offsets
        if self._at >= len(offsets):
            self._segments += 1
            self._history.step()
            if self._at >= len(offsets):
                self._position = max(self._first, self._history.searched)
            return
        query = self._query
        for offset in offsets[self._at : self._at + FETCH_RECORDS]:
            if offset < self._first or len(self._found) >= query.limit:
                return
            self._at += 1
            self._position = offset
            record = self._reader.fetch(self._partition, offset)
            if record is None:
                continue
            self._size_bytes += len(record.payload) + len(record.properties)
            if query.clients and record.client_id not in query.clients:
                continue
            if query.part in record.payload:
                self._found.append(record)

    def page(self) -> LogPage:
        """The page, the newest message first."""
        offsets = self._history.offsets
        has_more = self._at < len(offsets) and offsets[self._at] >= self._first
        following = ""
        if has_more or (self._at >= len(offsets) and not self._is_searched()):
            positions = list(self._query.bounds)
            positions[self._partition] = self._position
            following = encode_positions(positions, self._query.generation)
        rows = [log_record(each, self._query.bytes_max) for each in self._found]
        return LogPage(rows, following, self._at)
