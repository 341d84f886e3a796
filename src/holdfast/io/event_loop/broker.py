"""Runs a node's turns, one per iteration of the event loop.

Sockets hand their bytes to the node as they arrive, and the first one schedules a turn. The turn
(`node.runtime.runtime`) carries out everything that the iteration produced at once: due timers,
one write group to the journal, the node's effects, and one write per changed connection.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from holdfast.io.disk.journal_writer import JournalWriter
from holdfast.io.disk.storage import Storage
from holdfast.io.event_loop.identity_checks import IdentityChecks
from holdfast.io.event_loop.log_reads import LogReads
from holdfast.io.event_loop.loop import COLLECT_S, COLLECTOR
from holdfast.io.event_loop.note_ring import NOTE_LINES, NoteRing
from holdfast.io.event_loop.password_checks import PasswordChecks
from holdfast.io.sockets.transport import ClientTransport
from holdfast.log.journal.group_commit_delay import JournalWaits
from holdfast.log.journal.segment import WriteGroup
from holdfast.node.connections.connect import handle_drained
from holdfast.node.effects import (
    AskRights,
    AskSources,
    AskTopics,
    CheckPassword,
    Cut,
    DrainOlder,
    Effect,
    Note,
    ResumeInput,
    RunCommands,
)
from holdfast.node.node import Node
from holdfast.node.publish.control import CommandPort, finish_commands
from holdfast.node.runtime.runtime import Runtime
from holdfast.node.session.connection import Connection
from holdfast.security.passwords import PasswordFile

if TYPE_CHECKING:
    from holdfast.security.dynamic.commands import SecurityChange

logger = logging.getLogger("holdfast")

ROUNDING_S: Final = 0.00051
"""Added to the time of a timer, because uvloop rounds to the nearest millisecond. A timer that
fired too early would be set for now, again and again, until its time has come."""


class Broker:
    """Connects a `Node` to sockets, the journal's writer, the log's reader and password checks."""

    def __init__(
        self,
        node: Node,
        loop: asyncio.AbstractEventLoop,
        storage: Storage,
        password_file: PasswordFile | None,
        waits: JournalWaits,
        on_failed: Callable[[BaseException], None],
        confirm: Callable[[], None] | None = None,
        *,
        durable: bool,
    ) -> None:
        """`on_failed`: called when the journal or the log's reader failed; the node must stop.
        `confirm`: see `JournalWriter`. `durable`: whether it syncs each group."""
        self.node = node
        self.loop = loop
        self.reader = storage.reader
        self._directory = storage.directory
        self.on_failed = on_failed
        self.waits = waits
        self.writer = JournalWriter(
            storage.directory,
            loop.call_soon_threadsafe,
            durable=durable,
            confirm=confirm,
            on_written=self.group_written,
            on_failed=on_failed,
            on_full=self.writer_full,
            on_space=self.writer_has_space,
        )
        self.reads = LogReads(loop, storage.reader, self.touch, self.fail, self.counts)
        self.passwords = PasswordChecks(node, loop, self.touch, password_file)
        self.identities = IdentityChecks(node, loop, self.touch)
        self.commands: CommandPort | None = None
        self.record_changes: Callable[[list[SecurityChange], Callable[[], None]], None] | None = (
            None
        )
        """Puts the changes by commands into the audit, then calls back. None: there is no audit."""
        # A ListenerHost (server.sockets.reception); None: clients' sockets are in this process.
        self.workers: object | None = None
        self.notes = NoteRing()
        self.turn_scheduled = False
        self.has_failed = False
        """Whether the process is about to stop. No turn runs, so no promise is resolved."""
        self.timer: asyncio.TimerHandle | None = None
        self.timer_at = 0.0
        self._collect_at = 0.0
        self.nobody_left: asyncio.Future[None] | None = None
        self.runtime = self.new_runtime()

    def new_runtime(self) -> Runtime:
        """Returns what orders the turns, connected to the parts above."""
        return Runtime(self.node, self.writer, self.reads, self, self.waits)

    def generation(self) -> int | None:
        """The generation of the log. None: the directory was restored, and the nodes of its cluster
        have not agreed on the generation yet."""
        manifest = self._directory.manifest
        return None if manifest.restored else manifest.generation

    def former_generations(self) -> list[tuple[int, list[int]]]:
        """The generations before it, each with the offsets up to which it has the same records."""
        return [(number, [*same]) for number, same in self._directory.manifest.former]

    # The turn

    def touch(self) -> None:
        """Sets the node's clock and schedules a turn. Call it before the node receives anything."""
        if not self.turn_scheduled:
            self.turn_scheduled = True
            self.runtime.begin(self.loop.time(), time.time_ns() // 1000)
            self.loop.call_soon(self.turn)

    def turn(self) -> None:
        """Runs a turn, and schedules the next one for the next timer."""
        self.turn_scheduled = False
        if self.has_failed:
            return
        runtime = self.runtime
        runtime.turn()
        now = runtime.state.now
        if now >= self._collect_at:
            self._collect_at = now + COLLECT_S
            COLLECTOR.collect()
        when = runtime.timer()
        if when is not None and (self.timer is None or when < self.timer_at):
            if self.timer is not None:
                self.timer.cancel()
            self.timer_at = when
            self.timer = self.loop.call_at(when + ROUNDING_S, self.fire)

    def fire(self) -> None:
        self.timer = None
        self.touch()

    def flush(self, dirty: list[Connection]) -> None:
        """Writes the output of each of these connections to its socket."""
        for connection in dirty:
            connection.dirty = False
            transport = connection.transport
            if transport is not None:
                assert isinstance(transport, ClientTransport)
                transport.flush(connection)

    def carry_out(self, effect: Effect) -> None:
        """Carries out an effect that is not a read."""
        if isinstance(effect, ResumeInput):
            connection = effect.connection
            transport = connection.transport
            if transport is None:
                return
            assert isinstance(transport, ClientTransport)
            try:
                self.node.handle_resumed(connection)
            except Exception as error:  # noqa: BLE001
                self.contain(connection, error)
                transport.cut()
                return
            if not connection.input_paused:
                transport.resume_reading()
        elif isinstance(effect, Note):
            self.notes.add(self.node.state.wall_us, effect)
            NOTE_LINES.write(effect)
        elif isinstance(effect, Cut):
            transport = effect.connection.transport
            if isinstance(transport, ClientTransport):
                transport.cut()
        elif isinstance(effect, AskSources):
            self.identities.ask(effect)
        elif isinstance(effect, DrainOlder):
            self._drain(effect)
        elif isinstance(effect, AskRights):
            self.identities.ask_rights(effect)
        elif isinstance(effect, AskTopics):
            self.identities.topics.ask(effect)
        elif isinstance(effect, RunCommands):
            if self.commands is None:
                # A reload has switched them off since the message came.
                finish_commands(self.node.state, effect, b"")
            else:
                self.commands.run(effect)
        else:
            assert isinstance(effect, CheckPassword)
            self.passwords.check(effect)

    def _drain(self, effect: DrainOlder) -> None:
        older = effect.older.transport
        newer = effect.connection.transport
        if isinstance(older, ClientTransport) and isinstance(newer, ClientTransport):
            older.drain(newer, partial(self._drained, effect))
        else:
            self._drained(effect)

    def _drained(self, effect: DrainOlder) -> None:
        self.touch()
        handle_drained(self.node.state, effect)

    # The journal's writer

    def group_written(self, group: WriteGroup) -> None:
        """Commits a group that is in the file, and on disk unless durability is "memory"."""
        self.runtime.group_written(group)

    def writer_full(self) -> None:
        """Refuses publishes: the group in flight, and every promise behind it, waits for space."""
        self.runtime.writer_full()
        logger.error("journal_waits_for_space")

    def writer_has_space(self) -> None:
        """Logs that groups wait no longer. Publishes are accepted after the next check of space."""
        logger.warning("journal_goes_on")

    def counts(self) -> tuple[int, int]:
        """Returns the publishes of clients since the start, and the records in the log."""
        state = self.node.state
        return state.stats.publish_received, state.journal.sequence

    async def drain_journal(self) -> None:
        """Waits until everything appended so far is written."""
        written = asyncio.Event()
        self.runtime.when_written(written.set)
        await written.wait()

    # Clients

    def note_disconnected(self) -> None:
        """Notes that a connection is gone, for `wait_for_disconnects`."""
        waiter = self.nobody_left
        if waiter is not None and self.node.state.connections == 0 and not waiter.done():
            waiter.set_result(None)

    async def settle(self) -> None:
        """Reads no more from clients, and acknowledges everything that was received."""
        for session in self.node.state.sessions.values():
            connection = session.connection
            if connection is not None and connection.transport is not None:
                connection.input_paused = True
                cast(ClientTransport, connection.transport).pause_reading()
        await self.drain_journal()
        self.touch()
        self.turn()

    async def wait_for_disconnects(self, timeout_s: float) -> None:
        """Waits until no connection is left, at most `timeout_s`."""
        if self.node.state.connections:
            self.nobody_left = self.loop.create_future()
            await asyncio.wait([self.nobody_left], timeout=timeout_s)

    def contain(self, connection: Connection, error: Exception) -> None:
        """Logs a failure in a client's packet. Only the client's own state may be incomplete."""
        state = self.node.state
        state.stats.internal_errors += 1
        if isinstance(error, AssertionError) and connection.session is not None:
            state.note_stopped(f"session {connection.client_id}", str(error))
        logger.error(
            "client_failed remote=%r client=%r error=%r",
            connection.remote,
            connection.client_id,
            str(error),
            exc_info=error,
        )

    # The end

    def fail(self, event: str, error: BaseException) -> None:
        """Stops the node after an error that must not happen and must not be hidden."""
        logger.critical(f"{event} error=%r", str(error), exc_info=error)
        self.has_failed = True
        self.on_failed(error)

    def close(self) -> None:
        """Writes everything submitted and stops the threads."""
        if self.timer is not None:
            self.timer.cancel()
        self.writer.close()
        self.reads.close()
        self.passwords.close()
        self.identities.close()
        if self.commands is not None:
            self.commands.close()
