"""Runs a node's turns, one per iteration of the event loop, with its sockets, its links to other
nodes, its log and Raft's writer.

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

from holdfast.io.disk import older_copy, unsynced
from holdfast.io.disk.journal_writer import JournalWriter, sync_newest
from holdfast.io.disk.raft_files import RaftFiles, RaftWriter
from holdfast.io.disk.storage import Storage, report_damage
from holdfast.io.event_loop.commands.agreement import UserAgreement
from holdfast.io.event_loop.identity_checks import IdentityChecks
from holdfast.io.event_loop.lake_port import LakePort
from holdfast.io.event_loop.log_reads import LogReads
from holdfast.io.event_loop.loop import COLLECT_S, COLLECTOR
from holdfast.io.event_loop.note_ring import NOTE_LINES, NoteRing
from holdfast.io.event_loop.password_checks import PasswordChecks
from holdfast.io.event_loop.threads import run_in
from holdfast.io.peers.links import PeerHandler, PeerIdentity, PeerLinks
from holdfast.io.peers.questions import PeerQuestions
from holdfast.io.sockets.transport import ClientTransport
from holdfast.log.journal.group_commit_delay import JournalWaits
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.journal.watermarks import Checkpoint
from holdfast.log.reading.segment_reader import Damage
from holdfast.node.cluster_node import ClusterNode
from holdfast.node.effects import (
    AskRights,
    AskSources,
    AskTopics,
    CheckPassword,
    Cut,
    Effect,
    Note,
    ResumeInput,
    RunCommands,
)
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.publish.control import CommandPort, finish_commands
from holdfast.node.relocation.redirection import LEAVE_CLIENTS_S
from holdfast.node.runtime.ports import ProcessPort, RuntimePorts
from holdfast.node.runtime.replacement import Replacement
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
    """Connects a node to sockets, the journal's writer, the log's reader, password checks, and the
    other nodes. It is the `PeerHandler` of their links."""

    def __init__(
        self,
        cluster_node: ClusterNode,
        loop: asyncio.AbstractEventLoop,
        storage: Storage,
        password_file: PasswordFile | None,
        *,
        waits: JournalWaits,
        durable: bool,
        disk_stall_s: float,
        on_failed: Callable[[BaseException], None],
        raft_files: RaftFiles,
        new_links: Callable[[PeerHandler], PeerLinks],
        process: ProcessPort,
        replacement: Replacement,
        confirm: Callable[[], None] | None,
    ) -> None:
        """`durable`: whether a record is on disk before it counts; otherwise it is in the file, and
        the disk has it `WATERMARKS_S` later. `disk_stall_s`: the longest normal write in seconds.
        `on_failed`: called when the journal or the log's reader failed; the node must stop.
        `new_links`: makes the links, which do nothing before they are started. `confirm`: see
        `JournalWriter`; Raft's writes wait for it, too."""
        node = cluster_node.node
        self.node = node
        self.loop = loop
        self.reader = storage.reader
        self._cluster_node = cluster_node
        self._directory = storage.directory
        self._durable = durable
        self.on_failed = on_failed
        # Whether the last attempt to write the watermarks failed, which was logged.
        self._is_unwritten = False
        self.links = new_links(self)
        self.agreement: UserAgreement | None = None
        """The users of dynamic security, once the node is part of its process."""
        self._raft = RaftWriter(
            raft_files,
            loop.call_soon_threadsafe,
            confirm=confirm,
            on_written=self._raft_written,
            on_failed=on_failed,
        )
        self.writer = JournalWriter(
            storage.directory,
            loop.call_soon_threadsafe,
            durable=durable,
            confirm=confirm,
            on_written=self._group_written,
            on_failed=on_failed,
            on_full=self._writer_full,
            on_space=self._writer_has_space,
        )
        self.reads = LogReads(loop, storage.reader, self.touch, self.fail, self._counts)
        self.lake: LakePort | None = None
        """The lake of `log.lake`, while the process serves."""
        self.passwords = PasswordChecks(node, loop, self.touch, password_file)
        self.identities = IdentityChecks(node, loop, self.touch)
        self.commands: CommandPort | None = None
        self.record_changes: Callable[[list[SecurityChange], Callable[[], None]], None] | None = (
            None
        )
        """Puts the changes by commands into the audit, then calls back. None: there is no audit."""
        self.notes = NoteRing()
        self.turn_scheduled = False
        self.has_failed = False
        """Whether the process is about to stop. No turn runs, so no promise is resolved."""
        self.timer: asyncio.TimerHandle | None = None
        self.timer_at = 0.0
        self._collect_at = 0.0
        self.nobody_left: asyncio.Future[None] | None = None
        self.questions = PeerQuestions(loop, lambda *frame: self.runtime.links.send(*frame))
        ports = RuntimePorts(
            self.writer, self.reads, self, self._raft, self.links, process, self.questions
        )
        self.runtime = Runtime(
            cluster_node, ports, replacement, disk_stall_s, waits, durable=durable
        )
        storage.opened.store.on_damage = self._found_damage

    def generation(self) -> int | None:
        """The generation of the log; that of the metadata counts before it is in the manifest.
        None: the directory was restored, and the nodes of its cluster have not agreed on the
        generation yet."""
        manifest = self._directory.manifest
        if manifest.restored:
            return None
        metadata = self._cluster_node.context.metadata
        if metadata is None or metadata.generation is None:
            return manifest.generation
        return metadata.generation.number

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
        state = runtime.state
        if state.has_large_list:
            state.has_large_list = False
            COLLECTOR.leave_present()
        now = state.now
        if now >= self._collect_at:
            self._collect_at = now + COLLECT_S
            COLLECTOR.collect()
        when = runtime.timer()
        if when is not None and (self.timer is None or when < self.timer_at):
            if self.timer is not None:
                self.timer.cancel()
            self.timer_at = when
            self.timer = self.loop.call_at(when + ROUNDING_S, self._fire)

    def _fire(self) -> None:
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

    # The journal's writer

    def _group_written(self, group: WriteGroup) -> None:
        """Commits a group that is in the file, and on disk unless durability is "memory"."""
        self.runtime.group_written(group)

    def _writer_full(self) -> None:
        """Refuses publishes: the group in flight, and every promise behind it, waits for space."""
        self.runtime.writer_full()
        logger.error("journal_waits_for_space")

    def _writer_has_space(self) -> None:
        """Logs that groups wait no longer. Publishes are accepted after the next check of space."""
        logger.warning("journal_goes_on")

    def _counts(self) -> tuple[int, int]:
        """Returns the publishes of clients since the start, and the records in the log."""
        state = self.node.state
        return state.stats.publish_received, state.journal.sequence

    async def drain_journal(self) -> None:
        """Waits until everything appended so far is on disk, also where it counts before."""
        written = asyncio.Event()
        self.runtime.when_written(written.set)
        await written.wait()
        if not self._durable:
            await self._housekept(partial(sync_newest, self._directory))

    # Raft's writer, and the other files

    def _raft_written(self) -> None:
        self.runtime.raft_written()

    def _found_damage(self, damage: Damage) -> None:
        """Reports damage, in the reading thread, before it reports what it has read."""
        report_damage(damage)
        self.loop.call_soon_threadsafe(self.runtime.distrust_disk)

    def write_watermarks(self, watermarks: Checkpoint) -> None:
        """Writes the watermarks behind those in progress, in another thread."""

        def done(result: object, error: BaseException | None) -> None:
            if error is None:
                self.runtime.watermarks_written(watermarks)
            else:
                # The system may have dropped what it did not write, so nothing of it may count.
                self.on_failed(error)

        work = partial(self._write_watermarks, watermarks)
        self.writer.housekeeping.submit(self._with_newest(work), done)

    def write_remembered(self, content: bytes) -> None:
        """Stores it in that thread."""
        work = partial(older_copy.remember, self._directory.files, content)
        self.writer.housekeeping.submit(work)

    def _with_newest(self, work: Callable[[list[int]], None]) -> Callable[[], None]:
        """Returns work of that thread, with the segments that may not be synced."""
        segments = [] if self._durable else self.node.state.journal.segments[-2:]
        return partial(work, [segment.sequence for segment in segments])

    async def _housekept(self, work: Callable[[list[int]], None]) -> None:
        await run_in(self.writer.housekeeping, self._with_newest(work))

    async def write_last_watermarks(self) -> None:
        """Writes the watermarks as they are now, and waits for that."""
        watermarks = self.node.state.journal.checkpoint()
        await self._housekept(partial(self._write_watermarks, watermarks))

    def _write_watermarks(self, watermarks: Checkpoint, newest: list[int]) -> None:
        """Writes the watermarks, in the thread. Older ones only make a start slower. Raises
        `OSError` if the records below them cannot be synced."""
        sync_newest(self._directory, newest)
        try:
            self._directory.write_watermarks(watermarks)
        except OSError as error:
            if not self._is_unwritten:
                logger.warning("watermarks_not_written error=%r", str(error))
            self._is_unwritten = True
            return
        self._is_unwritten = False

    # PeerHandler

    def on_connected(self, identity: PeerIdentity) -> None:
        self._link_changed(partial(self.runtime.links.link_up, identity))

    def on_frame(self, node_id: str, kind: int, payload: bytes) -> None:
        try:
            self.runtime.links.handle_frame(node_id, kind, payload, self.loop.time())
        except BadFrame:
            raise
        except Exception as error:  # noqa: BLE001
            self.fail("frame_failed", error)

    def on_disconnected(self, node_id: str) -> None:
        self._link_changed(partial(self.runtime.links.link_down, node_id))

    def on_refused(self, node_id: str) -> None:
        self._link_changed(partial(self.runtime.links.link_refused, node_id))

    def on_removed(self) -> None:
        self.runtime.report_removed()

    def on_older_copy(self, text: str, may_begin_anew: bool) -> None:
        self.runtime.report_older_copy(text, may_begin_anew)

    def _link_changed(self, tell_cluster: Callable[[], None]) -> None:
        """Changes a link, and stops the node if that fails.

        An exception in the link's callback would only close the link. The next link would fail in
        the same way, while the node seems to work.
        """
        try:
            tell_cluster()
        except Exception as error:  # noqa: BLE001
            self.fail("link_failed", error)

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

    async def hand_over(self) -> str:
        """Gives up Raft's leadership, and sends clients to other nodes at the pace of a drain.
        Return where those that are left may go."""
        others = self.runtime.hand_over(self.loop.time())
        if others and self.runtime.redirection.drain_per_s:
            await self.wait_for_disconnects(LEAVE_CLIENTS_S)
        return others

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
        self._raft.close()
        if self.timer is not None:
            self.timer.cancel()
        self.writer.close()
        self.reads.close()
        self.passwords.close()
        self.identities.close()
        if self.commands is not None:
            self.commands.close()
        if self.writer.is_synced and not self._cluster_node.positions.own_incomplete:
            try:
                unsynced.clear(self._directory.files)
            except OSError as error:
                logger.error("unsynced_mark_not_removed error=%r", str(error))
