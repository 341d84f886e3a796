"""Forwarding of frames to next hops, within the policies of links."""

from msgspec.structs import replace

from holdfast_federation.core.context import MemberContext
from holdfast_federation.core.effects import Dropped, Send
from holdfast_federation.core.frames import (
    HOPS_MAX,
    Data,
    Frame,
    Retained,
    RetainedDigest,
    RetainedRequest,
    Skip,
    StreamAck,
    encode,
)
from holdfast_federation.core.messages.custody_entry import Place
from holdfast_federation.core.policy import Gate
from holdfast_federation.core.routing.link_health import LinkTable
from holdfast_federation.core.routing.routes import Routes

Passing = Retained | RetainedDigest | RetainedRequest
"""The frames about retained messages, which members relay from one member to another."""


class FrameForwarder:
    """The links' gates, and the choice of a next hop for each frame."""

    def __init__(
        self,
        context: MemberContext,
        routes: Routes,
        links: LinkTable,
    ) -> None:
        self._own = context.node
        self._routes = routes
        self._links = links
        self._counts = context.counts
        self._effects = context.effects
        # Of the links that are up.
        self.gates: dict[bytes, Gate] = {}

    def send(self, peer: bytes, frame: Frame) -> None:
        """Sends a frame that belongs to the link itself."""
        self._effects.append(Send(peer, encode(frame)))

    def _send_on(self, peer: bytes, frame: Frame, now: float) -> None:
        """For others beyond it, mostly: the link is to show that it lives."""
        self._links.burdened(peer, now)
        self._effects.append(Send(peer, encode(frame)))

    def can_reach(self, node: bytes) -> bool:
        hop = self._routes.next_hop(node)
        return hop is not None and hop in self._links

    # Messages

    def originate(self, data: Data, destinations: list[Place], redundancy: int, now: float) -> None:
        """Sends a message of this origin by up to `redundancy` different paths."""
        paths = {
            node: self._routes.paths(self._own, node)[:redundancy] if redundancy > 1 else []
            for node, _, _ in destinations
        }
        longest = max(len(path) for node in paths for path in paths[node] or [()])
        # Twice the distance of the farthest member: room for a detour.
        hops_max = min(max(2 * self._routes.depth(), longest, 2), HOPS_MAX)
        for path in range(max(redundancy, 1)):
            onward = [place for place in destinations if path == 0 or path < len(paths[place[0]])]
            if onward:
                self.forward(replace(data, hops_max=hops_max, path=path), onward, None, now)

    def forward(
        self, data: Data | Skip, destinations: list[Place], source: bytes | None, now: float
    ) -> None:
        """Divides the destinations among next hops.

        A message that cannot go on is lost here. At QoS 1 and 2 its origin has custody and
        retransmits it.
        """
        if data.hops >= data.hops_max:
            self._counts["hop limit"] += len(destinations)
            return
        has_places = isinstance(data, Skip) or data.qos > 0
        hops: dict[bytes, list[Place]] = {}
        for destination in destinations:
            hop = self._routes.hop_on(data.path, data.node, destination[0])
            if hop is None or hop not in self._links:
                self._counts["no path"] += 1
            elif hop == source:
                # The peer's database differs from ours, or it would not have sent it this way.
                self._counts["split horizon"] += 1
            elif not has_places and self._links[hop].is_busy:
                self._counts["link busy"] += 1
            else:
                hops.setdefault(hop, []).append(destination)
        for hop, onward in hops.items():
            let_out = self._send(hop, data, onward, now)
            if let_out is not None:
                onto = replace(let_out, hops=data.hops + 1, destinations=onward)
                self._send_on(hop, onto, now)

    def admit(self, peer: bytes, data: Data, now: float) -> Data | Skip | None:
        """Applies a link's import policy: returns the message, a Skip in its place, or None."""
        reason = self.gates[peer].refuses_import(data.topic, len(data.payload))
        if reason is not None:
            return self._withhold(data, data.destinations, reason)
        if not self.gates[peer].lets_in(size_of(data), now):
            self._counts["rate limited"] += len(data.destinations)
            return None
        return data

    def _send(
        self, hop: bytes, data: Data | Skip, onward: list[Place], now: float
    ) -> Data | Skip | None:
        if isinstance(data, Skip):
            return data
        reason = self.gates[hop].refuses_export(data.topic, len(data.payload))
        if reason is not None:
            return self._withhold(data, onward, reason)
        if not self.gates[hop].lets_out(size_of(data), now):
            self._counts["rate limited"] += len(onward)
            return None
        if not data.grants:
            return data
        nodes = {node for node, _, _ in onward}
        return replace(data, grants=[grant for grant in data.grants if grant[0] in nodes])

    def _withhold(self, data: Data, destinations: list[Place], reason: str) -> Skip | None:
        for node, _, _ in destinations:
            self._effects.append(Dropped(reason, data.id, node))
        if not data.qos:
            return None
        return Skip(
            data.node,
            data.epoch,
            data.sequence,
            data.hops,
            data.hops_max,
            destinations,
            data.path,
        )

    # From one member to another

    def send_ack(self, ack: StreamAck, source: bytes | None, now: float) -> None:
        """Sends a confirmation toward the origin. Without a path it is lost: the origin retransmits
        and receives another."""
        if ack.hops >= HOPS_MAX:
            self._counts["hop limit"] += 1
            return
        hop = self._routes.next_hop(ack.origin)
        if hop is not None and hop != source and hop in self._links:
            onto = ack if source is None else replace(ack, hops=ack.hops + 1)
            self._send_on(hop, onto, now)

    def send_on(self, frame: Passing, source: bytes | None, now: float) -> None:
        """Sends a frame about retained messages onward. Without a path it is lost: members compare
        their retained messages periodically."""
        if frame.hops >= HOPS_MAX:
            self._counts["hop limit"] += 1
            return
        hop = self._routes.next_hop(frame.destination)
        if hop is None or hop not in self._links:
            self._counts["no path"] += 1
        elif hop == source:
            self._counts["split horizon"] += 1
        elif isinstance(frame, Retained):
            gate = self.gates[hop]
            messages = [
                message
                for message in frame.messages
                if gate.refuses_export(message.topic, len(message.payload)) is None
                and gate.lets_out(message.size, now)
            ]
            self._counts["retained withheld"] += len(frame.messages) - len(messages)
            self._send_on(hop, replace(frame, hops=frame.hops + 1, messages=messages), now)
        else:
            self._send_on(hop, replace(frame, hops=frame.hops + 1), now)

    def admit_retained(self, peer: bytes, frame: Retained, now: float) -> Retained:
        gate = self.gates[peer]
        messages = [
            message
            for message in frame.messages
            if gate.refuses_import(message.topic, len(message.payload)) is None
            and gate.lets_in(message.size, now)
        ]
        self._counts["retained withheld"] += len(frame.messages) - len(messages)
        return replace(frame, messages=messages)


def size_of(data: Data) -> int:
    return len(data.topic) + len(data.payload) + len(data.properties)
