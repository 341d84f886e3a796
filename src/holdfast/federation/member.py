"""A member of a federation: inputs and times in, effects out.

The driver calls one method at a time with the time, then carries out `take_effects()` in order and
arms one timer for `timer()`. It names peers by the ids that their connections have proved.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec

from holdfast.federation.announcing import Announcing
from holdfast.federation.config import FederationConfig
from holdfast.federation.custody import Custody, Place
from holdfast.federation.duplicates import Duplicates, Freshness
from holdfast.federation.effects import (
    CloseLink,
    DeliverLocally,
    Dropped,
    Effect,
    Message,
    Send,
)
from holdfast.federation.frames import (
    HOPS_MAX,
    LINKS_MAX,
    Ack,
    AnnouncementRequest,
    Announcements,
    BadFrame,
    Data,
    Frame,
    Goodbye,
    Hello,
    decode,
    encode,
)
from holdfast.federation.identity import Identity, MessageId
from holdfast.federation.interest import LocalInterest, RemoteInterest, may_leave
from holdfast.federation.link_state import LinkStateDatabase
from holdfast.federation.links import Links
from holdfast.federation.mesh import Mesh, children_of
from holdfast.federation.receiving import Position, Receiving, message_of
from holdfast.federation.repair import Repair
from holdfast.federation.routes import Routes
from holdfast.topics.names import is_shared, split_shared


class FederationMember:
    def __init__(
        self,
        identity: Identity,
        address: str,
        config: FederationConfig,
        now: float,
        filters: Iterable[str] = (),
        stored: Iterable[bytes] = (),
        positions: dict[bytes, Position] | None = None,
        remembered: Iterable[bytes] = (),
    ) -> None:
        """`identity`: of this start, stored durably. `address`: where others may dial, or empty.
        `filters`: of the sessions there are already; what is missing here is not wanted until
        it is told. `stored`, `positions` and `remembered`: what survived; without the last, what
        is published before a peer has told who wants it goes to nobody. Raises BadFrame and
        custody.BadEntry.
        """
        self.identity = identity
        self.node = identity.node
        self.config = config
        # Messages and frames that went nowhere, by reason, and what was sent, by kind of frame.
        self.counts: Counter[str] = Counter()
        self.database = LinkStateDatabase()
        self.routes = Routes(self.node, self.database)
        self.links = Links(config)
        self._effects: list[Effect] = []
        self._interest = LocalInterest(config.filters_max)
        self._interest.change(_federated(filters), ())
        self._remote = RemoteInterest()
        self._duplicates = Duplicates()
        self._sequence = 0
        self._graph_version = -1
        self._tidy_at = now + config.tidy_s
        self.custody = Custody(config, self._effects)
        self.custody.load(stored, now)
        self.receiving = Receiving(
            self.node, config, self._effects, self._interest.wants, positions or {}
        )
        self._repair = Repair(self.node, config, self.database, self.links, self._effects)
        self._announcing = Announcing(
            identity,
            address,
            config,
            self.database,
            self.links,
            self._interest,
            self._effects,
            now,
        )
        self._announcing.recall(remembered, now)
        self._run(now)

    # What the driver tells

    def link_up(self, peer: bytes, now: float) -> None:
        """A connection to a member; the only one with it. One that is up already is begun anew."""
        if peer == self.node:
            self._effects.append(CloseLink(peer, "a link of a member with itself"))
            return
        if peer in self.links:
            self.link_down(peer, now)
        if len(self.links.peers()) >= LINKS_MAX:
            self._effects.append(CloseLink(peer, f"a member has at most {LINKS_MAX} links"))
            return
        self.links.up(peer, now)
        self._announcing.linked(peer)
        self._repair.linked(peer, now)
        self._hello(peer, False)
        self._run(now)

    def link_down(self, peer: bytes, now: float) -> None:
        if self.links.down(peer, now):
            self._announcing.set_links(self.links.usable(now), now)
            self._repair.lost(peer, now)
            self._run(now)

    def link_busy(self, peer: bytes, is_busy: bool) -> None:
        """Its connection takes no more for now: QoS 0 does not wait for it."""
        if peer in self.links:
            self.links[peer].is_busy = is_busy

    def frame(self, peer: bytes, data: bytes, now: float) -> None:
        if peer not in self.links:
            self.counts["not linked"] += 1
            return
        self.links.heard(peer, now)
        try:
            frame = decode(data)
        except BadFrame as error:
            self.counts["bad frame"] += 1
            self._close(peer, str(error), now)
            return
        if frame is None:
            self.counts["unknown kind"] += 1
            return
        self._handle(peer, frame, now)
        self._run(now)

    def local_interest(self, added: Iterable[str], removed: Iterable[str], now: float) -> None:
        """Subscriptions of clients here that began and ended, each filter once for each of them."""
        if self._interest.change(_federated(added), _federated(removed)):
            self._announcing.interest_changed(now)
        self._run(now)

    def local_publish(self, message: Message, now: float) -> MessageId | None:
        """A client's message; its id, or None when nobody else wants it or it may not leave. At
        QoS 1 and 2 it is this member's to deliver once `stored` is told."""
        if message.came_from is not None:
            self.counts["came from the federation"] += 1
            return None
        if not may_leave(message.topic):
            return None
        nodes = [node for node in self._remote.members(message.topic) if node != self.node]
        if not nodes:
            return None
        self._sequence += 1
        id = MessageId(self.node, self.identity.epoch, self._sequence)
        if message.qos:
            self.custody.take(id, message, nodes, now)
        else:
            self._send_once(id, message, nodes)
        self._run(now)
        return id

    def desired_topology(self, links: dict[bytes, str], now: float) -> None:
        """The topology manager's: members to be linked with, and where they are."""
        self._repair.set_desired(links, now)
        self._run(now)

    def stored(self, id: MessageId, now: float) -> None:
        """Durable: what `Store` or `DeliverLocally` asked for."""
        if id.node == self.node:
            self.custody.stored(id)
        else:
            self.receiving.stored(id, now)
        self._run(now)

    def leave(self, now: float) -> None:
        """Out of the federation, for good. A member that is to come back is just stopped."""
        self._announcing.leave(now)
        for peer in self.links.peers():
            self._send(peer, Goodbye("leaving the federation"))
            self._close(peer, "leaving the federation", now)

    def handle_timers(self, now: float) -> None:
        due = self.links.due(now)
        for peer in due.lost:
            self._close(peer, "silent", now)
        for peer in due.hellos:
            self._hello(peer, False)
        for peer in due.asks:
            self._hello(peer, True)
        self._announcing.handle_timers(now)
        self.custody.handle_timers(now)
        if now >= self._repair.timer():
            self._repair.run(now)
        if now >= self._tidy_at:
            self._tidy(now)
        self._run(now)

    def timer(self, now: float) -> float:
        return min(
            self.links.timer(now),
            self._announcing.timer(),
            self.custody.timer(),
            self.receiving.timer(),
            self._repair.timer(),
            self._tidy_at,
        )

    def take_effects(self) -> list[Effect]:
        effects = self._effects[:]
        self._effects.clear()
        return effects

    # What may be asked

    def memory(self) -> list[bytes]:
        """What is known of all members: to be stored, soon after `database.digest` has changed,
        and given back as `remembered`."""
        return self._announcing.memory()

    def interested(self, topic: str) -> tuple[bytes, ...]:
        """The members with clients that want the topic, by what is known here."""
        nodes = {node for node in self._remote.members(topic) if node != self.node}
        if self._interest.wants(topic):
            nodes.add(self.node)
        return tuple(sorted(nodes))

    def mesh(self, topic: str) -> Mesh:
        members = self.interested(topic)
        if not members:
            return Mesh(topic, None, (), {}, {})
        parents = self.routes.tree(members[0]).pruned(set(members))
        return Mesh(topic, members[0], members, parents, children_of(parents))

    # Frames

    def _handle(self, peer: bytes, frame: Frame, now: float) -> None:
        if isinstance(frame, Data):
            self._take(peer, frame, now)
        elif isinstance(frame, Ack):
            self._take_ack(peer, frame, now)
        elif isinstance(frame, Hello):
            if frame.asks:
                self._hello(peer, False)
            self._announcing.handle_digest(peer, frame.digest, now)
        elif isinstance(frame, Announcements):
            for node in self._announcing.handle_news(peer, frame.entries, now):
                if self.database.entries[node].is_leaving:
                    self.custody.give_up(node, "member left")
        elif isinstance(frame, AnnouncementRequest):
            self._announcing.handle_request(peer, frame.known, now)
        else:
            self._close(peer, f"the peer says: {frame.reason}", now)

    def _take(self, peer: bytes, data: Data, now: float) -> None:
        if data.node == self.node:
            self.counts["own message"] += 1
            return
        if not data.qos:
            freshness = self._duplicates.take(data.id, now)
            if freshness is Freshness.SEEN:
                self.counts["duplicate"] += 1
                return
            self._take_unstored(data, freshness)
        onward: list[Place] = []
        for destination in data.destinations:
            node, place, base = destination
            if node != self.node:
                onward.append(destination)
            elif data.qos:
                reason = self.receiving.take(data, place, base, now)
                if reason is not None:
                    self.counts[reason] += 1
        if onward:
            self._forward(data, onward, peer)

    def _take_unstored(self, data: Data, freshness: Freshness) -> None:
        """QoS 0: what is late is not delivered, so the order holds."""
        if all(node != self.node for node, _, _ in data.destinations):
            return
        if freshness is Freshness.LATE:
            self._effects.append(Dropped("late", data.id, self.node))
        elif not self._interest.wants(data.topic):
            self._effects.append(Dropped("unwanted", data.id, self.node))
        else:
            self._effects.append(DeliverLocally(data.id, message_of(data), 0, data.hops))

    def _forward(self, data: Data, destinations: list[Place], source: bytes | None) -> None:
        """Divide the destinations among next hops. What cannot go on stays with its origin at
        QoS 1 and 2, which sends it again; at QoS 0 it is lost."""
        if data.hops >= data.hops_max:
            self.counts["hop limit"] += len(destinations)
            return
        hops: dict[bytes, list[Place]] = {}
        for destination in destinations:
            hop = self.routes.next_hop(destination[0])
            if hop is None or hop not in self.links:
                self.counts["no path"] += 1
            elif hop == source:
                # Our databases differ, or it would not have come this way.
                self.counts["split horizon"] += 1
            elif not data.qos and self.links[hop].is_busy:
                self.counts["link busy"] += 1
            else:
                hops.setdefault(hop, []).append(destination)
        for hop, onward in hops.items():
            self._send(hop, msgspec.structs.replace(data, hops=data.hops + 1, destinations=onward))

    def _take_ack(self, peer: bytes, ack: Ack, now: float) -> None:
        if ack.origin == self.node:
            self.custody.confirmed(ack.destination, ack.epoch, ack.place, now)
        elif ack.hops >= HOPS_MAX:
            self.counts["hop limit"] += 1
        else:
            self._send_ack(msgspec.structs.replace(ack, hops=ack.hops + 1), peer)

    def _send_ack(self, ack: Ack, source: bytes | None) -> None:
        """Lost where there is no path: the origin sends again, and gets another."""
        hop = self.routes.next_hop(ack.origin)
        if hop is not None and hop != source and hop in self.links:
            self._send(hop, ack)

    # Sending

    def _send_once(self, id: MessageId, message: Message, nodes: list[bytes]) -> None:
        destinations = [(node, 0, 0) for node in nodes]
        data = Data(
            id.node,
            id.epoch,
            id.sequence,
            0,
            self._hops_max(),
            0,
            message.is_retained,
            message.topic,
            message.payload,
            message.properties,
            message.expiry_s,
            destinations,
        )
        self._forward(data, destinations, None)

    def _hops_max(self) -> int:
        """Twice the distance of the farthest member: room for a detour."""
        return min(max(2 * self.routes.depth(), 2), HOPS_MAX)

    def _can_reach(self, node: bytes) -> bool:
        hop = self.routes.next_hop(node)
        return hop is not None and hop in self.links

    def _hello(self, peer: bytes, asks: bool) -> None:
        self._send(peer, Hello(self.identity.epoch, self.database.digest, asks))

    def _send(self, peer: bytes, frame: Frame) -> None:
        self._effects.append(Send(peer, encode(frame)))

    def _close(self, peer: bytes, reason: str, now: float) -> None:
        self._effects.append(CloseLink(peer, reason))
        self.link_down(peer, now)

    def _tidy(self, now: float) -> None:
        self._tidy_at = now + self.config.tidy_s
        self.custody.tidy(now)
        self._duplicates.expire(now)
        for node in self.database.expire(now, self.node, 2 * self.config.refresh_s):
            self.custody.give_up(node, "member gone")

    def _run(self, now: float) -> None:
        """What follows from any input: links that have become usable, changes of interest and
        graph, messages and confirmations that may go out."""
        superfluous, self._repair.superfluous = self._repair.superfluous, []
        for peer in superfluous:
            self._close(peer, "the links wanted here are up", now)
        self._announcing.set_links(self.links.usable(now), now)
        for change in self.database.take_changes():
            self._remote.change(change.node, change.added, change.removed)
        if self._graph_version != self.database.graph_version:
            self._graph_version = self.database.graph_version
            self.custody.rerouted(now)
        for data, places in self.custody.collect(self._can_reach, now):
            self._forward(msgspec.structs.replace(data, hops_max=self._hops_max()), places, None)
        for ack in self.receiving.acks(now):
            self._send_ack(ack, None)


def _federated(filters: Iterable[str]) -> list[str]:
    """What other members may be asked for. A shared group's clients want its filter."""
    plain = [split_shared(filter)[1] if is_shared(filter) else filter for filter in filters]
    return [filter for filter in plain if may_leave(filter)]
