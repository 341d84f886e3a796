"""Serves reads of the log for other nodes that do not store a partition.

The reads are those that this node's own sessions make, with the same reader and budgets. They are
answered from committed records alone, so the answer is the same under every later leader and needs
no epoch. A partition whose records this node does not have is refused, and the asking node tries
another replica.

Invariant: at most FETCHES_MAX reads run or wait for each asking node.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from holdfast.log.reading.cursor import ReadResult
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.reading.starts import FLOORS_BYTES_MAX, FoundStart, StartQuery, floors_bytes
from holdfast.log.record import Record
from holdfast.node.context import ClusterContext
from holdfast.node.effects import FetchInflight, FindStarts, Found, ReadLog
from holdfast.node.frame_kinds import FETCHED
from holdfast.node.node_state import NodeState
from holdfast.node.reads.fetch_frames import (
    BEHIND,
    BELOW_START,
    BUSY,
    NOT_STORED,
    OTHER_LOG,
    FetchedFrame,
    FetchFrame,
    StartEntry,
    decode_fetch,
    encode_fetched,
)
from holdfast.node.replicate.state import ReadTokens
from holdfast.node.state.transfer import Transfer

FETCHES_MAX: Final = 8
"""The most reads at a time for one asking node, which sends at most half as many. The rest is room
for those of its link before."""
RECORDS_MAX: Final = 4096
BYTES_MAX: Final = 4 << 20
"""The most records and bytes of one answer. A single larger record is an answer of its own."""


class FetchServer:
    """The reads that this node makes for others."""

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        tokens: ReadTokens,
        transfer: Transfer,
        is_stored: Callable[[int], bool],
    ) -> None:
        self._state = state
        self._context = context
        self._tokens = tokens
        self._transfer = transfer
        self._is_stored = is_stored
        # The reads of each asking node that run or wait.
        self._running: dict[str, int] = {}
        # Reads that wait for tokens.
        self._waiting: deque[tuple[str, FetchFrame]] = deque()

    def handle(self, node: str, payload: bytes) -> None:
        """Begins a read for another node. Raises `BadFrame` when the request is malformed."""
        frame = decode_fetch(payload, len(self._state.delivered))
        running = self._running.get(node, 0)
        if running >= FETCHES_MAX:
            self._refuse_all(node, frame, BUSY)
            return
        self._running[node] = running + 1
        if self._waiting or not self._tokens.may_read(self._state.now):
            self._waiting.append((node, frame))
        else:
            self._begin(node, frame)

    def timer(self) -> float | None:
        """Returns the time of the next read that waits, or None without one."""
        return self._tokens.timer() if self._waiting else None

    def advance(self, now: float) -> None:
        """Begins reads that have waited for tokens."""
        while self._waiting and self._tokens.may_read(now):
            self._begin(*self._waiting.popleft())

    def check(self) -> None:
        """Raises `AssertionError` unless the reads of each node are within their bound."""
        assert all(0 < count <= FETCHES_MAX for count in self._running.values())

    def _begin(self, node: str, frame: FetchFrame) -> None:
        if not self._transfer.may_serve:
            # The log here is damaged.
            self._finish_refused(node, frame, NOT_STORED)
        elif frame.generation != self._context.generation:
            self._finish_refused(node, frame, OTHER_LOG)
        elif frame.queries:
            self._find_starts(node, frame)
        elif frame.wanted:
            self._fetch(node, frame)
        else:
            self._read(node, frame)

    def _obstacle(self, partition: int, first: int, end: int) -> tuple[int, int, int] | None:
        """Returns why this node cannot read a partition from `first` on up to `end`, or None. An
        end that is not reached yet is an obstacle only with `first` at it."""
        start = self._state.journal.start_offsets[partition]
        if not self._is_stored(partition):
            return partition, NOT_STORED, 0
        if first < start:
            return partition, BELOW_START, start
        if first < end and first >= self._state.delivered[partition]:
            return partition, BEHIND, start
        return None

    def _read(self, node: str, frame: FetchFrame) -> None:
        positions = list(self._state.delivered)
        limits = list(positions)
        refused: list[tuple[int, int, int]] = []
        for each in frame.ranges:
            obstacle = self._obstacle(each.partition, each.start, each.end)
            if obstacle is not None:
                refused.append(obstacle)
                continue
            positions[each.partition] = each.start
            # Never above what is applied here: a later leader may not have those records.
            limits[each.partition] = min(each.end, limits[each.partition])
        starts: list[list[int] | None] = [None]
        for offsets in frame.starts:
            start = [0] * len(positions)
            for each, offset in zip(frame.ranges, offsets, strict=True):
                start[each.partition] = offset
            starts.append(start)
        effect = ReadLog(
            None,
            None,
            positions,
            limits,
            [ReadInterest(filter, starts[index + 1]) for filter, index in frame.filters],
            min(frame.records_max, RECORDS_MAX),
            min(frame.bytes_max, BYTES_MAX),
        )
        effect.done = partial(self._was_read, node, frame, refused)
        self._state.effects.append(effect)

    def _was_read(
        self,
        node: str,
        frame: FetchFrame,
        refused: list[tuple[int, int, int]],
        result: ReadResult | None,
    ) -> None:
        if result is None:
            self._finish_refused(node, frame, NOT_STORED)
            return
        names = {each[0] for each in refused}
        positions = [
            each.start if each.partition in names else result.positions[each.partition]
            for each in frame.ranges
        ]
        head = FetchedFrame(
            number=frame.number, refused=refused, positions=positions, lost=result.lost
        )
        self._finish(node, head, result.records)

    def _fetch(self, node: str, frame: FetchFrame) -> None:
        """Reads single records: the first ones, up to one that is not here."""
        wanted: list[tuple[int, int, int]] = []
        refused: list[tuple[int, int, int]] = []
        for number, (partition, offset) in enumerate(frame.wanted):
            obstacle = self._obstacle(partition, offset, offset + 1)
            if obstacle is not None:
                refused.append(obstacle)
                break
            wanted.append((number, partition, offset))
        effect = FetchInflight(None, None, wanted, min(frame.bytes_max, BYTES_MAX))
        effect.done = partial(self._was_fetched, node, frame, refused)
        self._state.effects.append(effect)

    def _was_fetched(
        self, node: str, frame: FetchFrame, refused: list[tuple[int, int, int]], found: Found | None
    ) -> None:
        if found is None:
            self._finish_refused(node, frame, NOT_STORED)
            return
        head = FetchedFrame(number=frame.number, refused=refused, looked_at=len(found))
        self._finish(node, head, [record for _, record in found if record is not None])

    def _find_starts(self, node: str, frame: FetchFrame) -> None:
        # A limit of 0 leaves a partition out.
        limits = [0] * len(self._state.delivered)
        refused: list[tuple[int, int, int]] = []
        for each in frame.ranges:
            obstacle = self._obstacle(each.partition, max(0, each.end - 1), each.end)
            if obstacle is None or obstacle[1] == BELOW_START:
                limits[each.partition] = each.end
            else:
                refused.append(obstacle)
        queries: list[StartQuery] = []
        for filter, since_us, last, asked in frame.queries:
            offsets = dict(zip((each.partition for each in frame.ranges), asked, strict=False))
            found = [offsets.get(p, 0) for p in range(len(limits))] if asked else []
            queries.append(StartQuery(filter, since_us, last, found))
        effect = FindStarts(None, None, queries, limits)
        effect.done = partial(self._were_found, node, frame, refused)
        self._state.effects.append(effect)

    def _were_found(
        self,
        node: str,
        frame: FetchFrame,
        refused: list[tuple[int, int, int]],
        found: list[FoundStart] | None,
    ) -> None:
        if found is None:
            self._finish_refused(node, frame, NOT_STORED)
            return
        entries: list[StartEntry] = []
        size_bytes = 0
        for each in found:
            size_bytes += floors_bytes(each.floors)
            error = each.error
            if size_bytes > FLOORS_BYTES_MAX and not error:
                error = f"the starts of topics need more than {FLOORS_BYTES_MAX} bytes"
            if error:
                entries.append(StartEntry([], [], error))
                continue
            offsets = [each.offsets[asked.partition] for asked in frame.ranges]
            floors = [(topic.decode(), floor) for topic, floor in each.floors.items()]
            entries.append(StartEntry(offsets, floors, "", each.size_bytes))
        head = FetchedFrame(number=frame.number, refused=refused, starts=entries)
        self._finish(node, head, [])

    def _finish_refused(self, node: str, frame: FetchFrame, reason: int) -> None:
        self._ended(node)
        self._refuse_all(node, frame, reason)

    def _refuse_all(self, node: str, frame: FetchFrame, reason: int) -> None:
        """Refuses all partitions of a request."""
        numbers = {each.partition for each in frame.ranges} | {each[0] for each in frame.wanted}
        refused = [(number, reason, 0) for number in sorted(numbers)]
        positions = [each.start for each in frame.ranges]
        head = FetchedFrame(number=frame.number, refused=refused, positions=positions)
        self._send(node, head, [])

    def _finish(self, node: str, head: FetchedFrame, records: list[Record]) -> None:
        self._ended(node)
        self._state.stats.log_fetches_served += 1
        self._send(node, head, records)

    def _send(self, node: str, head: FetchedFrame, records: list[Record]) -> None:
        for payload in encode_fetched(head, records):
            self._tokens.charge(len(payload))
            self._context.send(node, FETCHED, payload)

    def _ended(self, node: str) -> None:
        self._running[node] -= 1
        if not self._running[node]:
            del self._running[node]
