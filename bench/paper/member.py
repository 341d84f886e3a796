"""A member of a federation of the published protocol: a pure machine from messages to effects.

The driver subscribes to `messages.SUBSCRIPTIONS` on its own broker, without what it published
there itself (No Local) and without what is retained, and hands over each message as it comes. It
calls one method at a time, then carries out `take_effects()` in order and arms one timer for
`timer()`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import Final

from bench.paper.config import PaperConfig
from bench.paper.effects import (
    ConnectNeighbour,
    DeliverLocally,
    DisconnectNeighbour,
    Effect,
    Outbox,
    Refused,
)
from bench.paper.messages import (
    BEACON,
    CONTROL_BYTES_MAX,
    CORE_ANN,
    FEDERATED,
    MEMB_ANN,
    ROUTING,
    ROUTING_OVERHEAD_BYTES,
    TOPOLOGY_ANN,
    BadMessage,
    CoreAnnouncement,
    MembershipAnnouncement,
    PublicationId,
    RoutedPublication,
    TopologyAnnouncement,
    decode,
    encode,
    topic_below,
)
from bench.paper.topic import (
    OtherRoot,
    OwnRoot,
    TableFull,
    Topic,
    TopicTable,
    TopicView,
)
from holdfast_federation.core.identity import MessageId
from holdfast_federation.core.messages.duplicates import Duplicates, Freshness

NUMBER_BYTES: Final = 8
TIDY_S: Final = 60.0
"""The seconds between two removals of old publication ids."""


class PaperMember:
    """One member of a federation of the published protocol, with all its state in memory."""

    def __init__(
        self,
        id: int,
        epoch: int,
        config: PaperConfig,
        neighbours: Mapping[int, str],
        now: float,
    ) -> None:
        """`epoch`: above that of every earlier start, and above 0. `neighbours`: the broker URL of
        each."""
        self.id = id
        self.epoch = epoch
        self.config = config
        # What was refused, passed over or lost, by reason.
        self.counts: Counter[str] = Counter()
        self._effects: list[Effect] = []
        self._outbox = Outbox(id, epoch, config, self._effects)
        self._topics = TopicTable(config.topics_max)
        self._duplicates = Duplicates()
        self._published = 0
        self._tidy_at = now + TIDY_S
        self._routed_bytes_max = config.payload_bytes_max * 4 // 3 + ROUTING_OVERHEAD_BYTES
        self._readers: Final[tuple[tuple[str, Callable[[str, bytes, float], None]], ...]] = (
            (ROUTING, self._handle_routed),
            (FEDERATED, self._publish),
            (CORE_ANN, self._handle_core_ann),
            (MEMB_ANN, self._handle_memb_ann),
            (BEACON, self._handle_beacon),
        )
        self.set_neighbours(neighbours)

    # Inputs from the driver

    def handle(self, topic: str, payload: bytes, now: float) -> None:
        """Handles a message on this member's broker, from a client, a neighbour or the manager."""
        with self._refusing(topic):
            self._dispatch(topic, payload, now)

    def set_neighbours(self, neighbours: Mapping[int, str]) -> None:
        """Replaces all neighbours, by the manager's reply to a join."""
        for id in set(self._outbox.neighbours) - set(neighbours):
            self._remove_neighbour(id)
        for id, address in neighbours.items():
            with self._refusing(TOPOLOGY_ANN[0]):
                self._add_neighbour(id, address)

    def handle_timers(self, now: float) -> None:
        self._topics.handle_timers(now)
        if now >= self._tidy_at:
            self._tidy_at = now + TIDY_S
            self._duplicates.expire(now)

    def timer(self) -> float:
        """Returns the time of the next `handle_timers`."""
        return min(self._topics.timer(), self._tidy_at if len(self._duplicates) else inf)

    def take_effects(self) -> list[Effect]:
        """Returns the effects since the last call, in order."""
        effects = self._effects[:]
        self._effects.clear()
        return effects

    # Queries

    @property
    def neighbours(self) -> Mapping[int, str]:
        return self._outbox.neighbours

    @property
    def topics(self) -> Iterable[str]:
        """The known topics."""
        return [topic.name for topic in self._topics]

    def view(self, name: str, now: float) -> TopicView:
        """Returns the state of a topic as this member sees it."""
        topic = self._topics.peek(name)
        if topic is None:
            return TopicView(name, None, None, False, False, (), ())
        topic.expire(now)
        root: int | None = None
        distance: int | None = None
        parents: tuple[int, ...] = ()
        if isinstance(topic.root, OtherRoot):
            root, distance = topic.root.id, topic.root.distance
            parents = tuple(sorted(topic.root.next_hops()))
        elif isinstance(topic.root, OwnRoot) and topic.root.silent_since is None:
            root, distance = self.id, 0
        return TopicView(
            name,
            root,
            distance,
            topic.is_member(now),
            topic.has_subscriber(now),
            parents,
            tuple(sorted(topic.current_children(now))),
        )

    # Messages

    @contextmanager
    def _refusing(self, topic: str) -> Iterator[None]:
        """Counts and reports a message that is refused."""
        try:
            yield
        except BadMessage as error:
            self.counts[error.reason] += 1
            self._effects.append(Refused(topic, error.reason, str(error)))

    def _dispatch(self, topic: str, payload: bytes, now: float) -> None:
        for prefix, read in self._readers:
            if topic.startswith(prefix):
                read(topic_below(topic, prefix), payload, now)
                return
        if topic not in TOPOLOGY_ANN:
            raise BadMessage("unknown topic", "a federator is not subscribed to it")
        message = decode(payload, TopologyAnnouncement, CONTROL_BYTES_MAX)
        if message.action == "NEW":
            self._add_neighbour(message.neighbor.id, message.neighbor.ip)
        else:
            self._remove_neighbour(message.neighbor.id)

    def _add_neighbour(self, id: int, address: str) -> None:
        neighbours = self._outbox.neighbours
        if id == self.id:
            raise BadMessage("own id", f"a neighbour with this member's own id, {id}")
        if neighbours.get(id) == address:
            return
        if id not in neighbours and len(neighbours) >= self.config.neighbours_max:
            raise BadMessage(
                "too many neighbours", f"a member has at most {self.config.neighbours_max}"
            )
        neighbours[id] = address
        self._effects.append(ConnectNeighbour(id, address))

    def _remove_neighbour(self, id: int) -> None:
        if self._outbox.neighbours.pop(id, None) is None:
            return
        for topic in self._topics:
            topic.neighbour_removed(id)
        self._effects.append(DisconnectNeighbour(id))

    def _handle_beacon(self, name: str, _: bytes, now: float) -> None:
        topic = self._topics.get(name) or self._new_topic(name, now)
        topic.beacon(now)
        self._topics.schedule(topic)

    def _publish(self, name: str, payload: bytes, now: float) -> None:
        """Routes a client's publication. Subscribers here have it from their broker."""
        if len(payload) > self.config.payload_bytes_max:
            raise BadMessage(
                "publication too large",
                f"{len(payload)} bytes, at most {self.config.payload_bytes_max} are routed",
            )
        topic = self._topics.get(name)
        hops = None if topic is None else topic.next_hops(None, now)
        if not hops:
            self.counts["nobody to route to"] += 1
            return
        self._published += 1
        id = PublicationId(self.id, self._published, self.epoch)
        self._route(name, RoutedPublication(id, self.id, payload, 1), hops)

    def _handle_core_ann(self, name: str, payload: bytes, now: float) -> None:
        message = decode(payload, CoreAnnouncement, CONTROL_BYTES_MAX)
        self._require_neighbour(message.sender)
        topic = self._topics.get(name) or self._new_topic(name, now)
        reason = topic.announced(message, now)
        if reason is None:
            self._topics.schedule(topic)
        else:
            self.counts[reason] += 1

    def _handle_memb_ann(self, name: str, payload: bytes, now: float) -> None:
        message = decode(payload, MembershipAnnouncement, CONTROL_BYTES_MAX)
        self._require_neighbour(message.sender)
        topic = self._topics.get(name)
        if topic is None:
            self.counts["answer for another root"] += 1
            return
        reason = topic.handle_reply(message, now)
        self._topics.schedule(topic)
        if reason is not None:
            self.counts[reason] += 1

    def _handle_routed(self, name: str, payload: bytes, now: float) -> None:
        """Delivers a publication here and routes it on, except to where it came from.

        The duplicate check comes first. Counter-example without it: three members in a triangle
        route a publication around until its hop limit, and deliver it with each round.
        """
        message = decode(payload, RoutedPublication, self._routed_bytes_max)
        self._require_neighbour(message.sender)
        if message.id.origin == self.id:
            self.counts["own publication"] += 1
            return
        if self._duplicates.add(_window_id(name, message.id), now) is Freshness.SEEN:
            self.counts["duplicate"] += 1
            return
        topic = self._topics.get(name)
        if topic is None:
            self.counts["nobody to route to"] += 1
            return
        if topic.has_subscriber(now):
            self._effects.append(
                DeliverLocally(FEDERATED + name, message.payload or b"", self.config.qos)
            )
        hops = topic.next_hops(message.sender, now)
        if hops is None:
            self.counts["nobody to route to"] += 1
        elif hops and message.hops >= self.config.hops_max:
            self.counts["hop limit"] += 1
        else:
            onward = RoutedPublication(message.id, self.id, message.payload, message.hops + 1)
            self._route(name, onward, hops)

    def _route(self, name: str, message: RoutedPublication, hops: list[int]) -> None:
        payload = encode(message)
        for hop in hops:
            self._outbox.send(hop, ROUTING + name, payload)

    def _require_neighbour(self, sender: int) -> None:
        """Refuses an announcement of another member than a neighbour. Nothing can be routed to that
        member, so the announcement is useless."""
        if sender not in self._outbox.neighbours:
            raise BadMessage("no neighbour", f"{sender} is no neighbour of {self.id}")

    def _new_topic(self, name: str, now: float) -> Topic:
        try:
            if self._topics.make_room(now) is not None:
                self.counts["topic forgotten"] += 1
        except TableFull:
            raise BadMessage(
                "too many topics",
                f"no room for more than {self.config.topics_max}: all of them are in use",
            ) from None
        return Topic(name, self._outbox)


def _window_id(topic: str, id: PublicationId) -> MessageId:
    """Returns the id of the publication's window of duplicates. Published federators count from 0
    in each topic and after each start, so their windows are per topic."""
    origin = id.origin.to_bytes(NUMBER_BYTES, "big")
    return MessageId(origin if id.epoch else origin + topic.encode(), id.epoch, id.number)
