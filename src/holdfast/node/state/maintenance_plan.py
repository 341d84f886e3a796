"""Decides when a snapshot is due, and what retention removes."""

from msgspec import Struct

from holdfast.log.journal.retention import (
    Pin,
    RetentionDecision,
    RetentionPolicy,
    SegmentSummary,
    count_unpinned,
    decide,
    pinned_bytes,
)
from holdfast.node.runtime.runtime import Runtime
from holdfast.node.state.retention_pins import pins_of


class MaintenanceLimits(Struct, frozen=True):
    """The limits of a node's log that a configuration gives."""

    policy: RetentionPolicy
    snapshot_bytes: int
    """The growth of the log after which a snapshot is due."""
    session_bytes: int | None
    """See `Pin.bytes_max`."""
    lake_bytes: int
    """The same of a registered lake. 0: retention does not wait for lakes."""


class MaintenancePlan:
    """Decides what the maintenance of one node does. The caller does it and reports it."""

    def __init__(self, runtime: Runtime, snapshots: list[int], limits: MaintenanceLimits) -> None:
        """`snapshots`: the sequences of the snapshots, oldest first; the caller removes some."""
        self._runtime = runtime
        self._journal = runtime.state.journal
        self._snapshots = snapshots
        self.limits = limits
        self._snapshot_at = self._journal.size_bytes()
        # Bytes removed by retention since the start. Without them, removal would hide growth.
        self._removed_bytes = 0
        self.lake_pinned_bytes = 0
        """The bytes of the log that the worst registered lake needed in the last `retention`."""
        self.pinned_bytes = 0
        """The bytes of the log that the worst session or shared group needed in the last
        `retention`."""

    def grown_bytes(self) -> int:
        """The bytes appended since the last snapshot."""
        return self._journal.size_bytes() + self._removed_bytes - self._snapshot_at

    def is_snapshot_due(self) -> bool:
        """Whether the log has grown enough for a snapshot. None is due while the state of a
        partition is wrong: the next start would load it."""
        is_right = not self._runtime.state.has_stopped_partition
        return is_right and self.grown_bytes() >= self.limits.snapshot_bytes

    def snapshot_sequence(self, *, always: bool) -> int | None:
        """Returns the sequence of a snapshot begun now, or None if there is one for all records,
        or if this node stores none. Counter-example: a gateway finds a snapshot at its start, and
        takes a state of its own for what its disk has.

        `always`: write it even then, because the state contains more than the records define.
        """
        if not self._runtime.cluster_node.context.has_data:
            return None
        newest = self._snapshots[-1] if self._snapshots else -1
        # The settled sequence is coarse and may decrease when records are appended. But settled
        # records stay settled, so the newest snapshot's sequence is a lower bound.
        # Committed records that are not applied are not in the snapshot.
        applied = self._runtime.recorded_state().delivered
        sequence = max(newest, self._journal.snapshot_sequence(applied))
        return sequence if sequence != newest or self.is_snapshot_due() or always else None

    def snapshot_written(self, sequence: int, grown_bytes: int) -> None:
        """Notes a durable snapshot. `grown_bytes`: those at its begin."""
        self._snapshot_at += grown_bytes
        if not self._snapshots or sequence != self._snapshots[-1]:
            self._snapshots.append(sequence)

    def summaries(self) -> list[SegmentSummary]:
        """Describes the segments, for `retention`."""
        return [
            SegmentSummary(
                segment.sequence,
                segment.size_bytes - segment.dead_bytes,
                segment.last_timestamp_us(),
                segment.end_offsets(),
            )
            for segment in self._journal.segments
        ]

    def retention(
        self, summaries: list[SegmentSummary], superseded: int, lakes: list[Pin]
    ) -> tuple[RetentionDecision, int]:
        """Decides what may go, and how many of the oldest segments may be compacted. That is
        nothing while state is missing or wrong here: the sessions in it may need any record.

        `superseded`: see `decide`. `lakes`: the pins of registered lakes. Both numbers are of one
        moment. With a snapshot that is written in between, a standby lacks retained messages
        (`tests/model/test_lease_simulation.py`).
        """
        is_wrong = self._runtime.state.has_stopped_partition
        if is_wrong or self._runtime.cluster_node.transfer.missing:
            return RetentionDecision(0, 0, 0, 0), 0
        oldest_snapshot = self._snapshots[0] if self._snapshots else 0
        pins = pins_of(self._runtime.recorded_state(), self.limits.session_bytes)
        self.pinned_bytes = pinned_bytes(summaries, pins)
        self.lake_pinned_bytes = pinned_bytes(summaries, lakes)
        pins += lakes
        decision = decide(
            summaries,
            self._journal.start_offsets,
            self.limits.policy,
            oldest_snapshot,
            pins,
            self._runtime.state.wall_us,
            superseded=superseded,
        )
        return decision, count_unpinned(summaries, oldest_snapshot, pins)

    def removed(self, size_bytes: int) -> None:
        """Notes bytes that retention or compaction has removed."""
        self._removed_bytes += size_bytes
