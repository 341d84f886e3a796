"""Shared subscriptions over all members: one message to one member of a group.

A member's announcement has its groups. The origin gives a message to the group's clients where they
are its own; otherwise to one member that has the group and can be reached, the one with the highest
weight for the topic, so a topic's messages stay together and a group's topics are spread. The
message says what it was given (*granted*) to each destination: a group there that was not granted
it must not have it (`DeliverLocally.withheld`).

While databases differ, or a member with a group is lost, a message may go to two: at QoS 1 and 2
nothing is lost for that. A member that has no such group any more does not accept the message, and
its origin grants it to another when it has heard of that; so too when the member has left, or
cannot be reached for `share_patience_s`. That other one may be the origin itself, whose own clients
have the group by then. Where nobody has it, its clients may be on their way from one member to
another: for so long it waits at its origin.
"""

from collections.abc import Callable, Iterable
from hashlib import blake2b

from holdfast.federation.core.effects import Dropped, Effect, Message
from holdfast.federation.core.frames import SHARES_MAX
from holdfast.federation.core.identity import MessageId
from holdfast.federation.core.messages.custody import Custody, CustodyEntry, Grants
from holdfast.federation.core.routing.interest import LocalInterest, RemoteInterest


def weight(share: str, topic: str, node: bytes) -> bytes:
    return blake2b(f"{share}\0{topic}\0".encode() + node, digest_size=8).digest()


def owner(share: str, topic: str, nodes: Iterable[bytes]) -> bytes:
    """Of at least one. Of the others nobody's owner changes when one comes or goes."""
    return max(nodes, key=lambda node: (weight(share, topic, node), node))


class SharedGroups:
    def __init__(
        self,
        own: bytes,
        patience_s: float,
        local: LocalInterest,
        remote: RemoteInterest,
        custody: Custody,
        can_reach: Callable[[bytes], bool],
        effects: list[Effect],
    ) -> None:
        self._own = own
        self._patience_s = patience_s
        self._local = local
        self._remote = remote
        self._custody = custody
        self._can_reach = can_reach
        self._effects = effects
        # Members with grants in custody.
        self._lost_since: dict[bytes, float] = {}
        # Entries that wait for anybody with their group.
        self._waiting_since: dict[MessageId, float] = {}

    def grants(self, message: Message) -> Grants:
        """To each member that gets a group's share of a message of ours."""
        topic = message.topic
        wanting = self._remote.wanting(topic)
        found: dict[bytes, list[str]] = {}
        for share, nodes in wanting.shares.items():
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
        """Take back what members do not have the group for any more, or are away with too long,
        and give it to others: as a message of its own, so each stream has it once. `left`: a member
        that is none any more."""
        granted = self._custody.granted()
        nodes = {node for entry in granted for node in entry.grants if node != self._own}
        self._lost_since = {
            node: self._lost_since.get(node, now) for node in nodes if not self._can_reach(node)
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
        having = self._remote.wanting(topic).shares
        lost_since = self._lost_since.get(node)
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
                self._custody.take_again(entry, new_id(), given, now)
            elif now - self._waiting_since.setdefault(entry.id, now) < self._patience_s:
                kept.append(share)
            else:
                self._effects.append(Dropped("group gone", entry.id, node))
        if len(kept) == len(shares):
            return
        for other, shares_of_it in moved.items():
            self._custody.take_again(entry, new_id(), {other: (False, tuple(shares_of_it))}, now)
        self._custody.grant_only(entry, node, tuple(kept), now)
