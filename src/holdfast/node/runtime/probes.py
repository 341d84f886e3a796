"""Measures how long records wait for their replication, and promises for their commit."""

from typing import Final

from holdfast.log.journal.segment import WriteGroup
from holdfast.node.cluster_node import ClusterNode
from holdfast.node.node_state import NodeState
from holdfast.node.publish.pending_records import PendingRecord

PROBE_S: Final = 60.0
"""The time in seconds after which a probe counts as it is, so that another one can begin."""


class ClusterProbes:
    """The present probes of one node.

    A probe is chosen when none is under way, and looked at once a turn. So the cost is that of two
    comparisons a turn, whatever the rate of messages.
    """

    def __init__(self, cluster_node: ClusterNode) -> None:
        self._cluster_node = cluster_node
        self._state: NodeState = cluster_node.state
        self._pending: PendingRecord | None = None
        self._partition = -1
        self._end = 0
        self._taken_at = 0.0

    def group_taken(self, group: WriteGroup) -> None:
        """Chooses a batch that this node, as leader, has just closed."""
        if self._partition < 0 and group.built:
            batch = group.built[0]
            self._partition, self._end = batch.partition, batch.end_offset
            self._taken_at = self._state.now

    def step(self) -> None:
        """Looks at the probes. Called once a turn."""
        now = self._state.now
        durations = self._state.stats.durations
        pending = self._pending
        if pending is None:
            waiting = self._cluster_node.forwarding.pending
            if waiting:
                newest = next(reversed(waiting.values()))
                self._pending = newest if newest.is_promised() else None
        elif pending.done or now > pending.since + PROBE_S:
            # A refused publish is answered as well, and one without reply has waited.
            durations.acknowledged.observe(now - pending.since)
            self._pending = None
        if self._partition >= 0:
            is_committed = self._state.journal.high_watermark[self._partition] >= self._end
            if is_committed or now > self._taken_at + PROBE_S:
                durations.replicated.observe(now - self._taken_at)
                self._partition = -1
