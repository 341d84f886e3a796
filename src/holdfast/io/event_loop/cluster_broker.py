"""Event loop of a cluster node, with the links to the other nodes and Raft's writer."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from holdfast.io.disk import older_copy, unsynced
from holdfast.io.disk.journal_writer import Done, sync_newest
from holdfast.io.disk.raft_files import RaftFiles
from holdfast.io.disk.raft_writer import RaftWriter
from holdfast.io.disk.storage import Storage, report_damage
from holdfast.io.event_loop.broker import Broker
from holdfast.io.event_loop.commands.agreed import UserAgreement
from holdfast.io.peers.links import PeerHandler, PeerIdentity, PeerLinks
from holdfast.io.peers.questions import PeerQuestions
from holdfast.log.journal.group_commit_delay import JournalWaits
from holdfast.log.journal.watermarks import Checkpoint
from holdfast.log.reading.segment_reader import Damage
from holdfast.node.cluster_node import ClusterNode
from holdfast.node.failure.health import Presence
from holdfast.node.frame_kinds import ANSWER, QUESTION, BadFrame
from holdfast.node.relocation.redirection import LEAVE_CLIENTS_S
from holdfast.node.runtime.cluster_runtime import ClusterRuntime
from holdfast.node.runtime.ports import ClusterPorts, ProcessPort
from holdfast.node.runtime.replacement import Replacement
from holdfast.node.runtime.runtime import Runtime
from holdfast.security.passwords import PasswordFile

logger = logging.getLogger("holdfast")


class ClusterBroker(Broker):
    """The `Broker` of a cluster node and the `PeerHandler` of its links."""

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
        `new_links`: makes the links, which do nothing before they are started. `confirm`: see
        `JournalWriter`; Raft's writes wait for it, too."""
        self._durable = durable
        self._cluster_node = cluster_node
        self._process = process
        self._replacement = replacement
        self._disk_stall_s = disk_stall_s
        self._directory = storage.directory
        # Whether the last attempt to write the watermarks failed, which was logged.
        self._is_unwritten = False
        self.links = new_links(self)
        self.questions = PeerQuestions(loop, self.links.send)
        self.agreement: UserAgreement | None = None
        """The users of dynamic security, once the node is part of its process."""
        self._raft = RaftWriter(
            raft_files,
            loop.call_soon_threadsafe,
            confirm=confirm,
            on_written=self._raft_written,
            on_failed=on_failed,
        )
        super().__init__(
            cluster_node.node,
            loop,
            storage,
            password_file,
            waits,
            on_failed,
            confirm,
            durable=durable,
        )
        storage.opened.store.on_damage = self._found_damage

    def generation(self) -> int | None:
        """See `Broker`. The generation in the metadata counts before it is in the manifest."""
        own, metadata = super().generation(), self._cluster_node.context.metadata
        if own is None or metadata is None or metadata.generation is None:
            return own
        return metadata.generation.number

    def new_runtime(self) -> Runtime:
        """Returns the runtime, which orders the turns of a cluster node."""
        ports = ClusterPorts(self.writer, self.reads, self, self._raft, self.links, self._process)
        self.cluster = ClusterRuntime(
            self._cluster_node,
            ports,
            self._replacement,
            self._disk_stall_s,
            self.waits,
            durable=self._durable,
        )
        return self.cluster

    async def hand_over(self) -> str:
        """Gives up Raft's leadership, and sends clients to other nodes at the pace of a drain.
        Returns where those that are left may go."""
        others = self.cluster.hand_over(self.loop.time())
        if others and self.cluster.redirection.drain_per_s:
            await self.wait_for_disconnects(LEAVE_CLIENTS_S)
        return others

    def _raft_written(self) -> None:
        self.cluster.raft_written()

    def _found_damage(self, damage: Damage) -> None:
        """Reports damage, in the reading thread, before it reports what it has read."""
        report_damage(damage)
        self.loop.call_soon_threadsafe(self.cluster.distrust_disk)

    def write_watermarks(self, watermarks: Checkpoint) -> None:
        """Writes the watermarks behind those in progress, in another thread."""

        def done(result: object, error: BaseException | None) -> None:
            if error is None:
                self.cluster.watermarks_written(watermarks)
            else:
                # The system may have dropped what it did not write, so nothing of it may count.
                self.on_failed(error)

        self._in_housekeeping(partial(self._write_watermarks, watermarks), done)

    def write_remembered(self, content: bytes) -> None:
        """Stores it in that thread."""
        work = partial(older_copy.remember, self._directory.files, content)
        self.writer.housekeeping.submit(work)

    def _in_housekeeping(self, work: Callable[[list[int]], None], done: Done) -> None:
        """Calls `work` in that thread, with the segments that may not be synced."""
        segments = [] if self._durable else self.node.state.journal.segments[-2:]
        newest = [segment.sequence for segment in segments]
        self.writer.housekeeping.submit(partial(work, newest), done)

    async def _housekept(self, work: Callable[[list[int]], None]) -> None:
        ended: asyncio.Future[None] = self.loop.create_future()

        def done(result: object, error: BaseException | None) -> None:
            if error is not None:
                ended.set_exception(error)
            else:
                ended.set_result(None)

        self._in_housekeeping(work, done)
        await ended

    async def write_last_watermarks(self) -> None:
        """Writes the watermarks as they are now, and waits for that."""
        watermarks = self.node.state.journal.checkpoint()
        await self._housekept(partial(self._write_watermarks, watermarks))

    async def drain_journal(self) -> None:
        """Waits until everything appended so far is on disk, also where it counts before."""
        await super().drain_journal()
        if not self._durable:
            await self._housekept(partial(sync_newest, self._directory))

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
        presence = Presence(
            identity.incarnation,
            identity.peer_address,
            identity.client_address,
            identity.admin_address,
            identity.features,
            identity.program,
        )
        self._link_changed(partial(self.cluster.link_up, identity.node_id, presence, identity.role))
        self.questions.connected(identity.node_id, identity.features)

    def on_frame(self, node_id: str, kind: int, payload: bytes) -> None:
        if kind in (QUESTION, ANSWER):
            self.questions.handle_frame(node_id, kind, payload)
            return
        try:
            self.cluster.handle_frame(node_id, kind, payload, self.loop.time())
        except BadFrame:
            raise
        except Exception as error:  # noqa: BLE001
            self.fail("frame_failed", error)

    def on_disconnected(self, node_id: str) -> None:
        self._link_changed(partial(self.cluster.link_down, node_id))
        self.questions.disconnected(node_id)

    def on_refused(self, node_id: str) -> None:
        self._link_changed(partial(self.cluster.link_refused, node_id))

    def on_removed(self) -> None:
        self.cluster.report_removed()

    def on_older_copy(self, text: str, may_begin_anew: bool) -> None:
        self.cluster.report_older_copy(text, may_begin_anew)

    def _link_changed(self, tell_cluster: Callable[[], None]) -> None:
        """Changes a link, and stops the node if that fails.

        An exception in the link's callback would only close the link. The next link would fail in
        the same way, while the node seems to work.
        """
        try:
            tell_cluster()
        except Exception as error:  # noqa: BLE001
            self.fail("link_failed", error)

    def close(self) -> None:
        """Writes everything submitted and stops the threads."""
        self._raft.close()
        super().close()
        if self.writer.is_synced and not self._cluster_node.positions.own_incomplete:
            try:
                unsynced.clear(self._directory.files)
            except OSError as error:
                logger.error("unsynced_mark_not_removed error=%r", str(error))
