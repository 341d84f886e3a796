"""The reports of disk positions and clocks between the nodes of a cluster."""

from holdfast.cluster.failure.health import Presence
from holdfast.cluster.frame_kinds import POSITION
from holdfast.cluster.partitions.disk_position import (
    FEATURE,
    DiskPosition,
    decode_report,
    encode_report,
)
from holdfast.cluster.parts import Parts


class PositionReports:
    """The nodes that understand POSITION, and the position of the disk here."""

    def __init__(self, parts: Parts) -> None:
        self._context = parts.context
        self._state = parts.state
        self._meta = parts.meta
        self._clock = parts.clock
        self._memory = parts.disk_memory
        # The connected nodes that understand POSITION, with their incarnations.
        self._nodes: dict[str, str] = {}
        self._position = DiskPosition()

    def connected(self, node: str, presence: Presence, now: float) -> None:
        """Reports to `node` at once, because frames that are judged by this node's clock may
        follow."""
        self._nodes.pop(node, None)
        self._context.features[node] = presence.features
        if FEATURE in presence.features.split(","):
            self._nodes[node] = presence.incarnation
            self._context.outgoing.append((node, POSITION, self._encode(now)))

    def disconnected(self, node: str) -> None:
        self._nodes.pop(node, None)

    def handle(self, node: str, payload: bytes, now: float) -> None:
        """Takes the report of `node`. Raises BadFrame when it is malformed."""
        wall_us, agreed_us, position = decode_report(payload)
        incarnation = self._nodes.get(node)
        metadata = self._context.metadata
        # A node that has just started may not know the members yet. It needs the others' clocks as
        # soon as it knows them, and the next reports come too late for that.
        is_member = metadata is None or node in metadata.nodes
        if incarnation is not None and is_member:
            self._memory.note(node, incarnation, position)
            self._clock.add_sample(node, wall_us, agreed_us, now)

    def is_awaited(self) -> bool:
        """Returns True if this node knows no clock but its own, although another member will report
        one."""
        metadata = self._context.metadata
        if metadata is None or self._clock.has_samples():
            return False
        return any(node in metadata.nodes for node in self._nodes)

    def send(self, now: float) -> None:
        """Reports to all nodes, with each heartbeat."""
        if self._nodes:
            report = self._encode(now)
            for node in self._nodes:
                self._context.outgoing.append((node, POSITION, report))

    def _encode(self, now: float) -> bytes:
        clock = self._clock
        return encode_report(clock.own_us(now), clock.agreed_us(now), self.position())

    def position(self) -> DiskPosition:
        """Returns what the disk here has under all circumstances: durable and committed. It never
        decreases."""
        journal = self._context.journal
        durable = zip(journal.high_watermark, journal.durable_offset, strict=True)
        records = sum(map(min, durable))
        position = DiskPosition(*self._meta.durable, records, self._written())
        self._position = position.reached(self._position)
        return self._position

    def claim(self) -> DiskPosition:
        """Returns the position of the disk with its uncommitted records and entries.

        After a restart this node cannot tell which of them are committed.
        """
        records = sum(self._context.journal.durable_offset)
        claim = DiskPosition(self._meta.durable[0], self._meta.log_end[1], records, self._written())
        assert claim.written >= self._position.written, "fewer records than were durable"
        return claim.reached(self._position)

    def _written(self) -> int:
        """The records that were ever durable here. With durability "memory" records are cut off
        before they are written, so they are not counted."""
        return 0 if self._state.memory else self._context.journal.committed_sequence
