"""Reports disk positions and clocks between the nodes of a cluster."""

from typing import Final

from holdfast.log.journal.watermarks import Checkpoint
from holdfast.node.attendance import RECOVERS
from holdfast.node.failure.health import Presence
from holdfast.node.frame_kinds import POSITION
from holdfast.node.parts import Parts
from holdfast.node.replicate.disk_position import (
    FEATURE,
    DiskPosition,
    decode_report,
    encode_report,
)
from holdfast.node.replicate.incomplete import FEATURE as BEGAN_INCOMPLETE
from holdfast.security.peer_identity import features_in

REPORT_S: Final = 1.0
"""The interval in seconds of reports without a change. A sample of a clock counts for
`cluster_clock.SAMPLE_S`."""
MOVED_US: Final = 100_000
"""The change of a clock that is reported at once, in microseconds."""


class PositionReports:
    """The nodes that understand POSITION, and the position of the disk here.

    A report leaves with a heartbeat if it differs from the last one. So the other nodes remember
    each position after one heartbeat, and a node at rest reports only its clock, every REPORT_S.
    """

    def __init__(self, parts: Parts) -> None:
        self._context = parts.context
        self._meta = parts.meta
        self._clock = parts.clock
        self._memory = parts.disk_memory
        # The connected nodes that understand POSITION, with their incarnations.
        self._nodes: dict[str, str] = {}
        self._position = DiskPosition()
        self._replication = parts.replication
        self._detector = parts.detector
        # Per connected node the partitions of which it may lack records.
        self._incomplete: dict[str, frozenset[int]] = {}
        # The last reports of nodes that are no members by the metadata here, and their times.
        self._early: dict[str, tuple[bytes, float]] = {}
        # What the last report of a heartbeat said, and its time.
        self._sent: tuple[DiskPosition, frozenset[int], tuple[int, int]] | None = None
        self._sent_at = 0.0
        self.own_incomplete: frozenset[int] = frozenset()
        """The partitions of which this node may lack acknowledged records."""
        self._note_own(0.0)
        self.synced: Checkpoint | None = None
        """The newest checkpoint whose records are synced. None: all that count as durable are."""

    def connected(self, node: str, presence: Presence, now: float) -> None:
        """Reports to `node` at once, because frames that are judged by this node's clock may
        follow."""
        self._nodes.pop(node, None)
        self._early.pop(node, None)
        self._context.features[node] = presence.features
        features = features_in(presence.features)
        if RECOVERS in features:
            self._memory.positions.pop(node, None)
        is_incomplete = BEGAN_INCOMPLETE in features
        # Until its first report, which follows, it may lack records of any partition.
        everything = frozenset(range(self._context.journal.partitions))
        self._take(node, everything if is_incomplete else frozenset())
        if FEATURE in features:
            self._nodes[node] = presence.incarnation
            self._context.outgoing.append((node, POSITION, self._encode(now)))

    def disconnected(self, node: str) -> None:
        self._nodes.pop(node, None)
        self._early.pop(node, None)
        self._incomplete.pop(node, None)

    def _take(self, node: str, incomplete: frozenset[int]) -> None:
        self._incomplete[node] = incomplete
        self._detector.set_incomplete(node, incomplete)

    def review(self, now: float) -> None:
        """Reports the partitions in which this node may be incomplete, if they have changed, and
        takes the reports of new members. Called at the end of a turn."""
        metadata = self._context.metadata
        if self._early and metadata is not None:
            for node in self._early.keys() & metadata.nodes.keys():
                self.handle(node, *self._early.pop(node))
        if self.own_incomplete and self._note_own(now):
            self.send(now)

    def _note_own(self, now: float) -> bool:
        own = self._replication.review_incomplete(self._incomplete, now)
        is_changed = own != self.own_incomplete
        self.own_incomplete = own
        self._detector.set_incomplete(self._meta.node_id, own)
        return is_changed

    def handle(self, node: str, payload: bytes, now: float) -> None:
        """Takes the report of `node`. Raises BadFrame when it is malformed."""
        wall_us, agreed_us, position, incomplete = decode_report(payload)
        incarnation = self._nodes.get(node)
        metadata = self._context.metadata
        if incarnation is None:
            return
        # A node that has just started may not know the members yet. It needs the others' clocks as
        # soon as it knows them, and the next reports come too late for that.
        if metadata is None or node in metadata.nodes:
            self._memory.note(node, incarnation, position)
            self._take(node, incomplete)
            self._clock.add_sample(node, wall_us, agreed_us, now)
        else:
            self._early[node] = payload, now

    def is_awaited(self) -> bool:
        """Returns True if this node knows no clock but its own, although another member will report
        one."""
        metadata = self._context.metadata
        if metadata is None or self._clock.has_samples():
            return False
        return any(node in metadata.nodes for node in self._nodes)

    def report(self, now: float) -> None:
        """Reports to all nodes, with a heartbeat, unless the last report says the same."""
        if self._nodes and (now >= self._sent_at + REPORT_S or self._has_changed()):
            self.send(now)

    def _has_changed(self) -> bool:
        if self._sent is None:
            return True
        position, incomplete, clocks = self._sent
        own_us, agreed_us = self._clock.offsets_us()
        return (
            incomplete != self.own_incomplete
            or abs(own_us - clocks[0]) > MOVED_US
            or abs(agreed_us - clocks[1]) > MOVED_US
            or position != self.position()
        )

    def send(self, now: float) -> None:
        """Reports to all nodes."""
        report = self._encode(now)
        self._sent = (self._position, self.own_incomplete, self._clock.offsets_us())
        self._sent_at = now
        for node in self._nodes:
            self._context.outgoing.append((node, POSITION, report))

    def _encode(self, now: float) -> bytes:
        clock = self._clock
        incomplete = self.own_incomplete
        return encode_report(clock.own_us(now), clock.agreed_us(now), self.position(), incomplete)

    def position(self) -> DiskPosition:
        """Returns what the disk here has under all circumstances: durable and committed. It never
        decreases."""
        synced = self.synced or self._context.journal.checkpoint()
        records = sum(synced.offsets)
        position = DiskPosition(*self._meta.durable, records, synced.sequence)
        self._position = position.reached(self._position)
        return self._position

    def claim(self) -> DiskPosition:
        """Returns the position of the disk with its uncommitted records and entries.

        After a restart this node cannot tell which of them are committed.
        """
        journal = self._context.journal
        records = sum(journal.logged(journal.durable_offset))
        claim = DiskPosition(
            self._meta.durable[0],
            self._meta.log_end[1],
            records,
            journal.committed_sequence,
            self._memory.generation,
        )
        assert claim.written >= self._position.written, "fewer records than were durable"
        return claim.reached(self._position)

    def sync_later(self) -> None:
        """Counts only what is synced from now on: records count before that. All are synced now."""
        self.synced = self._context.journal.checkpoint()
