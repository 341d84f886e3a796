"""Publications of this member's clients: their destinations, and the time of sending.

Shared subscriptions over all members: each message goes to one member with the group.

A member announces its groups. The origin prefers its own clients in the group. Otherwise it grants
the message to one reachable member with the group, the one with the highest weight for the topic.
So a topic's messages stay together and a group's topics are spread. The message contains the grant
of each destination. Groups there without a grant do not receive it (`DeliverLocally.granted`).

While databases differ or a member is lost, two members may receive a message; at QoS 1 and 2 none
is lost. A member whose group has ended refuses the message. Its origin grants it to another member
once it has received that news. It does the same when the member has left, or is unreachable for
`group_reassign_s`. The new member may be the origin itself, if its clients have joined the group by
then. If no member has the group, its clients may be moving from one member to another: the message
waits at its origin for `group_reassign_s`.

Frames from links: for this member, for members beyond it, or for both.
"""

from collections.abc import Callable, Iterable
from hashlib import blake2b

from holdfast_federation.core.context import MemberContext
from holdfast_federation.core.effects import Dropped, Message
from holdfast_federation.core.frames import SHARES_MAX, Data, Retained, Skip
from holdfast_federation.core.identity import MessageId
from holdfast_federation.core.messages.custody import Custody
from holdfast_federation.core.messages.custody_entry import CustodyEntry, Grants
from holdfast_federation.core.messages.duplicates import Duplicates, Freshness
from holdfast_federation.core.messages.forwarding import FrameForwarder, Passing
from holdfast_federation.core.messages.local_delivery import LocalDelivery
from holdfast_federation.core.messages.streams import IncomingStreams
from holdfast_federation.core.provenance import Provenance
from holdfast_federation.core.retained.anti_entropy import RetainedMessages
from holdfast_federation.core.routing.interest import LocalInterest, RemoteInterest


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


def weight(share: str, topic: str, node: bytes) -> bytes:
    return blake2b(f"{share}\0{topic}\0".encode() + node, digest_size=8).digest()


def owner(share: str, topic: str, nodes: Iterable[bytes]) -> bytes:
    """Chooses one of at least one member by highest weight (rendezvous hashing). When a member
    joins or leaves, only topics that it owns change their owner."""
    return max(nodes, key=lambda node: (weight(share, topic, node), node))


class SharedGroups:
    """The grants of this origin's messages to members with shared groups."""

    def __init__(
        self,
        context: MemberContext,
        local: LocalInterest,
        remote: RemoteInterest,
        custody: Custody,
        can_reach: Callable[[bytes], bool],
    ) -> None:
        self._own = context.node
        self._patience_s = context.config.group_reassign_s
        self._local = local
        self._remote = remote
        self._custody = custody
        self._can_reach = can_reach
        self._effects = context.effects
        # Unreachable members with grants in custody, and since when.
        self._unreachable_since: dict[bytes, float] = {}
        # Entries that wait until a member has their group, and since when.
        self._waiting_since: dict[MessageId, float] = {}

    def grants(self, message: Message) -> Grants:
        """Returns the grant of a message of this origin for each member that receives a share."""
        topic = message.topic
        wanting = self._remote.wanting(topic)
        found: dict[bytes, list[str]] = {}
        for share, nodes in wanting.groups.items():
            if self._local.has(share) and share not in message.missed_by:
                continue
            node = self._chosen(share, topic, nodes)
            if node is not None and len(found.get(node, ())) >= SHARES_MAX:
                self._effects.append(Dropped("too many groups", None, node))
            elif node is not None:
                found.setdefault(node, []).append(share)
        return {node: (node in wanting.members, tuple(shares)) for node, shares in found.items()}

    def _chosen(self, share: str, topic: str, nodes: Iterable[bytes]) -> bytes | None:
        others = [node for node in nodes if node != self._own]
        near = [node for node in others if self._can_reach(node)]
        return owner(share, topic, near or others) if others else None

    def review(
        self, new_id: Callable[[], MessageId], now: float, left: bytes | None = None
    ) -> None:
        """Takes back what members do not have the group for any more, or are away with too long,
        and gives it to others: as a message of its own, so each stream has it once. `left`: a
        member that is none any more."""
        granted = self._custody.granted()
        nodes = {node for entry in granted for node in entry.grants if node != self._own}
        self._unreachable_since = {
            node: self._unreachable_since.get(node, now)
            for node in nodes
            if not self._can_reach(node)
        }
        ids = {entry.id for entry in granted}
        self._waiting_since = {id: at for id, at in self._waiting_since.items() if id in ids}
        for entry in granted:
            for node, (_, shares) in list(entry.grants.items()):
                self._review(entry, node, shares, new_id, now, left)

    def _review(
        self,
        entry: CustodyEntry,
        node: bytes,
        shares: tuple[str, ...],
        new_id: Callable[[], MessageId],
        now: float,
        left: bytes | None,
    ) -> None:
        topic = entry.message.topic
        having = self._remote.wanting(topic).groups
        lost_since = self._unreachable_since.get(node)
        is_lost = lost_since is not None and now - lost_since >= self._patience_s
        kept: list[str] = []
        moved: dict[bytes, list[str]] = {}
        for share in shares:
            is_here = self._local.has(share)
            others = [other for other in having.get(share, ()) if other not in (node, self._own)]
            others = [other for other in others if other != left]
            near = [other for other in others if self._can_reach(other)]
            has_it = is_here if node == self._own else node in having.get(share, ())
            if has_it and node != left and not (is_lost and (near or is_here)):
                kept.append(share)
            elif others and not is_here:
                moved.setdefault(owner(share, topic, near or others), []).append(share)
            elif node != self._own:
                # Each alone: it is not given away again in part, once the broker may have it.
                given: Grants = {self._own: (False, (share,))}
                self._custody.regrant(entry, new_id(), given, now)
            elif now - self._waiting_since.setdefault(entry.id, now) < self._patience_s:
                kept.append(share)
            else:
                self._effects.append(Dropped("group gone", entry.id, node))
        if len(kept) == len(shares):
            return
        for other, shares_of_it in moved.items():
            self._custody.regrant(entry, new_id(), {other: (False, tuple(shares_of_it))}, now)
        self._custody.grant_only(entry, node, tuple(kept), now)


class Origin:
    """The step from a client's publication to custody, or at QoS 0 directly to the links."""

    def __init__(
        self,
        context: MemberContext,
        local: LocalInterest,
        remote: RemoteInterest,
        custody: Custody,
        retained: RetainedMessages,
        forwarding: FrameForwarder,
        take_here: Callable[[Data, int, int, float], str | None],
    ) -> None:
        """`take_here`: `IncomingStreams.accept`."""
        self._identity = context.identity
        self._config = context.config
        self._remote = remote
        self._custody = custody
        self._retained = retained
        self._forwarding = forwarding
        self._sharing = SharedGroups(context, local, remote, custody, forwarding.can_reach)
        self._deliver_locally = take_here
        self._sequence = 0

    def skip_ids(self, count: int) -> None:
        """Skips the first ids of this epoch, because custody has used them."""
        self._sequence = count

    def new_id(self) -> MessageId:
        self._sequence += 1
        return MessageId(self._identity.node, self._identity.epoch, self._sequence)

    def publish(self, message: Message, now: float) -> MessageId | None:
        """Publishes a message and returns its id, or None if no other member is interested."""
        grants = self._sharing.grants(message)
        nodes = grants.keys() | set(self._remote.members(message.topic))
        nodes.discard(self._identity.node)
        if not nodes and not message.is_retained:
            return None
        id = self.new_id()
        if message.is_retained:
            message = _stamped(message, self._retained.publish(id, message, now))
        if not nodes:
            return None
        if message.qos:
            self._custody.accept(id, message, sorted(nodes), now, grants)
        else:
            data = Data(
                id.node,
                id.epoch,
                id.sequence,
                0,
                1,
                0,
                message.is_retained,
                message.topic,
                message.payload,
                message.properties,
                message.expiry_s,
                [(node, 0, 0) for node in sorted(nodes)],
                0,
                message.stamp,
                [(node, plain, list(shares)) for node, (plain, shares) in grants.items()],
            )
            self._originate(data, now)
        return id

    def send_due(self, now: float) -> None:
        """Sends the messages in custody that are due."""
        for data in self._custody.collect(self._can_reach, now):
            node, place, base = data.destinations[0]
            if node == self._identity.node:
                # A group's share came back to this origin. It has no other destination.
                self._deliver_locally(data, place, base, now)
            else:
                self._originate(data, now)

    def _can_reach(self, node: bytes) -> bool:
        return node == self._identity.node or self._forwarding.can_reach(node)

    def review_groups(self, now: float, left: bytes | None = None) -> None:
        """Reviews the grants in custody. `left`: a member that has left; its grants must move
        before custody drops its messages."""
        self._sharing.review(self.new_id, now, left)

    def _originate(self, data: Data, now: float) -> None:
        self._forwarding.originate(data, data.destinations, self._config.redundancy, now)


def _stamped(message: Message, stamp: int) -> Message:
    return Message(
        message.topic,
        message.payload,
        message.qos,
        message.is_retained,
        message.properties,
        message.expiry_s,
        message.delivered_id,
        stamp,
    )
