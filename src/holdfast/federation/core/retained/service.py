"""Retained messages as the core of a member uses them.

Without wall time this member takes no part: it relays the frames of others and ignores them.
"""

from collections.abc import Iterable
from typing import Final

from holdfast.federation.core.context import MemberContext
from holdfast.federation.core.effects import Message
from holdfast.federation.core.frames import Clock, Data, Retained, RetainedDigest
from holdfast.federation.core.identity import MessageId
from holdfast.federation.core.messages.forwarding import FrameForwarder, Passing
from holdfast.federation.core.retained.anti_entropy import AntiEntropy
from holdfast.federation.core.retained.clock import TOLD_S, HybridClock
from holdfast.federation.core.retained.replication import RetainedReplication
from holdfast.federation.core.retained.store import RetainedStore
from holdfast.federation.core.routing.interest import RemoteInterest
from holdfast.federation.core.routing.link_state import LinkStateChange
from holdfast.federation.core.routing.routes import Routes

CLOCK_EVERY_S: Final = 600.0
"""The seconds between two CLOCK frames to the linked members."""


class RetainedMessages:
    """The store, the clock, the replication and the comparison of one member together."""

    def __init__(
        self,
        context: MemberContext,
        wall_s: float | None,
        remote: RemoteInterest,
        routes: Routes,
        forwarding: FrameForwarder,
        now: float,
    ) -> None:
        self._own = context.node
        self._counts = context.counts
        self.is_on = wall_s is not None
        self.store = RetainedStore(context, remote.members)
        self.clock = HybridClock(wall_s or 0.0, now)
        self._retaining = RetainedReplication(context, self.store, self.clock)
        self._digest_sent_at = now
        self._own_wall_s = (wall_s or 0.0) - now
        self._reconciling = AntiEntropy(
            context, self.store, self._retaining, remote, routes, forwarding, now
        )

    def load(self, stored: Iterable[bytes], now: float) -> None:
        """Loads the stored messages. Raises BadFrame or BadEntry when they are malformed."""
        if self.is_on:
            self._retaining.load(list(stored), now)

    def set_wall(self, wall_s: float, now: float) -> bool:
        """Sets the wall clock. Returns True if the linked members must receive it now."""
        jumped_s = abs(wall_s - now - self._own_wall_s)
        self._own_wall_s = wall_s - now
        for topic in self._retaining.set_wall(wall_s, now):
            self._reconciling.found(topic, now)
        if jumped_s <= TOLD_S and now - self._digest_sent_at < CLOCK_EVERY_S:
            return False
        self._digest_sent_at = now
        return True

    def own_clock(self, now: float) -> Clock | None:
        """Returns the CLOCK frame for the linked members, or None without wall time."""
        return Clock(now + self._own_wall_s) if self.is_on else None

    def peer_clock(self, peer: bytes, frame: Clock, now: float) -> None:
        if self.is_on:
            for topic in self._retaining.peer_clock(peer, frame.wall_s, now):
                self._reconciling.found(topic, now)

    # Publications

    def publish(self, id: MessageId, message: Message, now: float) -> int:
        """Accepts a publication of a client here. Returns its stamp, or 0 without one."""
        return self._retaining.publish(id, message, now) if self.is_on else 0

    def broker_has(self, id: MessageId, message: Message, now: float) -> None:
        if self.is_on and self._retaining.broker_has(id, message, now):
            self._reconciling.found(message.topic, now)

    def is_newest(self, data: Data, now: float) -> bool:
        return not self.is_on or self._retaining.is_newest(data, now)

    def delivered(self, data: Data, now: float) -> None:
        if self.is_on:
            self._retaining.delivered(data, now)

    def missed(self, data: Data, now: float) -> None:
        if self.is_on and data.is_retained and data.stamp:
            self._retaining.missed(data, now)

    # Others

    def changed(self, change: LinkStateChange, now: float) -> None:
        """Handles a change of the filters that a member announces. Routing applied it before."""
        if not self.is_on:
            return
        if change.node != self._own:
            self._reconciling.peers_changed([*change.added, *change.removed], now)
        else:
            self._reconciling.remove_filters(change.removed, now)
            self._reconciling.add_filters(change.added, now)

    def graph_changed(self, now: float) -> None:
        if self.is_on:
            self._reconciling.graph_changed(now)

    def restarted(self, node: bytes, now: float) -> None:
        if self.is_on:
            self._reconciling.restarted(node, now)

    def peer_down(self, node: bytes) -> None:
        self._reconciling.peer_down(node)

    def handle(self, frame: Passing, now: float) -> None:
        if not self.is_on:
            self._counts["retained off"] += 1
        elif isinstance(frame, Retained):
            self._reconciling.handle_retained(frame, now)
        elif isinstance(frame, RetainedDigest):
            self._reconciling.handle_digest(frame, now)
        else:
            self._reconciling.handle_request(frame, now)

    # Time

    def timer(self) -> float:
        return self._reconciling.timer() if self.is_on else float("inf")

    def handle_timers(self, now: float) -> None:
        if self.is_on:
            self._reconciling.handle_timers(now)

    def tidy(self, now: float) -> None:
        if self.is_on:
            self._retaining.tidy(now)
