"""What a process begins with: the cores of a node, opened on what its disk has, as
api/clustering.py does it."""

import random
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, cast

from holdfast.cluster.member import Member
from holdfast.cluster.parts import MemberConfig
from holdfast.drivers import older_copy
from holdfast.drivers.raft_files import RaftFiles
from holdfast.drivers.storage import Storage
from holdfast.log.files import MANIFEST, DataDirectory, Manifest
from holdfast.log.journal import Journal
from holdfast.log.opening import create, read_manifest
from holdfast.node.config import NodeConfig
from holdfast.node.node import Node
from holdfast.node.state import NodeState
from holdfast.replication import disk_position
from holdfast.replication.controller import ControllerConfig
from holdfast.replication.detector import DetectorConfig
from holdfast.replication.health import Presence
from holdfast.replication.metadata import NodeInfo
from holdfast.replication.metastate import member_id
from holdfast.replication.metastore import MetaStore
from holdfast.replication.replica_config import ReplicationConfig
from holdfast.sim.watching import WatchedImages

if TYPE_CHECKING:
    from holdfast.sim.host import Host

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
        self.journal: Journal = self.storage.journal
        self.node: Node = Node(
            NodeConfig(
                node_id=host.name,
                partitions=settings.partitions,
                sys_interval_s=0,
                outbox_messages=settings.outbox_messages,
                inflight_max=8,
            ),
            self.journal,
        )
        self.state: NodeState = self.node.state
        self.state.client_id_prefix = f"auto-{host.name}-{number}-"
        self.node.tick(host.clock(), host.wall_us())
        state = NodeState(self.state.config, self.journal)
        state.now = self.state.now
        state.wall_us = self.state.wall_us
        self.images: WatchedImages = WatchedImages(state)
        self.storage.replay_into(self.images)
        self.raft_files: RaftFiles = RaftFiles(
            host.disk, member_id(host.name, self.incarnation), is_new=not manifest.cluster_id
        )
        self.meta: MetaStore = MetaStore(
            host.name,
            self.incarnation,
            self.raft_files.state,
            nonce=f"{host.name}{number}",
            random=chance.random,
            now=self.state.now,
        )
        self.presence = Presence(
            self.incarnation, f"{host.name}:1", f"{host.name}:2", "", disk_position.FEATURE
        )
        self.member: Member = Member(
            self.node,
            self.images,
            self.journal,
            self.meta,
            self.presence,
            MemberConfig(
                DetectorConfig(),
                ControllerConfig(replace_after_s=settings.replace_after_s),
                ReplicationConfig(incarnation=self.incarnation),
                is_witness=host.is_witness,
            ),
            chance.random,
            self.state.now,
            self.storage.lacking(),
        )
        self._load_uncommitted()

    def _load_uncommitted(self) -> None:
        journal = self.journal
        for partition, end in enumerate(journal.next_offset):
            start = journal.high_watermark[partition]
            while start < end:
                batches = self.storage.reader.read_batches(partition, start, end, PENDING_BYTES)
                if not batches:
                    break
                self.member.load_uncommitted(batches)
                start = self.member.log.uncommitted[partition][-1].end_offset

    def create_cluster(self, host: "Host") -> None:
        settings = host.world.settings
        self.meta.create_cluster(
            "simulated",
            settings.partitions,
            settings.replication_factor,
            settings.min_insync,
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
