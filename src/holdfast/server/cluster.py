"""The membership of a node in a cluster: what it opens, when it is ready, how it leaves."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final

from holdfast.api.cluster_operations import ClusterOperations
from holdfast.broker.node import Node
from holdfast.broker.state import NodeState
from holdfast.cluster.failure.detector import DetectorConfig
from holdfast.cluster.failure.health import Presence
from holdfast.cluster.metadata.model import DATA, WITNESS, ClusterMetadata
from holdfast.cluster.metadata.model import NodePhase as StateOfNode
from holdfast.cluster.metadata.operations import empty_disk_text
from holdfast.cluster.metadata.state_machine import member_id
from holdfast.cluster.metadata.store import MetaStore
from holdfast.cluster.node import ClusterNode
from holdfast.cluster.partitions import disk_position
from holdfast.cluster.partitions.config import ReplicationConfig
from holdfast.cluster.parts import ClusterNodeConfig
from holdfast.cluster.placement.controller import ControllerConfig
from holdfast.cluster.placement.planning import last_copies
from holdfast.cluster.state.replicated import ReplicatedState
from holdfast.config.schema import Config
from holdfast.security.passwords import PasswordFile
from holdfast.security.peer_handshake import (
    ANSWERS_APART,
    LAST_COPY,
    OLDER_COPY,
    OLDER_COPY_WAITS,
    Refusal,
)
from holdfast.server.disk import older_copy
from holdfast.server.disk.raft_files import DamagedRaft, RaftFiles
from holdfast.server.disk.raft_writer import RaftWriter
from holdfast.server.disk.storage import Storage, StorageError, report_damage
from holdfast.server.event_loop.cluster_broker import ClusterBroker
from holdfast.server.event_loop.failures import watched
from holdfast.server.peers.authentication import PeerAuth
from holdfast.server.peers.links import PeerIdentity, PeerLinks
from holdfast.server.replacement import Replacement
from holdfast.server.shared_directory import address_of, admin_of
from holdfast.storage.files.data_directory import DataDirectoryError
from holdfast.storage.journal.journal import Journal
from holdfast.storage.reading.segment_reader import Damage

logger = logging.getLogger("holdfast")

LEAVE_S: Final = 3.0
"""The time in seconds that other nodes have at shutdown to take over leaderships."""
PENDING_BYTES: Final = 8 << 20
"""The bytes of uncommitted batches read at a time at the start."""
SAVE_AGAIN_S: Final = 1.0
"""The pause in seconds after a snapshot that could not be written."""


class ClusterMembership:
    """Opens and connects the parts of a cluster node. Raises `StorageError` if that fails."""

    def __init__(
        self,
        config: Config,
        new_node: Callable[[Journal], Node],
        password_file: PasswordFile | None,
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self.config = config
        cluster = config.cluster
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        # Set during `leave`; done when this node leads nothing or is connected to no other node.
        self._relieved: asyncio.Event | None = None
        # Writes a snapshot even without new records. Raises OSError. The server sets it.
        self.take_snapshot: Callable[[], Coroutine[object, object, None]]
        self._saving: asyncio.Task[None] | None = None
        try:
            auth = PeerAuth.load(cluster)
        except (ValueError, OSError) as error:
            raise StorageError(str(error)) from error
        # Restarts the process. The server sets it.
        self.start_anew: Callable[[], None]
        self._forgetting: asyncio.Task[None] | None = None
        self._begins_anew = False
        self._reviewed: ClusterMetadata | None = None
        root = Path(config.node.data)
        self._replacement = Replacement(root, config.node.id)
        try:
            if older_copy.begin_anew_at(root):
                logger.warning("older_copy_begins_anew text='it fetches what is missing'")
        except (OSError, DataDirectoryError) as error:
            raise StorageError(f"{root}: the older copy cannot be used: {error}") from error
        storage = Storage.open(
            Path(config.node.data),
            config.node.id,
            cluster.partitions,
            config.log.segment_bytes,
            secrets.token_hex(8),
        )
        self.storage = storage
        manifest = storage.directory.manifest
        node = new_node(storage.journal)
        found: list[Damage] = []
        images = _recovered(storage, node, found)
        member_name = member_id(config.node.id, manifest.incarnation)
        is_new = not manifest.cluster_id
        try:
            files = RaftFiles(storage.directory.files, member_name, is_new=is_new)
        except DamagedRaft as error:
            storage.close()
            raise StorageError(str(error)) from error
        random = secrets.SystemRandom().random
        now = self._loop.time()
        meta = MetaStore(
            config.node.id,
            manifest.incarnation,
            files.state,
            nonce=secrets.token_hex(8),
            random=random,
            now=now,
        )
        self.presence = Presence(
            manifest.incarnation, cluster.peer_address(), address_of(config), admin_of(config)
        )
        self.member = ClusterNode(
            node,
            images,
            storage.journal,
            meta,
            self.presence,
            member_config(config, manifest.incarnation),
            random,
            now,
            storage.lacking(),
        )
        _load_uncommitted(self.member, storage)
        self.broker = ClusterBroker(
            self.member,
            self._loop,
            storage,
            password_file,
            config.log.memory_flush_ms / 1000,
            on_failed,
            self._after_turn,
            cluster.disk_stall_s,
        )
        if storage.journal.damaged or found:
            logger.error("partitions_damaged partitions=%s", sorted(storage.journal.damaged))
            self.broker.distrust_disk()
        self.broker.raft = RaftWriter(
            files,
            self._loop.call_soon_threadsafe,
            on_written=self.broker.raft_written,
            on_failed=on_failed,
        )
        self.links = PeerLinks(
            self._loop,
            PeerIdentity(
                config.node.id,
                manifest.incarnation,
                manifest.cluster_id,
                role=WITNESS if cluster.witness else DATA,
                peer_address=self.presence.peer_address,
                client_address=self.presence.client_address,
                admin_address=self.presence.admin_address,
                features=f"{disk_position.FEATURE},{ANSWERS_APART}",
            ),
            auth,
            self.broker,
            cluster.peer_bind,
            cluster.peer_port,
        )
        self.broker.links = self.links
        self.links.memory = self.member.disk_memory
        self.links.own_disk = self._own_disk
        self.links.objection = self._objection
        self.operations = ClusterOperations(
            config, self.presence, self.member, self.broker, self.links, self._loop
        )

    async def start(self) -> None:
        """Listen for other nodes and dial them. Raises `OSError` if the address cannot be used."""
        reason = older_copy.reason_apart(self.storage.directory.files)
        if reason:
            self.broker.on_older_copy(reason, may_begin_anew=False)
        await self.links.start()
        self.links.set_join(self.config.cluster.join)
        if self._replacement.has_aside:
            self._forgetting = watched(self._forget_aside())
        self.broker.touch()
        is_new = not self.storage.directory.manifest.cluster_id
        if not self.config.cluster.wait_for_init and is_new and self.member.meta.metadata is None:
            await self.operations.init()

    async def wait_until_ready(self) -> None:
        """Wait until this node leads each partition of its cluster or follows its leader."""
        await self._ready.wait()

    def _is_ready(self) -> bool:
        member = self.member
        metadata = member.context.metadata
        if metadata is None or self.config.node.id not in metadata.nodes:
            return False
        if self.config.cluster.witness:
            return True
        for partition, info in enumerate(metadata.partitions):
            if member.context.leads(partition):
                continue
            if not info.leader or member.replication.followed_epoch(partition) != info.epoch:
                return False
        is_fit = member.context.is_whole and not self.broker.is_damaged
        return is_fit and member.meta.has_majority(self._loop.time())

    def _after_turn(self) -> None:
        """Act on a turn's news: see `on_turn` of `ClusterBroker`."""
        member = self.member
        if member.nodes_changed:
            member.nodes_changed = False
            metadata = member.context.metadata
            assert metadata is not None
            if self.links.identity.cluster_id != metadata.cluster_id:
                logger.info("cluster_joined cluster_id=%s", metadata.cluster_id)
                self.storage.directory.join_cluster(metadata.cluster_id)
                self.links.set_cluster(metadata.cluster_id)
            self.links.set_removed(metadata.removed)
            member.disk_memory.forget(frozenset(metadata.nodes))
            member.older_copies.forget(frozenset(metadata.nodes))
            member.clock.forget(metadata.nodes.keys(), self._loop.time())
            self.links.set_peers({node: info.peer_address for node, info in metadata.nodes.items()})
        if self._reviewed is not member.context.metadata:
            self._reviewed = member.context.metadata
            self.links.review()
        self._redirect()
        if self.broker.is_damaged and self._replacement.step(
            member.context.metadata, member.is_dispensable, has_diverged=member.has_diverged
        ):
            self.start_anew()
        self._step_older_copy()
        outcomes = member.outcomes
        member.outcomes = []
        self.operations.settle(outcomes)
        if member.transfer.wants_save() and self._saving is None:
            self._saving = watched(self._save_replicated())
        if not self._ready.is_set() and self._is_ready():
            self._ready.set()
            self._redirect()
            self.broker.is_watched = False
        if self._relieved is not None and (
            not any(member.context.leading) or not member.context.connected
        ):
            self._relieved.set()

    def _own_disk(self) -> str:
        """Describe this node's disk for the handshake. A damaged disk describes nothing: what
        damage has removed would look like an older copy."""
        if self.broker.is_damaged or self.storage.journal.damaged:
            return ""
        return self.member.disk_claim().text()

    def _objection(self, peer: PeerIdentity, known: disk_position.Known) -> Refusal | None:
        metadata = self.member.context.metadata
        info = metadata.nodes.get(peer.node_id) if metadata is not None else None
        if metadata is None or info is None:
            return None
        lost = disk_position.lost_since(known, peer.node_id, peer.incarnation, peer.disk)
        if lost or peer.stands_apart:
            self.broker.touch()
            may_begin_anew = self.member.older_copies.may_begin_anew(
                peer.node_id, peer.process, peer.stands_apart
            )
            text = f"the disk of {peer.node_id} is an older copy"
            text += f": it lacks {lost}" * bool(lost)
            text += "; it waits until the others are a majority without it" * (not may_begin_anew)
            return Refusal(OLDER_COPY if may_begin_anew else OLDER_COPY_WAITS, text)
        if info.incarnation != peer.incarnation:
            partitions = last_copies(metadata, (peer.node_id,))
            if partitions:
                text = empty_disk_text(peer.node_id, partitions)
                self.operations.refused[peer.node_id] = text
                return Refusal(LAST_COPY, text)
        self.operations.refused.pop(peer.node_id, None)
        return None

    def _step_older_copy(self) -> None:
        """Restart as another Raft peer once the other nodes are a majority without this one."""
        if not self.broker.may_begin_anew or self._begins_anew:
            return
        self._begins_anew = True
        if older_copy.mark(self.storage.directory.files, secrets.token_hex(8)):
            self.start_anew()

    async def _forget_aside(self) -> None:
        await self._ready.wait()
        await self._replacement.forget_aside(lambda: self.member.context.metadata)

    async def _save_replicated(self) -> None:
        """Write a snapshot of state received from other nodes, which counts once it is durable."""
        transfer = self.member.transfer
        covered = transfer.begin_save()
        try:
            await self.take_snapshot()
            self.broker.touch()
            transfer.saved(covered)
        except OSError as error:
            logger.error("snapshot_failed error=%r", str(error))
            await asyncio.sleep(SAVE_AGAIN_S)
            self.broker.touch()
        finally:
            self._saving = None

    @property
    def is_witness(self) -> bool:
        return self.config.cluster.witness

    # Shutdown

    async def leave(self) -> str:
        """Let other nodes take over the leaderships; returns where the clients may go."""
        member = self.member
        metadata = member.context.metadata
        if metadata is None:
            return ""
        member.detector.leave(self._loop.time())
        self._relieved = asyncio.Event()
        self.broker.is_watched = True
        self.broker.touch()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._relieved.wait()
        self.broker.touch()
        member.meta.hand_over(self._loop.time())
        return self._other_servers(metadata)

    def _other_servers(self, metadata: ClusterMetadata) -> str:
        """Return other nodes' client addresses in the form of a Server Reference."""
        is_removed = self.broker.is_removed
        addresses = [
            info.client_address
            for node, info in sorted(metadata.nodes.items())
            if node != self.config.node.id
            # A removed node has no links, so the metadata alone decides.
            and (is_removed or node in self.member.context.connected)
            and info.state == StateOfNode.UP
            and info.role == DATA
            and info.client_address
        ]
        return " ".join(addresses)

    def _redirect(self) -> None:
        """Send clients to other nodes if this node should not serve them. The reasons: it is
        drained or removed, or its disk is stalled, full, damaged or an older copy."""
        metadata = self.member.context.metadata
        if metadata is None or not self._ready.is_set():
            return
        info = metadata.nodes.get(self.config.node.id)
        text = ""
        if self.broker.is_removed:
            text = "this node was removed from the cluster"
        elif self.broker.older_copy:
            text = "the disk of this node is an older copy"
        elif self.broker.is_damaged:
            text = "the disk of this node is damaged"
        elif self.broker.disk.is_stalled:
            text = "the disk of this node does not answer"
        elif info is not None and info.state == StateOfNode.DOWN and self.member.state.disk_full:
            text = "the disk of this node is full"
        elif info is not None and info.state == StateOfNode.DRAINING:
            text = "this node is being drained"
        servers = self._other_servers(metadata) if text else ""
        if servers != self.member.state.redirect:
            self.broker.touch()
            self.member.node.redirect(servers, text)

    async def stop(self) -> None:
        """Close the links, write the last high watermarks, and let an older copy take part again
        after the next start."""
        for task in (self._saving, self._forgetting):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.links.stop()
        await self.broker.write_watermarks()
        older_copy.rejoin(self.storage.directory.files)


def member_config(config: Config, incarnation: str) -> ClusterNodeConfig:
    cluster = config.cluster
    return ClusterNodeConfig(
        DetectorConfig(heartbeat_s=cluster.heartbeat_s, suspect_s=cluster.suspect_s),
        ControllerConfig(replace_after_s=cluster.replace_after_s),
        ReplicationConfig(
            incarnation=incarnation,
            silent_s=cluster.silent_s,
            catch_up_bytes_per_s=cluster.catch_up_bytes_per_s or 1 << 40,
        ),
        is_witness=cluster.witness,
    )


def _recovered(storage: Storage, node: Node, damage: list[Damage]) -> ReplicatedState:
    """Rebuild the replicated state. `damage`: receives the damage that is found now."""

    def note(found: Damage) -> None:
        report_damage(found)
        damage.append(found)

    storage.opened.store.on_damage = note
    state = NodeState(node.state.config, storage.journal)
    state.now = node.state.now
    state.wall_us = time.time_ns() // 1000
    images = ReplicatedState(state)
    storage.replay_into(images)
    return images


def _load_uncommitted(member: ClusterNode, storage: Storage) -> None:
    """Load the records above the high watermarks until they are committed or truncated."""
    journal = storage.journal
    for partition, end in enumerate(journal.next_offset):
        start = journal.high_watermark[partition]
        while start < end:
            batches = storage.reader.read_batches(partition, start, end, PENDING_BYTES)
            if not batches:
                break
            member.load_uncommitted(batches)
            start = member.log.uncommitted[partition][-1].end_offset
