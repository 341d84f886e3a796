"""What a process begins with: the cores of a node, opened on what its disk has, as
process/cluster.py does it."""

import random
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, cast

from holdfast.io.disk import older_copy
from holdfast.io.disk.raft_files import RaftFiles
from holdfast.io.disk.storage import Storage
from holdfast.log.batch import Batch
from holdfast.log.files.data_directory import create, read_manifest
from holdfast.log.files.layout import MANIFEST, DataDirectory, Manifest
from holdfast.log.journal.journal import Journal
from holdfast.log.reading.scan import Damage
from holdfast.node import attendance
from holdfast.node.cluster_node import ClusterNode
from holdfast.node.failure.detector import DetectorConfig
from holdfast.node.failure.health import Presence
from holdfast.node.features import RECORD_FEATURES
from holdfast.node.metadata.model import NodeInfo
from holdfast.node.metadata.state_machine import peer_id
from holdfast.node.metadata.store import MetaStore
from holdfast.node.node import Node
from holdfast.node.node_state import NodeState
from holdfast.node.ownership import releases, reports
from holdfast.node.parts import ClusterNodeConfig
from holdfast.node.placement.controller import ControllerConfig
from holdfast.node.replicate import disk_position, incomplete
from holdfast.node.replicate.config import ReplicationConfig
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.security.peer_identity import level_word
from tests.sim.watching import AppliedRecords

if TYPE_CHECKING:
    from tests.sim.host import Host

PENDING_BYTES: Final = 8 << 20


class Cores:
    """Raises OSError if the disk does not let it."""

    def __init__(self, host: "Host", owner: object, number: int, chance: random.Random) -> None:
        """`owner`: of the directory's lock; `number`: of the process on this host."""
        settings = host.world.settings
        self.directory: DataDirectory = _directory(host)
        manifest = self.directory.manifest
        self.incarnation = manifest.incarnation
        lock = host.disk.lock_as(owner, "lock")
        assert lock is not None
        self.storage: Storage = Storage.recover(
            PurePosixPath(host.name),  # type: ignore[arg-type]
            self.directory,
            lock,
            settings.segment_bytes,
        )
        self.mark = host.mark()
        self.began_incomplete = self.mark.may_lack_records
        self.journal: Journal = self.storage.journal
        self.node: Node = Node(
            host.world.node_config(host.name),
            self.journal,
        )
        self.state: NodeState = self.node.state
        self.state.client_id_prefix = f"auto-{host.name}-{number}-"
        self.node.tick(host.clock(), host.wall_us())
        state = RecordedState(self.state.config, self.journal)
        state.now = self.state.now
        state.wall_us = self.state.wall_us
        self.images: ReplicatedState = ReplicatedState(state)
        self.damage: list[Damage] = []
        """What was found before the process runs."""
        self.storage.opened.store.on_damage = self.damage.append
        self.storage.replay_into(self.images)
        self.raft_files: RaftFiles = RaftFiles(
            host.disk, peer_id(host.name, self.incarnation), is_new=not manifest.cluster_id
        )
        self.meta: MetaStore = MetaStore(
            host.name,
            self.incarnation,
            self.raft_files.state,
            nonce=f"{host.name}{number}",
            random=chance.random,
            now=self.state.now,
        )
        given_up = older_copy.nodes_given_up(host.disk)
        self.presence = Presence(
            self.incarnation,
            f"{host.name}:1",
            f"{host.name}:2",
            "",
            ",".join(
                (
                    disk_position.FEATURE,
                    *RECORD_FEATURES,
                    releases.FEATURE,
                    reports.FEATURE,
                    attendance.FEATURE,
                    level_word(),
                    *[incomplete.FEATURE] * self.began_incomplete,
                    *[attendance.RECOVERS] * (given_up is not None),
                )
            ),
            zone=host.zone,
        )
        unstored = self.storage.unstored()
        self.cluster_node: ClusterNode = ClusterNode(
            self.node,
            self.images,
            self.meta,
            self.presence,
            ClusterNodeConfig(
                DetectorConfig(),
                ControllerConfig(replace_after_s=settings.replace_after_s),
                ReplicationConfig(
                    incarnation=self.incarnation, is_incomplete=self.began_incomplete
                ),
                role=host.role,
            ),
            chance.random,
            self.state.now,
            lacking=[each for each in self.storage.lacking() if each not in unstored],
            unstored=unstored,
        )
        older_copy.load_memory(host.disk, self.cluster_node.disk_memory)
        self.applied = AppliedRecords(self.cluster_node.applier)
        if given_up is not None:
            self.cluster_node.attendance.recover(given_up)
        if settings.slice_steps:
            self.state.steps_per_turn = self.state.steps_at_once = settings.slice_steps
            self.cluster_node.applier.records_per_turn = settings.slice_steps
        self._load_uncommitted()

    def _load_uncommitted(self) -> None:
        journal = self.journal
        for partition, end in enumerate(journal.next_offset):
            start = journal.high_watermark[partition]
            while start < end:
                batches = self.storage.reader.read_batches(partition, start, end, PENDING_BYTES)
                if not batches:
                    break
                self.cluster_node.load_uncommitted(batches)
                start = Batch(batches[-1], check=False).end_offset

    def create_cluster(self, host: "Host") -> None:
        settings = host.world.settings
        in_plan = (settings.replication_factor, settings.min_insync)
        self.meta.create_cluster(
            "simulated",
            settings.partitions,
            *((1, 1) if settings.begins_alone and settings.is_resized else in_plan),
            NodeInfo(
                host.name,
                self.incarnation,
                self.presence.peer_address,
                self.presence.client_address,
                self.presence.admin_address,
            ),
            self.state.now,
        )


def _directory(host: "Host") -> DataDirectory:
    files = host.disk
    older_copy.begin_anew(files, cast("Path", PurePosixPath(host.name)))
    if MANIFEST not in files.list(""):
        incarnation = host.new_incarnation()
        manifest = Manifest(host.name, host.world.settings.partitions, "", "", incarnation)
        return create(files, manifest)
    manifest = read_manifest(files, cast("object", PurePosixPath(host.name)))  # type: ignore[arg-type]
    return DataDirectory(files, manifest)
