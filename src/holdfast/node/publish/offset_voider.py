"""Makes void the offsets of records that are lost and whose positions are still recorded.

Invariant: no recorded position in a partition is beyond the end of its leader's log, once the
leader stores messages. Where all in-sync replicas live on, that is so: a position follows a commit.
But an operator may give up records that sessions have received (`unsafe-recover`), or accept an
older copy of a disk. Counter-example without the rule: a session is away at offset 25, and the new
leader's log ends at 5. The next messages get the offsets 5 to 24. The session is never sent them.

So the leader appends void records up to the farthest position that it knows: of sessions, starts of
subscriptions, shared groups, queues and inflight records, and of what was fed to it. One offset is
one record for all of them then. It refuses messages until all void records are applied.

It appends none while a replica in sync does not follow it, because that one may have the records:
this leader has lost its end, and the other takes over when it comes. Counter-example: both were
killed, and the other starts later. Void records would take the place of what it has committed.

A position that comes later, because this node had not applied its record or because another node
was fed beyond the end, is reached in the same way. The messages between are below it.
"""

from typing import Final

from holdfast.log.batch import Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.node.context import ClusterContext
from holdfast.node.node_state import NodeState
from holdfast.node.state.replicated import ReplicatedState

AT_ONCE: Final = 10_000
"""The most void records of one batch. The next batch follows when they are applied."""
VOID_MAX: Final = 100_000_000
"""The most void records for one position: 4 GB. A position farther away is no position."""


class OffsetVoider:
    """The void records of the partitions that this node leads."""

    def __init__(
        self, state: NodeState, context: ClusterContext, replicated: ReplicatedState
    ) -> None:
        self._state = state
        self._context = context
        self._replicated = replicated
        # Partition -> the offset that its log has to reach before it stores messages.
        self.ends: dict[int, int] = {}

    def lead(self, partition: int) -> None:
        """Begins with a partition that this node leads from now on."""
        applied = self._state.delivered[partition]
        self.reach(partition, max(applied, self._replicated.farthest[partition]))

    def stop_leading(self, partition: int) -> None:
        """Leaves the rest to the next leader."""
        self.ends.pop(partition, None)

    def reach(self, partition: int, offset: int) -> None:
        """Appends void records up to an offset, if this node leads the partition and its log ends
        below."""
        end = self._context.journal.next_offset[partition]
        if offset <= max(end, self.ends.get(partition, 0)) or not self._context.leads(partition):
            return
        if offset > end + VOID_MAX:
            fields: dict[str, object] = {"partition": partition, "end": end, "offset": offset}
            self._state.note("error", "position_beyond_the_log", fields)
            return
        self.ends[partition] = offset
        self._go_on(partition)

    def applied(self, partition: int) -> None:
        """Goes on, once the void records before are applied, and looks at positions that records
        have named since."""
        self.advance()
        ahead = self._replicated.ahead
        while ahead:
            each = ahead.pop()
            self.reach(each, self._replicated.farthest[each])

    def advance(self) -> None:
        """Goes on with all partitions: records were applied, or followers or metadata changed."""
        if self.ends:
            for partition in list(self.ends):
                self._go_on(partition)

    def _go_on(self, partition: int) -> None:
        end = self._context.journal.next_offset[partition]
        if self._state.delivered[partition] < end:
            return
        if end >= self.ends[partition]:
            del self.ends[partition]
            # Only now, because a deposed leader that lacks what its successor commits lost nothing.
            # Of what was fed to this node, nothing shows that the records are committed. The
            # messages that follow have later offsets, and are committed after them.
            self._state.note("error", "offsets_voided", {"partition": partition, "offset": end})
        elif partition not in self._context.uncompared:
            self._append(partition)

    def _append(self, partition: int) -> None:
        journal = self._context.journal
        base = journal.next_offset[partition]
        builder = BatchBuilder(partition, base)
        builder.add_void(min(self.ends[partition] - base, AT_ONCE), self._state.wall_us)
        journal.extend(Batch(builder.build(journal.epochs[partition]), check=False))

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two turns."""
        ends = self._context.journal.next_offset
        for partition in self.ends:
            assert self._context.leads(partition), "void records without a leadership"
            # Equal where these offsets were fed to this node: they count as applied before.
            assert self._state.delivered[partition] <= self.ends[partition], "voided, and still due"
        for partition, farthest in enumerate(self._replicated.farthest):
            if self._context.leads(partition) and partition not in self.ends:
                is_reached = farthest <= ends[partition] or farthest > ends[partition] + VOID_MAX
                assert is_reached or self._replicated.ahead, "a position beyond the leader's log"
