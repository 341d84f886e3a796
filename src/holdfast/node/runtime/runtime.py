"""Runs a node's turn: carries out, in order, the results of one iteration of the event loop.

The driver owns the sockets, the threads and the clock. It calls `begin` before it hands anything to
the node, and `turn` once per iteration. The ports below are all that a turn needs of the driver, so
a simulator that implements them runs the same turns.

| step | why it is where it is |
|---|---|
| 1. due timers | They append records, and those belong in this turn's write group. |
| 2. `_advance` | In a cluster: what has arrived is applied. It appends records, too. |
| 3. write group | The disk works while steps 4 and 5 use the processor. |
| 4. effects and writes to clients | Until none is left, because an effect may cause others: input that goes on is answered in the same turn. |
| 5. `_advance`, write group | Step 4 has appended records. Without this step they would wait for the next event. |
| 6. `_finish` | In a cluster: frames leave last, so one frame has what all steps before it queued. |
"""  # noqa: E501

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from holdfast.log.journal.group_commit_delay import CommitPace, JournalWaits
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.reading.cursor import ReadResult
from holdfast.log.reading.starts import FoundStart
from holdfast.log.record import Record
from holdfast.node.delivery.subscribe import handle_starts
from holdfast.node.effects import Effect, FetchInflight, FindStarts, ReadLog
from holdfast.node.node import Node
from holdfast.node.node_state import NodeState
from holdfast.node.session.connection import Connection
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.snapshot_entries import snapshot_entries

GATHERED_BYTES = 1 << 20
"""The pending bytes that are written at once, though records gather."""


class JournalPort(Protocol):
    """The writer of the journal's groups, one at a time."""

    @property
    def is_full(self) -> bool:
        """Whether a group waits for space."""

    @property
    def free_bytes(self) -> int:
        """The free bytes after the last group."""

    def submit(self, group: WriteGroup) -> None:
        """Writes the group, then calls `Runtime.group_written`."""

    def space(self) -> int:
        """Returns the bytes that may still be written now."""


class ClientPort(Protocol):
    """The event loop with the clients' sockets."""

    def touch(self) -> None:
        """Calls `Runtime.begin` and schedules a turn, unless one is scheduled."""

    def flush(self, dirty: list[Connection]) -> None:
        """Writes the output of each of these connections to its socket."""

    def carry_out(self, effect: Effect) -> None:
        """Carries out an effect that is not a read."""


Found = list[tuple[int, Record | None]]


class ReadPort(Protocol):
    """The reader of the log, which works in the order of the requests. It touches the node before
    it passes a result to `done`."""

    def read_log(self, effect: ReadLog, done: Callable[[ReadLog, ReadResult], None]) -> None:
        """Reads the records that `effect` asks for."""

    def fetch(self, effect: FetchInflight, done: Callable[[FetchInflight, Found], None]) -> None:
        """Reads the records of unfinished deliveries."""

    def find_starts(
        self, effect: FindStarts, done: Callable[[FindStarts, list[FoundStart]], None]
    ) -> None:
        """Finds the offsets at which subscriptions begin."""


class Runtime:
    """The turns of a single node."""

    def __init__(
        self,
        node: Node,
        journal: JournalPort,
        reader: ReadPort,
        clients: ClientPort,
        waits: JournalWaits | None = None,
    ) -> None:
        """`waits`: None: records wait for no others."""
        self.node = node
        self.state: NodeState = node.state
        self.writer = journal
        self.reader = reader
        self.clients = clients
        self.group_in_flight = False
        self.group_began_at = 0.0
        # The times of the oldest record in the group in flight, and in the next one; 0.0: none.
        self._group_oldest_at = 0.0
        self._oldest_at = 0.0
        self.reserve_bytes = 0
        """The free bytes below which publishes of QoS 1 and 2 are refused."""
        self.believes_disk = True
        """False after damage: a read may lack records, so its result must not reach any client."""
        # Each is called once, when a group was written or there is none to write.
        self._idle_waiters: list[Callable[[], None]] = []
        # Reads of records that are not in the file yet.
        self.deferred: list[Effect] = []
        waits = waits or JournalWaits()
        self._pace = CommitPace(waits.durable_s) if waits.durable_s else None
        # The time at which the records that gather are written.
        self._flush_at: float | None = None

    # The turn

    def begin(self, now: float, wall_us: int) -> None:
        """Sets the clocks: monotonic in seconds, and the wall clock in microseconds."""
        self.node.tick(now, wall_us)

    def turn(self) -> None:
        """Carries out the iteration's work. The module says why the steps have this order."""
        state = self.state
        state.stats.durations.takes_delivery = True
        when = self.node.timer()
        if when is not None and when <= state.now:
            self.node.handle_timers()
        self._advance()
        flush_at = self._flush_at
        self.write_journal(flush_at is not None and flush_at <= state.now)
        while state.effects or state.dirty:
            effects = state.effects
            if effects:
                state.effects = []
                for effect in effects:
                    self._carry_out(effect)
            dirty = state.dirty
            if dirty:
                state.dirty = []
                self.clients.flush(dirty)
        self._advance()
        self.write_journal(False)
        self._finish()

    def _advance(self) -> None:
        """Advances what a cluster adds to the node."""

    def _finish(self) -> None:
        """Finishes the turn after all effects and writes."""

    def timer(self) -> float | None:
        """The time of the next turn if nothing arrives before, or None."""
        when = self.node.timer()
        flush_at = self._flush_at
        return flush_at if flush_at is not None and (when is None or flush_at < when) else when

    # The journal

    def write_journal(self, at_once: bool) -> None:
        """Hands the pending records to the writer if it is free; later ones form the next group.
        They may gather before, unless `at_once`, for some time or up to 1 MiB."""
        state = self.state
        journal = state.journal
        if not self._oldest_at and journal.pending_bytes:
            self._oldest_at = state.now
        if self.group_in_flight:
            return
        if not at_once and self._pace is not None and self._gathers(self._pace):
            return
        self._flush_at = None
        group = journal.close_write_group()
        if group is None:
            self._wake_waiters()
            return
        self.group_in_flight = True
        self.group_began_at = state.now
        self._group_oldest_at, self._oldest_at = self._oldest_at, 0.0
        self._group_taken(group)
        self.writer.submit(group)

    def _gathers(self, pace: CommitPace) -> bool:
        """Whether the pending records wait for others before they are committed."""
        state = self.state
        pending_bytes = state.journal.pending_bytes
        if not pending_bytes or pending_bytes >= GATHERED_BYTES:
            return False
        if self._flush_at is None:
            wait_s = pace.wait_s(state.now, state.journal.sequence)
            if wait_s == 0.0:
                return False
            self._flush_at = state.now + wait_s
        return state.now < self._flush_at

    def _group_taken(self, group: WriteGroup) -> None:
        """Notes that the writer receives the group."""

    def group_written(self, group: WriteGroup) -> None:
        """Commits a group that is in the file, and on disk unless durability is "memory"."""
        self.group_in_flight = False
        self.clients.touch()
        state = self.state
        if self.writer.free_bytes < self.reserve_bytes:
            self.refuse_publishes()
        state.journal.wrote(group)
        state.journal.commit(group)
        state.resume_inputs()
        state.effects.extend(self.deferred)
        self.deferred.clear()
        self._wake_waiters()

    def when_written(self, done: Callable[[], None]) -> None:
        """Calls `done` once everything appended so far is written."""
        journal = self.state.journal
        target = journal.sequence

        def check() -> None:
            is_idle = not self.group_in_flight and not journal.pending_bytes
            if is_idle or journal.committed_sequence >= target:
                done()
            else:
                self._idle_waiters.append(check)
                self.write_journal(True)

        check()

    def _wake_waiters(self) -> None:
        waiters = self._idle_waiters
        if waiters:
            self._idle_waiters = []
            for check in waiters:
                check()

    def waits_s(self, now: float) -> float:
        """Returns the age in seconds of the oldest waiting promise, 0.0 without one."""
        return now - self.group_began_at if self.group_in_flight else 0.0

    # Free space

    def writer_full(self) -> None:
        """Refuses publishes: the group in flight, and every promise behind it, waits for space."""
        self.clients.touch()
        self.state.is_reserve_low = True
        self.refuse_publishes()

    def check_space(self, free_bytes: int) -> None:
        """Refuses QoS 1 and 2 before the disk is full; accepts them with a quarter more room."""
        reserve = self.reserve_bytes
        self.state.is_reserve_low = self.writer.is_full or free_bytes < reserve // 2
        if free_bytes < reserve:
            self.refuse_publishes()
        elif free_bytes > reserve + reserve // 4 and not self.writer.is_full:
            self.accept_publishes()

    def refuse_publishes(self) -> None:
        """Refuses publishes of QoS 1 and 2, for lack of space."""
        state = self.state
        if not state.disk_full:
            self.clients.touch()
            state.disk_full = True
            fields: dict[str, object] = {
                "free_bytes": self.writer.free_bytes, "reserve_bytes": self.reserve_bytes
            }  # fmt: skip
            state.note("error", "disk_full", fields)
            self._space_changed(is_full=True)

    def accept_publishes(self) -> None:
        """Accepts publishes again, because there is space."""
        state = self.state
        if state.disk_full:
            self.clients.touch()
            state.disk_full = False
            state.note("warning", "disk_has_space", {"free_bytes": self.writer.space()})
            self._space_changed(is_full=False)

    def _space_changed(self, *, is_full: bool) -> None:
        """Notes that publishes are refused, or accepted again."""

    # Effects

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, ReadLog):
            self._read_log(effect)
        elif isinstance(effect, FetchInflight):
            self._fetch(effect)
        elif isinstance(effect, FindStarts):
            self._find_starts(effect)
        else:
            self.clients.carry_out(effect)

    def _read_log(self, effect: ReadLog) -> None:
        """Reads now, or after the next group if the file lacks some of the records."""
        if self._is_written(effect.limits):
            self.reader.read_log(effect, self._log_read)
        else:
            self._defer(effect)

    def _find_starts(self, effect: FindStarts) -> None:
        """Searches now, or after the next group if the file lacks some of the records."""
        if self._is_written(effect.limits):
            self.reader.find_starts(effect, partial(handle_starts, self.state))
        else:
            self._defer(effect)

    def _is_written(self, limits: list[int]) -> bool:
        written = self.state.journal.written
        return all(limit <= written[partition] for partition, limit in enumerate(limits))

    def _fetch(self, effect: FetchInflight) -> None:
        """Reads now, or after the next group if the file lacks some of the records."""
        written = self.state.journal.written
        for _, partition, offset in effect.wanted:
            if offset >= written[partition]:
                self._defer(effect)
                return
        self.reader.fetch(effect, self._fetched)

    def _defer(self, effect: Effect) -> None:
        """Waits for the next group, because the file lacks some of the records."""
        self.deferred.append(effect)
        self.write_journal(True)

    def _log_read(self, effect: ReadLog, result: ReadResult) -> None:
        if self.believes_disk:
            self.node.handle_read(
                effect, result.records, result.positions, result.done, result.lost
            )

    def _fetched(self, effect: FetchInflight, found: Found) -> None:
        if self.believes_disk:
            self.node.handle_fetched(effect, found)

    # Snapshots

    def recorded_state(self) -> RecordedState:
        """Returns the state that the log's committed records define."""
        return self.state

    def begin_snapshot(self) -> tuple[list[int], Iterator[tuple[int, bytes]]]:
        """Returns the offsets at which replay begins after a snapshot begun now, and its entries:
        see `recovery.snapshot_entries`."""
        # Later records are not in the state yet (`NodeState.promise`), so they are replayed.
        return list(self.state.journal.high_watermark), snapshot_entries(self.state)
