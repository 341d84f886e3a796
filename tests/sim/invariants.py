"""The invariants of a node's parts, which cost too much for production: sums over their tables."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.process import Process

TURNS: int = 7
"""The tables of a process are checked after each turn of so many, and at the end of a run. A table
with a violation keeps it, and a check of each turn takes a quarter of a run. So many runs find
more. A run of one seed checks each turn, to find the first that is wrong."""


def check_each_turn() -> None:
    global TURNS
    TURNS = 1


def check_invariants(process: "Process", turn: int = 0) -> None:
    """Raise `AssertionError`, with the node's name, for one that does not hold after a turn."""
    cluster_node = process.cluster_node
    try:
        cluster_node.meta._raft.check()
        process.journal.check()
        process.runtime.links.relayed.check()
        cluster_node.detector.check(process.state.now)
        if not process.host.is_witness:
            cluster_node.replication.check()
            cluster_node.applier.check()
            cluster_node.forwarding.check()
            cluster_node.admission.check()
            cluster_node.barriers.check()
            cluster_node.remote_reads.check()
            cluster_node.fetch_server.check()
        if turn % TURNS == 0:
            _check_tables(process)
    except AssertionError as error:
        raise AssertionError(f"{process.host.name}: {error}") from error


def _check_tables(process: "Process") -> None:
    cluster_node = process.cluster_node
    process.state.check()
    if process.host.is_witness:
        return
    _check_saved(process)
    cluster_node.replicated.state.check()
    cluster_node.replicated.check()
    cluster_node.groups.coordinator.check()
    for assignments in cluster_node.groups.agent.assignments.values():
        assignments.check()
        assert cluster_node.context.is_alone or assignments.sent.is_empty(), "in no table"


def _check_saved(process: "Process") -> None:
    """A partition counts here only if a start finds its state: in the newest snapshot, and in the
    log behind it. One that an operator lets this node lead is saved as soon as possible."""
    cluster_node = process.cluster_node
    replication, unsaved = cluster_node.replication, cluster_node.transfer.unsaved
    known = process.disk.snapshots.offsets
    for partition, start in enumerate(process.journal.start_offsets):
        if replication.leads(partition) or replication.followed_epoch(partition):
            assert known[partition] >= start or partition in unsaved, "state that a start lacks"
