"""Joins a node to a cluster: what it opens, when it is ready, how it leaves."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from holdfast import __version__
from holdfast.api.cluster_operations import ClusterError, ClusterOperations
from holdfast.config.schema import Config
from holdfast.io.conversion.raft_metadata import read_metadata
from holdfast.io.disk import older_copy
from holdfast.io.disk.maintenance import Maintenance
from holdfast.io.disk.process_identity import boot_identity
from holdfast.io.disk.raft_files import DamagedRaft, RaftFiles
from holdfast.io.disk.replacement import AsideDirectory
from holdfast.io.disk.storage import Storage, StorageError, report_damage
from holdfast.io.disk.unsynced import UnsyncedMark
from holdfast.io.event_loop.broker import Broker
from holdfast.io.event_loop.commands.agreed import AgreedCommandRunner
from holdfast.io.event_loop.commands.agreement import MetadataAgreement
from holdfast.io.event_loop.failures import watched
from holdfast.io.peers import questions
from holdfast.io.peers.authentication import PeerAuth
from holdfast.io.peers.creation import create_when_connected
from holdfast.io.peers.links import PeerHandler, PeerIdentity, PeerLinks
from holdfast.io.settings.addresses import admin_address, client_addresses
from holdfast.io.settings.node_settings import journal_waits
from holdfast.log.batch import Batch
from holdfast.log.files.data_directory import DataDirectoryError, read_manifest
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import MANIFEST
from holdfast.log.journal.epoch_folders import LEASE
from holdfast.log.journal.journal import Journal
from holdfast.log.reading.segment_reader import Damage
from holdfast.node import attendance
from holdfast.node.cluster_node import ClusterNode
from holdfast.node.failure.detector import DetectorConfig
from holdfast.node.failure.health import Presence
from holdfast.node.features import (
    AGREED_ACCESS,
    AGREED_GENERATION,
    AGREED_USERS,
    GIVES_UP_RECORDS,
    MEMBER_TABLE,
    RECORD_FEATURES,
    WILL_OFFSETS,
)
from holdfast.node.metadata import generation
from holdfast.node.metadata.commands import PutGeneration, Resize
from holdfast.node.metadata.model import (
    AUTOMATIC,
    CAPACITY_DEFAULT,
    GATEWAY,
    WITNESS,
    ClusterMetadata,
)
from holdfast.node.metadata.requests import Outcome
from holdfast.node.metadata.state_machine import peer_id
from holdfast.node.metadata.store import MetaStore
from holdfast.node.node import Node
from holdfast.node.ownership import releases, reports
from holdfast.node.parts import ClusterNodeConfig
from holdfast.node.placement.controller import ControllerConfig
from holdfast.node.replicate import disk_position
from holdfast.node.replicate.config import ReplicationConfig
from holdfast.node.replicate.incomplete import FEATURE as BEGAN_INCOMPLETE
from holdfast.node.runtime.peer_check import PeerCheck, role_text
from holdfast.node.runtime.replacement import Replacement
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.security.passwords import PasswordFile
from holdfast.security.peer_identity import (
    ANSWERS_APART,
    OF_LEVELS,
    PROGRAM,
    WIRE_LOWEST,
    level_word,
)

logger = logging.getLogger("holdfast")

LEAVE_S: Final = 3.0
"""The time in seconds that other nodes have at shutdown to take over leaderships."""
PENDING_BYTES: Final = 8 << 20
"""The bytes of uncommitted batches read at a time at the start."""
MEETING_S: Final = 2.0
"""The longest wait in seconds at the start for other nodes whose hosts do not answer."""
GENERATION_S: Final = 0.2
"""The interval in seconds between two looks at the generation of the log."""
SAVE_AGAIN_S: Final = 1.0
"""The pause in seconds after a snapshot or manifest that could not be written."""


class Held(Struct, frozen=True):
    """The shared directory whose lease this process holds."""

    storage: Storage
    images: ReplicatedState
    """The state after the last record of the journal."""
    confirm: Callable[[], None]
    """See `JournalWriter`."""


class ClusterMembership:
    """The process of a cluster node: the `ProcessPort` of its turns.

    It opens and connects the parts of the node. Raises `StorageError` if that fails.
    """

    def __init__(
        self,
        config: Config,
        new_node: Callable[[Journal], Node],
        password_file: PasswordFile | None,
        on_failed: Callable[[BaseException], None],
        start_anew: Callable[[], None],
        held: Held | None = None,
    ) -> None:
        """`start_anew`: called to restart the process. `held`: of a node that shares its
        directory."""
        self.config = config
        self._loop = asyncio.get_running_loop()
        self._start_anew = start_anew
        self._ready = asyncio.Event()
        # Set during `leave`; done when this node leads nothing or is connected to no other node.
        self._relieved = asyncio.Event()
        self._saving: asyncio.Task[None] | None = None
        self._replication: tuple[object, ...] = ()
        self._storing: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.auth = _load_auth(config)
        root = Path(config.node.data)
        self._aside = AsideDirectory(root)
        storage = _open_storage(config, root) if held is None else held.storage
        self.storage = storage
        self._held = held
        self.presence = _presence(config, storage)
        node = new_node(storage.journal)
        # A witness stores no records.
        is_durable = config.log.durability == "fsync" or self.is_witness
        self._mark = _open_mark(storage, durable=is_durable)
        found: list[Damage] = []
        images = _recovered(storage, node, found) if held is None else held.images
        raft_files = _open_raft(storage)
        self.cluster_node = self._new_cluster_node(node, images, raft_files)
        _load_uncommitted(self.cluster_node, storage)
        self.broker = Broker(
            self.cluster_node,
            self._loop,
            storage,
            password_file,
            waits=journal_waits(config),
            durable=self._mark.durable,
            disk_stall_s=config.cluster.disk_stall_s,
            on_failed=partial(self._failed, on_failed),
            raft_files=raft_files,
            new_links=partial(self._new_links, self.auth),
            process=self,
            replacement=Replacement(config.node.id, node.state, self._aside.path),
            confirm=None if held is None else held.confirm,
        )
        self.links = self.broker.links
        self.peers = PeerCheck(self.broker.runtime)
        self.links.memory = self.cluster_node.disk_memory
        self.links.partitions = str(storage.journal.partitions)
        self.links.own_disk = self.peers.own_disk
        self.links.objection = self.peers.objection
        self.operations = ClusterOperations(
            config, self.presence, self.broker, self.peers.refused, self._loop
        )
        self.maintenance = None if self.is_witness else Maintenance(self.broker, storage, config)
        """A witness stores nothing that needs it."""
        if storage.journal.damaged or found:
            logger.error("partitions_damaged partitions=%s", sorted(storage.journal.damaged))
            self.broker.runtime.distrust_disk()

    def became_complete(self) -> None:
        """Marks the directory as one that lacks nothing."""
        try:
            self._mark.renew()
        except OSError as error:
            # The old mark stays, which only says more than is true.
            logger.error("unsynced_mark_not_written error=%r", str(error))

    def _failed(self, on_failed: Callable[[BaseException], None], error: BaseException) -> None:
        """Stops, and notes that unsynced records may be lost although the machine runs."""
        try:
            self._mark.note_failure()
        except OSError as failure:
            logger.critical("unsynced_mark_not_written error=%r", str(failure))
        on_failed(error)

    def _new_cluster_node(
        self, node: Node, images: ReplicatedState, files: RaftFiles
    ) -> ClusterNode:
        config = self.config
        random = secrets.SystemRandom().random
        now = self._loop.time()
        incarnation = self.presence.incarnation
        meta = MetaStore(
            config.node.id,
            incarnation,
            files.state,
            nonce=secrets.token_hex(8),
            random=random,
            now=now,
        )
        unstored = self._unstored(meta.metadata)
        made = ClusterNode(
            node,
            images,
            meta,
            self.presence,
            member_config(config, incarnation, is_incomplete=self._mark.may_lack_records),
            random,
            now,
            lacking=[each for each in self.storage.lacking() if each not in unstored],
            unstored=unstored,
        )
        older_copy.load_memory(self.storage.directory.files, made.disk_memory)
        given_up = older_copy.nodes_given_up(self.storage.directory.files)
        if given_up is not None:
            made.attendance.recover(given_up)
        try:
            self._check_directory(meta.metadata)
        except StorageError:
            self.storage.close()
            raise
        manifest = self.storage.directory.manifest
        made.awaits_generation = manifest.restored != 0
        made.feeds.receiver.begin(manifest.generation)
        if not config.cluster.peer_bind:
            try:
                _check_has_no_others(meta.metadata, meta.node_id, Path(config.node.data))
            except StorageError:
                self.storage.close()
                raise
        return made

    def _unstored(self, metadata: ClusterMetadata | None) -> dict[int, int]:
        """The partitions that were fed to this node. A node that was its whole cluster has none."""
        is_alone = metadata is not None and tuple(metadata.nodes) == (self.config.node.id,)
        return {} if is_alone else self.storage.unstored()

    def _check_directory(self, metadata: ClusterMetadata | None) -> None:
        """Checks that the directory is one of this role, and its disk larger than the reserve.
        Raises `StorageError`."""
        node, root = self.config.node.id, self.config.node.data
        role = self.config.cluster.node_role()
        info = None if metadata is None else metadata.nodes.get(node)
        if info is not None and info.role != role:
            raise StorageError(f"{root}: {role_text(node, info.role, role)}")
        if role == GATEWAY and any(self.storage.journal.next_offset):
            raise StorageError(f"{root} has records, and a gateway stores none: give an empty one")
        reserve, total = self.config.log.reserve_bytes, self.storage.total_bytes()
        if reserve >= total:
            raise StorageError(
                f"log.reserve_bytes = {reserve}: the disk of {root} has {total} bytes, so all"
                " messages of QoS 1 and 2 would be refused; 0 is a reserve by the disk's size"
            )

    def _new_links(self, auth: PeerAuth, handler: PeerHandler) -> PeerLinks:
        config = self.config
        cluster = config.cluster
        manifest = self.storage.directory.manifest
        identity = PeerIdentity(
            config.node.id,
            self.presence.incarnation,
            manifest.cluster_id,
            role=cluster.node_role(),
            peer_address=self.presence.peer_address,
            client_address=self.presence.client_address,
            admin_address=self.presence.admin_address,
            features=",".join(
                (
                    disk_position.FEATURE,
                    ANSWERS_APART,
                    questions.FEATURE,
                    *(each for each in RECORD_FEATURES if each not in OF_LEVELS),
                    WILL_OFFSETS,
                    releases.FEATURE,
                    reports.FEATURE,
                    AGREED_USERS,
                    f"{PROGRAM}{__version__}",
                    AGREED_ACCESS,
                    AGREED_GENERATION,
                    GIVES_UP_RECORDS,
                    level_word(),
                    attendance.FEATURE,
                    *[MEMBER_TABLE] * (config.federation is not None),
                    *[BEGAN_INCOMPLETE] * self._mark.may_lack_records,
                    *[attendance.RECOVERS] * self.cluster_node.attendance.is_recovering,
                    *filter(None, [generation.word_of(manifest.restored)]),
                )
            ),
            partitions=str(manifest.partitions) if manifest.cluster_id else "",
            zone=self.presence.zone,
            capacity=str(cluster.capacity) if cluster.capacity != CAPACITY_DEFAULT else "",
            wire_lowest=WIRE_LOWEST,
        )
        return PeerLinks(self._loop, identity, auth, handler, cluster.peer_bind, cluster.peer_port)

    async def start(self) -> None:
        """Listens for other nodes and dials them. Raises `OSError` for an unusable address."""
        if self.config.cluster.peer_bind or self._held is not None:
            self.broker.agreement = MetadataAgreement(self.cluster_node, self.operations.propose)
        reason = older_copy.reason_apart(self.storage.directory.files)
        if reason:
            self.broker.runtime.report_older_copy(reason, may_begin_anew=False)
        await self.links.start()
        self.links.set_join(self.config.cluster.join)
        if self._aside.path:
            self._tasks.append(watched(self._forget_aside()))
        replacement = self.broker.runtime.replacement
        self._tasks.append(watched(self._aside.follow_kept(replacement.note_kept)))
        self._tasks.append(watched(self._follow_generation()))
        self.broker.touch()
        if self.storage.directory.manifest.cluster_id:
            return
        if self.config.cluster.wait_for_init:
            text = "serves when it has joined a peer's cluster, or after: holdfast cluster init"
            logger.info("cluster_awaited join=%r text=%r", self.config.cluster.join, text)
        else:
            meta, create = self.cluster_node.meta, self.operations.init
            creation = create_when_connected(self.config, self.links, meta, create, ClusterError)
            self._tasks.append(watched(creation))

    async def wait_until_ready(self) -> None:
        """Waits until this node leads each partition of its cluster or follows its leader, and has
        met the other nodes that run. Counter-example: the disk of the only voter is an older copy.
        It is a majority by itself, and acknowledges messages before another node can tell it."""
        await self._ready.wait()
        await self.links.wait_for_peers(MEETING_S)

    # ProcessPort

    def take_nodes(self, metadata: ClusterMetadata) -> None:
        """Adjusts the links, because the cluster's nodes have changed."""
        if self.links.identity.cluster_id != metadata.cluster_id:
            logger.info("cluster_joined cluster_id=%s", metadata.cluster_id)
            self._store_cluster_id(metadata.cluster_id)
            self.links.set_cluster(metadata.cluster_id, len(metadata.partitions))
        self._announce_replication(metadata)
        self.operations.access.on_change()
        self.links.set_removed(metadata.removed)
        self.links.set_peers({node: info.peer_address for node, info in metadata.nodes.items()})

    def _announce_replication(self, metadata: ClusterMetadata) -> None:
        """Logs the settings in force and the wanted ones when they change."""
        wanted = metadata.replication
        is_automatic = wanted is not None and wanted.is_automatic
        in_force = (metadata.replication_factor, metadata.min_insync)
        shown = (*in_force, *metadata.wanted_replication, is_automatic)
        before, self._replication = self._replication, shown
        if before not in ((), shown):
            text = (
                "replication factor=%d min_insync=%d wanted_factor=%d wanted_min_insync=%d auto=%s"
            )
            logger.info(text, *shown)

    def _store_cluster_id(self, cluster_id: str) -> None:
        """Writes it to the manifest, again and again while the disk is full. A node that starts
        before it is there gets it from the metadata, as now."""
        try:
            self.storage.directory.join_cluster(cluster_id)
        except OSError as error:
            logger.error("cluster_id_not_stored error=%r", str(error))
            self._storing = self._loop.call_later(SAVE_AGAIN_S, self._store_cluster_id, cluster_id)

    def take_users(self) -> None:
        """Puts the users that the nodes have agreed on in force."""
        commands = self.broker.commands
        if isinstance(commands, AgreedCommandRunner):
            commands.changed()
        self.operations.access.on_change()

    def proposals_done(self, outcomes: list[tuple[int, Outcome]]) -> None:
        """Resolves the operator's operations."""
        self.operations.settle(outcomes)

    def save_snapshot(self) -> None:
        """Writes a snapshot of state received from other nodes, unless one is being written."""
        if self._saving is None:
            self._saving = watched(self._save_replicated())

    def became_ready(self) -> None:
        """Ends `wait_until_ready`. A node without others keeps its users in its file, unless it
        once had others and agreed with them on users."""
        agreement = MetadataAgreement(self.cluster_node, self.operations.propose)
        if self.broker.agreement is None and agreement.current() is not None:
            self.broker.agreement = agreement
        self.operations.access.is_ready = True
        if not self.config.cluster.peer_bind:
            self._follow_nodes()
        self._ready.set()

    def _follow_nodes(self) -> None:
        """Lets the replication follow the number of nodes, if this cluster has begun as one node:
        nothing else was ever wanted. It is proposed once, because the next start does it again."""
        metadata = self.cluster_node.context.metadata
        assert metadata is not None
        in_force = (metadata.replication_factor, metadata.min_insync)
        if len(metadata.nodes) == 1 and not metadata.replication and in_force == AUTOMATIC[0]:
            self.operations.propose(Resize(0, True, 0, 0), lambda outcome: None)

    def relieved(self) -> None:
        """Continues with `leave`."""
        self._relieved.set()

    def set_aside(self, *, keep: bool) -> None:
        """Starts again with an empty directory."""
        if self._aside.mark(keep=keep):
            self._start_anew()

    def stand_apart(self, text: str) -> None:
        """Stores that this node stands apart, also after a crash."""
        older_copy.stand_apart(self.storage.directory.files, text)

    def recovered(self) -> None:
        """Stores that this disk has the log of the others."""
        older_copy.recovered(self.storage.directory.files)

    def begin_anew(self) -> None:
        """Starts again as another Raft peer, because the disk is an older copy."""
        if older_copy.mark(self.storage.directory.files, secrets.token_hex(8)):
            self._start_anew()

    async def _forget_aside(self) -> None:
        await self._ready.wait()
        replacement = self.broker.runtime.replacement
        context = self.cluster_node.context
        await self._aside.forget(
            lambda: replacement.has_everything(context.metadata),
            lambda: set(range(len(context.leading))) - context.unstored,
            lambda: context.generation,
        )
        replacement.aside = self._aside.path

    async def _follow_generation(self) -> None:
        """Keeps the generation of the log in the manifest, and lets the nodes agree on one after a
        restore."""
        refused = ""
        while True:
            await asyncio.sleep(GENERATION_S)
            cluster_node, directory = self.cluster_node, self.storage.directory
            context, manifest = cluster_node.context, directory.manifest
            metadata, mark = context.metadata, manifest.restored
            if metadata is None:
                continue
            if mark and cluster_node.meta.has_majority(self._loop.time()):
                node, features = self.config.node.id, context.features
                found = generation.review(node, mark, features, context.connected, metadata)
                older = context.nodes_without(AGREED_GENERATION, witnesses=True)
                if found.proposal is not None and older:
                    text = f"upgrade {', '.join(older)}: until then nothing reads this node's log"
                    if text != refused:
                        logger.error("log_generation_not_agreed reason=%r", text)
                    refused = text
                elif found.proposal is not None:
                    await self._propose_generation(found.proposal)
                if found.is_answered:
                    mark = 0
                if self.cluster_node.awaits_generation and (found.is_answered or older):
                    self.cluster_node.awaits_generation = False
                    self.broker.touch()
            number = context.generation
            has_marks = context.has_data and context.unstored and not manifest.restored
            if has_marks and not self.cluster_node.feeds.receiver.is_of_generation():
                continue
            if (mark, number) != (manifest.restored, manifest.generation):
                try:
                    if has_marks:
                        # A start takes the marks of the newest snapshot for those of this number.
                        assert self.maintenance is not None
                        await self.maintenance.take_snapshot(always=True)
                    directory.write_manifest(replace(manifest, generation=number, restored=mark))
                except OSError as error:
                    logger.error("log_generation_not_stored error=%r", str(error))
                else:
                    logger.info("log_generation number=%d agreed=%s", number, not mark)

    async def _propose_generation(self, proposal: PutGeneration) -> None:
        done = asyncio.Event()
        self.operations.propose(proposal, lambda outcome: done.set())
        await done.wait()

    async def _save_replicated(self) -> None:
        """Writes a snapshot of state received from other nodes, which counts once it is durable."""
        transfer = self.cluster_node.transfer
        covered = dict(transfer.unsaved)
        try:
            assert self.maintenance is not None
            await self.maintenance.take_snapshot(always=True)
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
        return self.config.cluster.node_role() == WITNESS

    # Shutdown

    async def leave(self) -> str:
        """Lets other nodes take over the leaderships; returns where the clients may go."""
        if self.cluster_node.context.metadata is None:
            return ""
        cluster = self.broker.runtime
        cluster.leave(self._loop.time())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._relieved.wait()
        return await self.broker.hand_over()

    async def stop(self) -> None:
        """Closes the links and writes the last high watermarks."""
        for task in (self._saving, *self._tasks):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._storing is not None:
            self._storing.cancel()
        await self.links.stop()
        await self.broker.write_last_watermarks()


def member_config(
    config: Config, incarnation: str, *, is_incomplete: bool = False
) -> ClusterNodeConfig:
    cluster = config.cluster
    return ClusterNodeConfig(
        DetectorConfig(
            cluster.heartbeat_s,
            cluster.suspect_s,
            start_alone_after_s=cluster.start_alone_after_s,
        ),
        ControllerConfig(replace_after_s=cluster.replace_after_s),
        ReplicationConfig(
            incarnation=incarnation,
            is_incomplete=is_incomplete,
            silent_s=cluster.silent_s,
            catch_up_bytes_per_s=cluster.catch_up_bytes_per_s or 1 << 40,
        ),
        role=cluster.node_role(),
        drain_clients_per_s=cluster.drain_clients_per_s,
    )


def _load_auth(config: Config) -> PeerAuth:
    try:
        return PeerAuth.load(config.cluster)
    except (ValueError, OSError) as error:
        raise StorageError(str(error)) from error


def _open_storage(config: Config, root: Path) -> Storage:
    """Opens the directory of a node that serves it alone."""
    _begin_anew_if_decided(root)
    return Storage.open(
        root,
        config.node.id,
        config.cluster.partitions,
        config.log.segment_bytes,
        secrets.token_hex(8),
    )


def _open_raft(storage: Storage) -> RaftFiles:
    manifest = storage.directory.manifest
    try:
        return RaftFiles(
            storage.directory.files,
            peer_id(manifest.node_id, manifest.incarnation),
            is_new=not manifest.cluster_id,
        )
    except DamagedRaft as error:
        storage.close()
        raise StorageError(str(error)) from error


def _presence(config: Config, storage: Storage) -> Presence:
    return Presence(
        storage.directory.manifest.incarnation,
        config.cluster.peer_address(),
        client_addresses(config),
        admin_address(config),
        version=__version__,
        zone=config.cluster.zone,
        capacity=config.cluster.capacity,
    )


def _open_mark(storage: Storage, *, durable: bool) -> UnsyncedMark:
    try:
        mark = UnsyncedMark(storage.directory.files, boot_identity(), durable=durable)
    except OSError as error:
        storage.close()
        raise StorageError(str(error)) from error
    if mark.may_lack_records:
        text = "it leads nothing until it is known to have them"
        logger.warning("acknowledged_records_may_be_lost text=%r", text)
    return mark


def _begin_anew_if_decided(root: Path) -> None:
    try:
        if older_copy.begin_anew_at(root):
            logger.warning("older_copy_begins_anew text='it fetches what is missing'")
    except (OSError, DataDirectoryError) as error:
        raise StorageError(f"{root}: the older copy cannot be used: {error}") from error


def _recovered(storage: Storage, node: Node, damage: list[Damage]) -> ReplicatedState:
    """Rebuilds the replicated state. `damage`: receives the damage that is found now."""

    def note(found: Damage) -> None:
        report_damage(found)
        damage.append(found)

    storage.opened.store.on_damage = note
    state = RecordedState(node.state.config, storage.journal)
    state.now = node.state.now
    state.wall_us = time.time_ns() // 1000
    images = ReplicatedState(state)
    storage.replay_into(images)
    return images


def check_may_share(root: Path) -> None:
    """Checks that other nodes do not have what is in a directory that is not shared yet. Raises
    `StorageError`."""
    if (root / MANIFEST).exists() and not (root / LEASE).exists():
        try:
            manifest = read_manifest(OsFileSystem(root), root)
            metadata = read_metadata(root, manifest)
        except (DataDirectoryError, DamagedRaft) as error:
            raise StorageError(f"{root}: {error}") from error
        _check_has_no_others(metadata, manifest.node_id, root)


def _check_has_no_others(metadata: ClusterMetadata | None, own: str, root: Path) -> None:
    """Refuses to serve alone what other nodes may have, too."""
    others = [] if metadata is None else sorted(metadata.nodes.keys() - {own})
    if others:
        raise StorageError(
            f"{root} is a cluster node's, with {', '.join(others)}: start it with"
            " cluster.peer_bind set, or give another data directory"
        )


def _load_uncommitted(cluster_node: ClusterNode, storage: Storage) -> None:
    """Loads the records above the high watermarks until they are committed or truncated."""
    journal = storage.journal
    for partition, end in enumerate(journal.next_offset):
        start = journal.high_watermark[partition]
        while start < end:
            batches = storage.reader.read_batches(partition, start, end, PENDING_BYTES)
            if not batches:
                break
            cluster_node.load_uncommitted(batches)
            start = Batch(batches[-1], check=False).end_offset
