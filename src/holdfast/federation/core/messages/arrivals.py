"""Frames from links: for this member, for members beyond it, or for both."""

from holdfast.federation.core.context import MemberContext
from holdfast.federation.core.effects import Dropped
from holdfast.federation.core.frames import Data, Retained, Skip
from holdfast.federation.core.messages.duplicates import Duplicates, Freshness
from holdfast.federation.core.messages.forwarding import FrameForwarder, Passing
from holdfast.federation.core.messages.local_delivery import LocalDelivery
from holdfast.federation.core.messages.streams import IncomingStreams
from holdfast.federation.core.provenance import Provenance
from holdfast.federation.core.retained.service import RetainedMessages


class Arrivals:
    """The step from a frame of a peer to delivery here and forwarding to others."""

    def __init__(
        self,
        context: MemberContext,
        provenance: Provenance,
        receiving: IncomingStreams,
        delivering: LocalDelivery,
        retained: RetainedMessages,
        forwarding: FrameForwarder,
    ) -> None:
        self._own = context.node
        self._provenance = provenance
        self._receiving = receiving
        self._delivering = delivering
        self._retained = retained
        self._forwarding = forwarding
        self._counts = context.counts
        self._effects = context.effects
        # Messages of QoS 0: the relayed ones, and the ones for this member. Both are needed,
        # because a message may come here by several paths.
        self._relayed = Duplicates(one_epoch=True)
        self._received = Duplicates(one_epoch=True)

    def tidy(self, now: float) -> None:
        self._relayed.expire(now)
        self._received.expire(now)

    def handle_data(self, peer: bytes, data: Data | Skip, now: float) -> None:
        if data.node == self._own:
            self._counts["own message"] += 1
            return
        believed = self._provenance.of_data(peer, data)
        if believed is None:
            return
        data = believed
        if isinstance(data, Data) and not data.qos:
            # Copies on the further paths are no duplicates: each may have other destinations.
            if not data.path and self._relayed.add(data.id, now) is Freshness.SEEN:
                self._counts["duplicate"] += 1
                return
            self._handle_qos0(data, now)
        onward = [place for place in data.destinations if place[0] != self._own]
        for node, place, base in data.destinations:
            if node == self._own and place:
                reason = self._receiving.accept(data, place, base, now)
                if reason is not None:
                    self._counts[reason] += 1
        if onward:
            self._forwarding.forward(data, onward, peer, now)

    def _handle_qos0(self, data: Data, now: float) -> None:
        """Delivers a message of QoS 0, unless a later one of its origin came first: the order of a
        topic holds at QoS 0 too."""
        if all(node != self._own for node, _, _ in data.destinations):
            return
        freshness = self._received.add(data.id, now)
        if freshness is Freshness.NEW:
            self._delivering.deliver(data, 0, now)
        elif freshness is Freshness.LATE:
            self._effects.append(Dropped("late", data.id, self._own))
            self._retained.missed(data, now)
        else:
            self._counts["duplicate"] += 1

    def handle_retained_frame(self, peer: bytes, frame: Passing, now: float) -> None:
        """Handles a frame about retained messages, for this member or for one beyond it."""
        if not self._provenance.of_passing(peer, frame):
            return
        if isinstance(frame, Retained):
            frame = self._forwarding.admit_retained(peer, frame, now)
        elif not self._forwarding.gates[peer].lets_in(0, now):
            self._counts["rate limited"] += 1
            return
        if frame.destination == self._own:
            self._retained.handle(frame, now)
        else:
            self._forwarding.send_on(frame, peer, now)
