"""A member of a federation as a pure state machine: inputs and times in, effects out.

The driver calls one method at a time, with the current time. It then carries out `take_effects()`
in order and arms one timer for `timer()`. It names each peer by the id that the peer's connection
has proved.
"""

from collections.abc import Iterable

from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.context import MemberContext
from holdfast_federation.core.effects import CloseLink, Effect, Message
from holdfast_federation.core.frames import (
    LINKS_MAX,
    AnnouncementRequest,
    Announcements,
    Clock,
    Data,
    Frame,
    Goodbye,
    Hello,
    InvalidFrame,
    Memory,
    Skip,
    StreamAck,
    Vouchers,
    decode,
)
from holdfast_federation.core.graph import Mesh, children_of
from holdfast_federation.core.identity import Identity, MessageId
from holdfast_federation.core.messages.custody import Custody
from holdfast_federation.core.messages.forwarding import FrameForwarder
from holdfast_federation.core.messages.local_delivery import LocalDelivery
from holdfast_federation.core.messages.origin import Arrivals, Origin
from holdfast_federation.core.messages.streams import FormerPositions, IncomingStreams, Position
from holdfast_federation.core.neighbours import Departures, Repair
from holdfast_federation.core.policy import OPEN, Gate, LinkPolicy
from holdfast_federation.core.provenance import Provenance
from holdfast_federation.core.retained.anti_entropy import RetainedMessages
from holdfast_federation.core.routing.announcement_memory import AnnouncementMemory
from holdfast_federation.core.routing.flooding import Flooder
from holdfast_federation.core.routing.interest import (
    LocalInterest,
    RemoteInterest,
    may_leave,
    plain_of,
)
from holdfast_federation.core.routing.link_health import LinkTable
from holdfast_federation.core.routing.link_state import LinkStateDatabase
from holdfast_federation.core.routing.routes import Routes
from holdfast_federation.core.signing import AnnouncementKeys


class FederationMember:
    """One member of a federation, with all its state in memory.

    It does no I/O: `Store` and `DeliverLocally` request durability, and `stored` reports it. Every
    input ends with `_run`, so a caller never sees a state whose consequences are not drawn.
    """

    def __init__(
        self,
        identity: Identity,
        address: str,
        config: FederationConfig,
        now: float,
        filters: Iterable[str] = (),
        *,
        stored: Iterable[bytes] = (),
        positions: dict[bytes, Position] | None = None,
        former: FormerPositions | None = None,
        remembered: Iterable[bytes] = (),
        retained: Iterable[bytes] = (),
        wall_s: float | None = None,
        signing: AnnouncementKeys | None = None,
        disputed: int = 0,
        may_move: bool = False,
    ) -> None:
        """Restores a member from the state that its driver stored.

        - `identity`: the identity of this start, already durable.
        - `address`: the address that other members may dial, or empty.
        - `filters`: the subscriptions of existing sessions. The member announces no interest in
          any other filter until `local_interest` adds it.
        - `stored`, `positions`, `former`, `remembered`: custody, stream positions (`former`: those
          of earlier epochs) and known announcements that survived. Without `remembered`, a message
          published before the first peer announces interest goes to no destination.
        - `retained`: the stored retained version of each topic.
        - `wall_s`: seconds since 1970. Without it this member keeps no retained messages of the
          federation.
        - `disputed`: the last epoch that another run of this member may have used, too; its
          custody goes over to this epoch.
        - `may_move`: the start before may have been at another address, where other members look
          for this one. So it dials those with which it had links.
        - `signing`: this member's key and the federation's authority. Without it announcements are
          not signed and not verified.

        Raises InvalidFrame or custody.BadEntry when stored data is damaged.
        """
        context = MemberContext(identity, config)
        self.identity = identity
        self.node = identity.node
        self.config = config
        self.counts = context.counts
        self._effects = context.effects
        self.database = LinkStateDatabase(self.node)
        self.routes = Routes(self.node, self.database)
        self.links = LinkTable(config)
        self._interest = LocalInterest(config.filters_max)
        self._interest.change(_federated(filters), ())
        self.remote = RemoteInterest()
        """The interest of the other members. The driver reports to it what is remembered."""
        self._graph_version = -1
        self._tidy_at = now + config.tidy_s
        self.custody = Custody(context)
        used = self.custody.load(stored, now, disputed)
        self._forwarding = FrameForwarder(context, self.routes, self.links)
        self.retained = RetainedMessages(
            context, wall_s, self.remote, self.routes, self._forwarding, now
        )
        delivering = LocalDelivery(context, self._interest, self.retained)
        self.receiving = IncomingStreams(
            context, delivering, positions or {}, self.database.entries.__contains__, former
        )
        self._provenance = Provenance(context, self.database, self.routes)
        self._arriving = Arrivals(
            context, self._provenance, self.receiving, delivering, self.retained, self._forwarding
        )
        self._sending = Origin(
            context,
            self._interest,
            self.remote,
            self.custody,
            self.retained,
            self._forwarding,
            self.receiving.accept,
        )
        self._sending.skip_ids(used)
        self._repair = Repair(context, self.database, self.links)
        self._announcing = Flooder(
            context, address, self.database, self.links, self._interest, now, signing
        )
        self._departures = Departures(context, self.database, self.routes)
        self._memory = AnnouncementMemory(context, self.database, now)
        self._memory.load(remembered, now, wall_s)
        if may_move:
            self._repair.former = set(self.database.entries) - {self.node}
            self._repair.run(now)
        self._run(now)
        self.retained.load(retained, now)

    # Inputs from the driver

    def link_up(self, peer: bytes, now: float, policy: LinkPolicy = OPEN) -> None:
        """Begins a link with a member, on the only connection with it. A link with it that is up
        ends first."""
        if peer == self.node:
            self._effects.append(CloseLink(peer, "a link of a member with itself"))
            return
        if peer in self.links:
            self.link_down(peer, now)
        if len(self.links.peers()) >= LINKS_MAX:
            self._effects.append(CloseLink(peer, f"a member has at most {LINKS_MAX} links"))
            return
        self.links.up(peer, now)
        self._forwarding.gates[peer] = Gate(policy, now)
        self._announcing.linked(peer)
        self._repair.linked(peer, now)
        self.custody.wake()
        self._hello(peer, False)
        self._send_clock(peer, now)
        self._run(now)

    def link_down(self, peer: bytes, now: float) -> None:
        """Ends the link with a peer; a second call has no effect."""
        if self.links.down(peer, now):
            del self._forwarding.gates[peer]
            self._announcing.set_links(self.links.usable(now), now)
            self._announcing.unlinked(peer, now)
            self.retained.clock.forget_peer(peer)
            self._repair.link_down(peer, now)
            self._run(now)

    def link_busy(self, peer: bytes, is_busy: bool) -> None:
        """Marks a connection as full or writable again. Messages of QoS 0 are dropped meanwhile,
        because a queue of them would have no bound."""
        if peer in self.links:
            self.links[peer].is_busy = is_busy

    def frame(self, peer: bytes, data: bytes, now: float) -> None:
        """Handles one frame from a peer. An invalid frame closes the link; a frame of an unknown
        kind is counted and ignored."""
        if peer not in self.links:
            self.counts["not linked"] += 1
            return
        self.links.note_received(peer, now)
        try:
            frame = decode(data)
        except InvalidFrame as error:
            self.counts["bad frame"] += 1
            self._close(peer, str(error), now)
            return
        if frame is None:
            self.counts["unknown kind"] += 1
            return
        self._handle(peer, frame, now)
        self._run(now)

    def local_interest(self, added: Iterable[str], removed: Iterable[str], now: float) -> None:
        """Adds and removes clients' subscriptions here, each filter once for each subscription."""
        if self._interest.change(_federated(added), _federated(removed)):
            self._announcing.interest_changed(now)
        self._run(now)

    def local_publish(self, message: Message, now: float) -> MessageId | None:
        """Publishes a client's message to the federation and returns its id.

        Returns None when no other member is interested or the message may not leave. At QoS 1 and
        2 this member has custody once the driver has called `stored`. A retained message is kept
        here even while no other member is interested. It is safe when all stores of this call are
        durable.
        """
        if message.delivered_id is not None:
            self.counts["came from the federation"] += 1
            return None
        if not may_leave(message.topic):
            return None
        id = self._sending.publish(message, now)
        self._run(now)
        return id

    def broker_has_retained(self, message: Message, now: float) -> None:
        """Reports a retained message that was found in the broker rather than published now.

        The driver reports one when other members begin to be interested in its topic. After a
        start it reports every topic that is retained in the broker or was stored here; an empty
        payload means that the broker retains none. The federation's version wins and goes to the
        broker, unless the message found is known to be newer.
        """
        if message.delivered_id is None and may_leave(message.topic):
            self.retained.broker_has(self._sending.new_id(), message, now)
            self._run(now)

    def wall_clock(self, wall_s: float, now: float) -> None:
        """Reports the wall clock, after it was set and from time to time."""
        if self.retained.set_wall(wall_s, now):
            for peer in self.links.peers():
                self._send_clock(peer, now)
        self._run(now)

    def desired_topology(self, links: dict[bytes, str], now: float) -> None:
        """Sets the members that the manager wants linked with this one, with their addresses."""
        self._repair.set_desired(links, now)
        self._run(now)

    def stored(self, id: MessageId, now: float) -> None:
        """Reports that one `Store` or `DeliverLocally` is durable."""
        self.all_stored((id,), now)

    def all_stored(self, ids: Iterable[MessageId], now: float) -> None:
        """Reports that several `Store` and `DeliverLocally` effects are durable."""
        for id in ids:
            if id.node == self.node:
                self.custody.stored(id)
            # This also applies to our own ids: a group's share may come back to its origin.
            self.receiving.stored(id, now)
        self._run(now)

    def leave(self, now: float) -> None:
        """Leaves the federation for good. To stop a member that will return, the driver calls
        nothing: the others keep its messages only while it has not left."""
        self._announcing.leave(now)
        for peer in self.links.peers():
            self._forwarding.send(peer, Goodbye("leaving the federation"))
            self._close(peer, "leaving the federation", now)

    def handle_timers(self, now: float) -> None:
        """Does everything that is due at `now`."""
        due = self.links.due(now)
        for peer in due.down:
            self._close(peer, "silent", now)
        for peer in due.hellos:
            self._hello(peer, False)
        for peer in due.probes:
            self._hello(peer, True)
        self._announcing.handle_timers(now)
        self.custody.handle_timers(now)
        self.retained.handle_timers(now)
        if now >= self._repair.timer():
            self._repair.run(now)
        if now >= self._tidy_at:
            self._tidy(now)
        self._run(now)

    def timer(self, now: float) -> float:
        """Returns the time in seconds at which `handle_timers` is due."""
        return min(
            self.links.timer(now),
            self._announcing.timer(),
            self.custody.timer(),
            self.receiving.timer(),
            self._repair.timer(),
            self.retained.timer(),
            self._tidy_at,
        )

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two inputs."""
        self.custody.check()
        self.receiving.check()
        self.retained.store.check()
        self.database.check()

    def take_effects(self) -> list[Effect]:
        """Returns the effects since the last call, in the order to carry them out."""
        effects = self._effects[:]
        self._effects.clear()
        return effects

    # Queries

    def memory(self, now: float, wall_s: float) -> list[bytes]:
        """Returns the known announcements of all members, for the driver to store.

        The driver stores them soon after `database.digest` has changed and passes them to the next
        start as `remembered`. `wall_s`: seconds since 1970.
        """
        return self._memory.frames(now, wall_s)

    def interested(self, topic: str) -> tuple[bytes, ...]:
        """Returns the members that are interested in the topic, by this member's database."""
        wanting = self.remote.wanting(topic)
        nodes = set(wanting.members).union(*wanting.groups.values()) - {self.node}
        if self._interest.matches(topic):
            nodes.add(self.node)
        return tuple(sorted(nodes))

    @property
    def remote_version(self) -> int:
        """Another one when `remote_filters` may have changed."""
        return self.remote.version

    def remote_filters(self) -> frozenset[str]:
        """Returns the filters of all other members, shared ones without `$share/group/`."""
        found: set[str] = set()
        for node, entry in self.database.entries.items():
            if node != self.node:
                found.update(plain_of(filter) for filter in entry.filters)
        return frozenset(found)

    def mesh(self, topic: str) -> Mesh:
        """Returns the tree of shortest paths that joins the members interested in a topic."""
        members = self.interested(topic)
        if not members:
            return Mesh(topic, None, (), {}, {})
        parents = self.routes.tree(members[0]).pruned(set(members))
        return Mesh(topic, members[0], members, parents, children_of(parents))

    # Frames

    def _handle(self, peer: bytes, frame: Frame, now: float) -> None:
        if isinstance(frame, Data):
            admitted = self._forwarding.admit(peer, frame, now)
            if admitted is not None:
                self._arriving.handle_data(peer, admitted, now)
        elif isinstance(frame, Skip):
            self._arriving.handle_data(peer, frame, now)
        elif isinstance(frame, StreamAck):
            if self._provenance.of_ack(peer, frame):
                self._confirm(frame, peer, now)
        elif isinstance(frame, Hello):
            if frame.wants_reply:
                self._hello(peer, False)
                self.links.note_hello(peer, now)
            self._announcing.handle_digest(peer, frame.digest, now)
        elif isinstance(frame, Announcements):
            self._handle_news(peer, frame, now)
        elif isinstance(frame, Vouchers):
            self._announcing.handle_vouchers(peer, frame)
        elif isinstance(frame, Clock):
            self.retained.peer_clock(peer, frame, now)
        elif isinstance(frame, Memory):
            self.counts["unknown kind"] += 1
        elif isinstance(frame, AnnouncementRequest):
            self._announcing.handle_request(peer, frame.known, now)
        elif isinstance(frame, Goodbye):
            self._close(peer, f"the peer says: {frame.reason}", now)
        else:
            self._arriving.handle_retained_frame(peer, frame, now)

    def _handle_news(self, peer: bytes, frame: Announcements, now: float) -> None:
        entries = self.database.entries
        epochs = {
            news.origin: entries[news.origin].epoch
            for news in frame.entries
            if news.origin in entries
        }
        for node, is_certain in self._announcing.handle_news(peer, frame.entries, now):
            if node not in entries:
                continue
            self._departures.announced(node, is_certain, now)
            if entries[node].epoch > epochs.get(node, 0):
                self.retained.restarted(node, now)

    def _confirm(self, ack: StreamAck, peer: bytes | None, now: float) -> None:
        if ack.origin == self.node:
            if self._announcing.is_claimed:
                # The confirmation may be one of that other run's messages.
                self.counts["confirmed while claimed"] += 1
                return
            self.custody.confirmed(ack.destination, ack.epoch, ack.place, now)
        else:
            self._forwarding.send_ack(ack, peer, now)

    # Consequences

    def _hello(self, peer: bytes, asks: bool) -> None:
        hello = Hello(self.identity.epoch, self.database.digest, asks)
        self._forwarding.send(peer, hello)

    def _send_clock(self, peer: bytes, now: float) -> None:
        clock = self.retained.own_clock(now)
        if clock is not None:
            self._forwarding.send(peer, clock)

    def _close(self, peer: bytes, reason: str, now: float) -> None:
        self._effects.append(CloseLink(peer, reason))
        self.link_down(peer, now)

    def _tidy(self, now: float) -> None:
        self._tidy_at = now + self.config.tidy_s
        self.custody.tidy(now)
        self._sending.review_groups(now)
        self.retained.tidy(now)
        self._arriving.tidy(now)
        for node in self.database.expire(now, self.node, self.config.forget_s):
            self._remove_member(node, "member gone", now)

    def _remove_member(self, node: bytes, reason: str, now: float) -> None:
        self._sending.review_groups(now, node)
        self.custody.abandon(node, reason)
        self.retained.peer_down(node)

    def _run(self, now: float) -> None:
        """Draws the consequences of any input: usable links, changes of interest and graph, due
        messages and confirmations.

        The order matters: graph changes come before `send_due`, so that a message takes its next
        hop from the new graph. Members that have left are removed before it as well, or their
        messages would be sent once more.
        """
        if self._repair.superfluous:
            superfluous, self._repair.superfluous = self._repair.superfluous, []
            for peer in superfluous:
                self._close(peer, "the links wanted here are up", now)
        self._announcing.set_links(self.links.usable(now), now)
        if self.database.changes:
            for change in self.database.take_changes():
                self.remote.change(change.node, change.added, change.removed)
                self.retained.changed(change, now)
        if self._graph_version != self.database.graph_version:
            self._graph_version = self.database.graph_version
            self.custody.rerouted(self.routes.take_changes(), now)
            self.retained.graph_changed(now)
            self._departures.graph_changed(now)
        if self._departures.due:
            for node in self._departures.pop(now):
                self._remove_member(node, "member left", now)
        if self.database.displaced:
            for node in self.database.take_displaced():
                self._remove_member(node, "no room for the member", now)
        self._sending.send_due(now)
        for ack in self.receiving.acks(now):
            self._confirm(ack, None, now)


def _federated(filters: Iterable[str]) -> list[str]:
    """Selects the filters that this member may announce to others."""
    return [filter for filter in filters if may_leave(plain_of(filter))]
