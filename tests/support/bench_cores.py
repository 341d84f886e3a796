"""The cores that a `NodeBench` drives: a cluster of one node. It starts from the batches of the
bench's log, and passes what its driver would pass."""

from typing import TYPE_CHECKING

from holdfast.log.batch import Batch
from holdfast.log.journal.journal import Journal
from holdfast.log.journal.segment import WriteGroup
from holdfast.node.cluster_node import ClusterNode
from holdfast.node.effects import Note
from holdfast.node.failure.detector import DetectorConfig
from holdfast.node.failure.health import Presence
from holdfast.node.features import RECORD_FEATURES
from holdfast.node.metadata.model import NodeInfo
from holdfast.node.metadata.store import MetaStore
from holdfast.node.node import Node
from holdfast.node.ownership import releases
from holdfast.node.parts import ClusterNodeConfig
from holdfast.node.placement.controller import ControllerConfig
from holdfast.node.raft.log import RaftState
from holdfast.node.replicate.config import ReplicationConfig
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from tests.support.sim_raft import carry_out

if TYPE_CHECKING:
    from tests.support.node_bench import NodeBench

Snapshot = list[tuple[int, bytes]]

NAME = "n1"
STEPS_MAX = 5000
"""The most steps of a start."""


def new_journal(partitions: int, next_offset: list[int], sequence: int) -> Journal:
    journal = Journal(partitions)
    journal.continue_at(next_offset, sequence)
    return journal


def journal_of(bench: "NodeBench") -> Journal:
    """A journal behind the log of the bench, which keeps all of it."""
    ends, sequence = [0] * bench.config.partitions, 0
    batches = [Batch(data) for data in bench.log]
    epochs = [(batch.partition, batch.epoch, batch.base_offset) for batch in batches]
    journal = Journal(bench.config.partitions, replicated=True, start_epochs=epochs)
    for batch in batches:
        ends[batch.partition] = batch.end_offset
        sequence += batch.count
    journal.continue_at(ends, sequence)
    journal.start_offsets[:] = [0] * bench.config.partitions
    return journal


def _is_about_metadata(effect: object) -> bool:
    """Whether it is a line of every start of a cluster, which says nothing about its clients."""
    return isinstance(effect, Note) and effect.event.startswith("metadata_")


class ClusterOfOne:
    """A node that is its whole cluster. Its metadata are on disk as soon as they are written."""

    def __init__(self, bench: "NodeBench") -> None:
        self.bench = bench
        self.raft: RaftState | None = None
        self.boots = 0

    def boot(self, snapshot: Snapshot, offsets: list[int]) -> None:
        bench = self.bench
        is_new = self.raft is None
        raft = self.raft = self.raft or RaftState()
        self.boots += 1
        journal = journal_of(bench)
        self.node = Node(bench.config, journal)
        self.node.tick(bench.now, bench.wall_us)
        recorded = RecordedState(self.node.state.config, journal)
        recorded.now, recorded.wall_us = bench.now, bench.wall_us
        replicated = ReplicatedState(recorded)
        for kind, data in snapshot:
            replicated.apply_snapshot_entry(kind, data)
        bench.prepare()
        for record in bench.records():
            if record.offset >= offsets[record.partition]:
                replicated.apply(record)
        assert replicated.damaged == 0
        features = ",".join((*RECORD_FEATURES, releases.FEATURE))
        nonce, attempt = f"{NAME}{self.boots}", (self.boots % 1000) / 1000
        meta = MetaStore(NAME, NAME, raft, nonce=nonce, random=lambda: 0.5, now=bench.now)
        self.cluster = ClusterNode(
            self.node,
            replicated,
            meta,
            Presence(NAME, f"{NAME}:1", f"{NAME}:2", "", features),
            ClusterNodeConfig(
                DetectorConfig(start_alone_after_s=0.0), ControllerConfig(), ReplicationConfig(NAME)
            ),
            lambda: attempt,
            bench.now,
        )
        self.tick()
        if is_new:
            info = NodeInfo(NAME, NAME, f"{NAME}:1", f"{NAME}:2", "")
            meta.create_cluster("bench", bench.config.partitions, 1, 1, info, bench.now)
        self._become_alone()

    def _become_alone(self) -> None:
        """Run as many turns as that takes. No time passes, because nothing has to wait for any."""
        bench = self.bench
        for _ in range(STEPS_MAX):
            self.end_turn()
            if self.cluster.context.is_alone:
                effects = self.node.state.effects
                effects[:] = [each for each in effects if not _is_about_metadata(each)]
                return
            if self.waits():
                bench.commit()
            self.tick()
            if self.node.state.work:
                self.node.handle_timers()
            self.cluster.handle_timers(bench.now)
        raise AssertionError("the node does not become alone")

    def tick(self) -> None:
        bench = self.bench
        state = self.node.state
        self.node.tick(bench.now, bench.wall_us)
        state.wall_us = self.cluster.clock.tick(bench.now, bench.wall_us)
        recorded = self.cluster.replicated.state
        recorded.now, recorded.wall_us = bench.now, state.wall_us
        self.cluster.tick(bench.now)

    def handle_timers(self) -> None:
        self.node.handle_timers()
        self.cluster.handle_timers(self.bench.now)

    def end_turn(self) -> bool:
        cluster = self.cluster
        now = self.bench.now
        cluster.end_turn(now)
        effects = cluster.effects
        assert not cluster.context.outgoing
        assert not effects.reads
        effects.outcomes = []
        # As in the checks of every TIDY_S.
        self.node.state.effects.extend(cluster.replicated.state.pop_effects())
        has_written = bool(effects.persists)
        while effects.persists:
            assert self.raft is not None
            self.raft = carry_out(self.raft, effects.persists.pop(0))
            cluster.handle_persisted(now)
        return has_written

    def taken(self, group: WriteGroup) -> None:
        self.cluster.handle_taken(group, self.bench.now)

    def durable(self) -> None:
        self.cluster.handle_durable(self.bench.now)

    def waits(self) -> bool:
        state = self.node.state
        return bool(state.journal.pending_bytes or self.cluster.local.waiting())
