"""Gathers QoS 0 messages for other nodes into frames.

Invariant: a frame with messages leaves no later than any other frame that this node sends after it
took the messages. So gathering them reorders nothing. Counter-example: the valve is opened at QoS 0
and then closed at QoS 1. The record overtakes the gathered message on the way to a third node, and
its subscriber believes that the valve is open.
"""

from typing import Final

from holdfast.log.batch_builder import BatchBuilder
from holdfast.node.context import NEVER, ClusterContext
from holdfast.node.frame_kinds import QOS0

GATHER_S: Final = 0.001
"""The least time in seconds between two frames with messages, unless other frames leave. A message
behind which no other came within that time waits for nothing. Counter-example without it: each of
10,000 messages a second has a frame, and wakes the other node up."""
QOS0_BYTES_MAX: Final = 4 << 20
"""The size in bytes of QoS 0 messages in one turn for one node. Messages above it are dropped and
counted."""


class Qos0Frames:
    """The messages that wait for their frames, by node."""

    def __init__(self, context: ClusterContext) -> None:
        self._context = context
        self._outbound: dict[str, BatchBuilder] = {}
        # The time from which they may leave.
        self._until = 0.0
        self.dropped = 0

    def builder(self, node: str, size_bytes: int) -> BatchBuilder | None:
        """The builder of the next frame for a node, with room for a message of this size. None: the
        message is dropped."""
        builder = self._outbound.get(node)
        if builder is not None:
            if builder.body_bytes > QOS0_BYTES_MAX:
                self.dropped += 1
                return None
            if size_bytes <= QOS0_BYTES_MAX:
                return builder
            # Both together may be larger than the frame that peers accept.
            self._context.send(node, QOS0, builder.build(0))
        builder = self._outbound[node] = BatchBuilder(0, 0)
        return builder

    def forget(self, node: str) -> None:
        """Drops the messages for a node whose link is lost."""
        self._outbound.pop(node, None)

    def flush(self, now: float) -> None:
        """Sends the messages before all other frames of the turn, or waits for more."""
        outgoing = self._context.outgoing
        if not self._outbound or (not outgoing and now < self._until):
            return
        self._until = now + GATHER_S
        outbound, self._outbound = self._outbound, {}
        self._context.outgoing = []
        for node, builder in outbound.items():
            self._context.send(node, QOS0, builder.build(0))
        self._context.outgoing += outgoing

    def timer(self) -> float:
        """Returns the time at which the messages leave."""
        return self._until if self._outbound else NEVER
