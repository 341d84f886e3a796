"""The turns of a node: one per iteration of the event loop.

Sockets hand their bytes to the node as they arrive, and the first one schedules a turn. The turn
carries out everything that the iteration produced at once: due timers, one write group to the
journal, the node's effects, and one write per changed connection.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, TypeVar, cast

from holdfast.broker.effects import (
    CheckPassword,
    Cut,
    Effect,
    FetchInflight,
    Note,
    ReadLog,
    ResumeInput,
)
from holdfast.broker.node import Node
from holdfast.broker.recovery.recovery import snapshot_entries
from holdfast.broker.session.connection import Connection
from holdfast.broker.state import NodeState
from holdfast.security.passwords import PasswordFile
from holdfast.server.disk.journal_writer import JournalWriter, LogReadPool
from holdfast.server.disk.storage import Storage
from holdfast.server.event_loop.password_checks import PasswordChecks
from holdfast.server.sockets.transport import ClientTransport
from holdfast.storage.files.filesystem import is_scarce
from holdfast.storage.journal.segment import WriteGroup
from holdfast.storage.reading.cursor import LogReader, ReadResult
from holdfast.storage.record import Record

logger = logging.getLogger("holdfast")

T = TypeVar("T")
LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Broker:
    """Connects a `Node` to sockets, the journal's writer, the log's reader and password checks."""

    def __init__(
        self,
        node: Node,
        loop: asyncio.AbstractEventLoop,
        storage: Storage,
        password_file: PasswordFile | None,
        memory_flush_s: float,
        on_failed: Callable[[BaseException], None],
        confirm: Callable[[], None] | None = None,
    ) -> None:
        """`on_failed`: called when the journal or the log's reader failed; the node must stop.
        `confirm`: see `JournalWriter`."""
        self.node = node
        self.loop = loop
        self.reader: LogReader = storage.reader
        self.on_failed = on_failed
        # The free bytes below which publishes of QoS 1 and 2 are refused. Maintenance sets it.
        self.reserve_bytes = 0
        self.writer = JournalWriter(
            storage.directory,
            loop.call_soon_threadsafe,
            durable=not node.state.memory,
            confirm=confirm,
            on_written=self.group_written,
            on_failed=on_failed,
            on_full=self.writer_full,
            on_space=self.writer_has_space,
        )
        self.read_pool = LogReadPool(loop.call_soon_threadsafe)
        self.passwords = PasswordChecks(node, loop, self.touch, password_file)
        self.memory_flush_s = memory_flush_s
        self.turn_scheduled = False
        self.has_failed = False
        """Whether the process is about to stop. No turn runs, so no promise is resolved."""
        self.timer: asyncio.TimerHandle | None = None
        self.timer_at = 0.0
        self.group_in_flight = False
        self.group_began_at = 0.0
        self.flush_timer: asyncio.TimerHandle | None = None
        # False after damage: a read may lack records, so its result must not reach any client.
        self.believes_disk = True
        # Reads of records that are not in the file yet.
        self.deferred: list[Effect] = []
        self.nobody_left: asyncio.Future[None] | None = None
        self.idle_waiters: deque[asyncio.Future[None]] = deque()

    def set_clock(self) -> None:
        self.node.tick(self.loop.time(), time.time_ns() // 1000)

    def touch(self) -> None:
        """Set the node's clock and schedule a turn. Call it before handing anything to the node."""
        if not self.turn_scheduled:
            self.turn_scheduled = True
            self.set_clock()
            self.loop.call_soon(self.turn)

    def turn(self) -> None:
        """Carry out the iteration's work, first the write group: the disk works meanwhile."""
        self.turn_scheduled = False
        if self.has_failed:
            return
        node = self.node
        state = node.state
        when = node.timer()
        if when is not None and when <= state.now:
            node.handle_timers()
        self.advance()
        self.write_journal(False)
        while state.effects or state.dirty:
            effects = state.effects
            if effects:
                state.effects = []
                for effect in effects:
                    self.carry_out(effect)
            dirty = state.dirty
            if dirty:
                state.dirty = []
                for connection in dirty:
                    connection.dirty = False
                    transport = connection.transport
                    if transport is not None:
                        assert isinstance(transport, ClientTransport)
                        transport.flush(connection)
        self.advance()
        self.write_journal(False)
        self.finish_turn()
        when = self.next_timer()
        if when is not None and (self.timer is None or when < self.timer_at):
            if self.timer is not None:
                self.timer.cancel()
            self.timer_at = when
            self.timer = self.loop.call_at(when, self.fire)

    def advance(self) -> None:
        """Advance the parts of a turn that a subclass adds to the node."""

    def finish_turn(self) -> None:
        """Finish the turn after all effects and writes."""

    def next_timer(self) -> float | None:
        return self.node.timer()

    def recorded_state(self) -> NodeState:
        """Return the state that the log's committed records define."""
        return self.node.state

    def snapshot_offsets(self) -> list[int]:
        """Return the offsets at which replay begins after a snapshot begun now."""
        # Later records are not in the state yet (`NodeState.hold`), so they are replayed.
        return list(self.node.state.journal.high_watermark)

    def snapshot_entries(self) -> Iterator[tuple[int, bytes]]:
        """Return the entries of a snapshot: see `recovery.snapshot_entries`."""
        return snapshot_entries(self.node.state)

    def fire(self) -> None:
        self.timer = None
        self.touch()

    def write_journal(self, at_once: bool) -> None:
        """Hand the pending records to the writer if it is free; later ones form the next group.
        With durability "memory" they gather for `memory_flush_s`, or until there are 1 MiB."""
        state = self.node.state
        journal = state.journal
        if state.memory:
            journal.commit_appended()
            if not at_once and journal.pending_bytes < 1 << 20:
                if journal.pending_bytes and self.flush_timer is None:
                    self.flush_timer = self.loop.call_later(self.memory_flush_s, self.flush_due)
                return
        if self.group_in_flight:
            return
        group = journal.close_write_group()
        if group is None:
            self.wake_waiters()
            return
        self.group_in_flight = True
        self.group_began_at = state.now
        self.group_taken(group)
        self.writer.submit(group)

    def waits_s(self) -> float:
        """Return the age in seconds of the oldest waiting promise, 0.0 without one."""
        if not self.group_in_flight or self.node.state.memory:
            return 0.0
        return self.loop.time() - self.group_began_at

    def group_taken(self, group: WriteGroup) -> None:
        """Note that the writer receives the group."""

    def flush_due(self) -> None:
        self.flush_timer = None
        self.write_journal(True)

    def group_written(self, group: WriteGroup) -> None:
        """Commit a group that is in the file, and on disk unless durability is "memory"."""
        self.group_in_flight = False
        self.touch()
        state = self.node.state
        if self.writer.free_bytes < self.reserve_bytes:
            self.refuse_publishes()
        state.journal.wrote(group)
        if not state.memory:
            state.journal.commit(group)
        state.release_committed()
        state.resume_inputs()
        state.effects.extend(self.deferred)
        self.deferred.clear()
        self.wake_waiters()

    def writer_full(self) -> None:
        """Refuse publishes: the group in flight, and every promise behind it, waits for space."""
        self.touch()
        self.refuse_publishes()
        logger.error("journal_waits_for_space")

    def writer_has_space(self) -> None:
        logger.warning("journal_goes_on")

    def refuse_publishes(self) -> None:
        state = self.node.state
        if not state.disk_full:
            state.disk_full = True
            logger.error(
                "disk_full free_bytes=%d reserve_bytes=%d",
                self.writer.free_bytes,
                self.reserve_bytes,
            )

    def accept_publishes(self) -> None:
        """Accept publishes again, because there is space."""
        state = self.node.state
        if state.disk_full:
            state.disk_full = False
            logger.warning("disk_has_space free_bytes=%d", self.writer.space())

    def note_disconnected(self) -> None:
        waiter = self.nobody_left
        if waiter is not None and self.node.state.connections == 0 and not waiter.done():
            waiter.set_result(None)

    async def settle(self) -> None:
        """Read no more from clients, and acknowledge everything that was received."""
        for session in self.node.state.sessions.values():
            connection = session.connection
            if connection is not None and connection.transport is not None:
                connection.input_paused = True
                cast(ClientTransport, connection.transport).pause_reading()
        await self.drain_journal()
        self.touch()
        self.turn()

    async def wait_for_disconnects(self, timeout_s: float) -> None:
        """Wait until no connection is left, at most `timeout_s`."""
        if self.node.state.connections:
            self.nobody_left = self.loop.create_future()
            await asyncio.wait([self.nobody_left], timeout=timeout_s)

    async def drain_journal(self) -> None:
        """Wait until everything appended so far is written."""
        state = self.node.state
        journal = state.journal
        target = journal.sequence
        while self.group_in_flight or journal.pending_bytes:
            if not state.memory and journal.committed_sequence >= target:
                return
            waiter: asyncio.Future[None] = self.loop.create_future()
            self.idle_waiters.append(waiter)
            self.write_journal(True)
            if not self.group_in_flight and not journal.pending_bytes:
                return
            await waiter

    def wake_waiters(self) -> None:
        while self.idle_waiters:
            waiter = self.idle_waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def carry_out(self, effect: Effect) -> None:
        if isinstance(effect, ReadLog):
            self.read_log(effect)
        elif isinstance(effect, ResumeInput):
            connection = effect.connection
            transport = connection.transport
            if transport is None:
                return
            assert isinstance(transport, ClientTransport)
            self.node.handle_resumed(connection)
            if not connection.input_paused:
                transport.resume_reading()
        elif isinstance(effect, Note):
            # The values stay arguments, because the log's handler truncates each of them.
            text = " ".join([effect.event, *(f"{key}=%r" for key in effect.fields)])
            logger.log(LEVELS[effect.level], text, *effect.fields.values())
        elif isinstance(effect, FetchInflight):
            self.fetch(effect)
        elif isinstance(effect, Cut):
            transport = effect.connection.transport
            if isinstance(transport, ClientTransport):
                transport.cut()
        else:
            assert isinstance(effect, CheckPassword)
            self.passwords.check(effect)

    def read_log(self, effect: ReadLog) -> None:
        reader = self.reader
        written = self.node.state.journal.written
        for partition, limit in enumerate(effect.limits):
            if limit > written[partition]:
                self.defer(effect)
                return

        def work() -> object:
            return reader.read(
                effect.positions,
                effect.limits,
                effect.interests,
                effect.records_max,
                effect.bytes_max,
            )

        def done(result: object, error: BaseException | None) -> None:
            self.touch()
            if error is not None:
                if self.may_read_again(error):
                    self.read_log(effect)
                else:
                    self.fail("log_read_failed", error)
                return
            if not self.believes_disk:
                return
            assert isinstance(result, ReadResult)
            self.node.handle_read(
                effect, result.records, result.positions, result.done, result.lost
            )

        self.read_pool.submit(work, done)

    def may_read_again(self, error: BaseException) -> bool:
        """Return True if only a file descriptor was missing, which says nothing of the disk."""
        if is_scarce(error):
            logger.error("log_read_waits_for_descriptor error=%r", str(error))
            return True
        return False

    def defer(self, effect: Effect) -> None:
        """Wait for the next group: with "memory" the file may lack committed records."""
        self.deferred.append(effect)
        self.write_journal(True)

    def fetch(self, effect: FetchInflight) -> None:
        reader = self.reader
        written = self.node.state.journal.written
        for _, partition, offset in effect.wanted:
            if offset >= written[partition]:
                self.defer(effect)
                return

        def work() -> object:
            found: list[tuple[int, Record | None]] = []
            size_bytes = 0
            for packet_id, partition, offset in effect.wanted:
                record = reader.fetch(partition, offset)
                found.append((packet_id, record))
                if record is not None:
                    size_bytes += len(record.payload) + len(record.properties)
                if size_bytes >= effect.bytes_max:
                    break
            return found

        def done(result: object, error: BaseException | None) -> None:
            self.touch()
            if error is not None:
                if self.may_read_again(error):
                    self.fetch(effect)
                else:
                    self.fail("log_read_failed", error)
                return
            if not self.believes_disk:
                return
            found: list[tuple[int, Record | None]] = result  # type: ignore[assignment]
            self.node.handle_fetched(effect, found)

        self.read_pool.submit(work, done)

    async def in_reader_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread that reads the log, so that no read runs at the same time."""
        future: asyncio.Future[T] = self.loop.create_future()

        def done(result: object, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(cast(T, result))

        self.read_pool.submit(work, done)
        return await future

    def fail(self, event: str, error: BaseException) -> None:
        """Stop the node after an error that must not happen and must not be hidden."""
        logger.critical(f"{event} error=%r", str(error), exc_info=error)
        self.has_failed = True
        self.on_failed(error)

    def contain(self, connection: Connection, error: Exception) -> None:
        """Log a failure in a client's packet. Only the client's own state may be incomplete."""
        self.node.state.stats.internal_errors += 1
        logger.error(
            "client_failed remote=%r client=%r error=%r",
            connection.remote,
            connection.client_id,
            str(error),
            exc_info=error,
        )

    def close(self) -> None:
        """Write everything submitted and stop the threads."""
        if self.timer is not None:
            self.timer.cancel()
        if self.flush_timer is not None:
            self.flush_timer.cancel()
        self.writer.close()
        self.read_pool.close()
        self.passwords.close()
