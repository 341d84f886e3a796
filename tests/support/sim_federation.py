"""Members of a federation in virtual time, by a seed: what happens to them, and what must hold.

- What an origin has stored, or is done with, reaches every member that subscribed to it, once, in
  the order of its origin and topic. What was not stored and would not be known again is not seen
  anywhere. What a crash took from an origin's custody its broker hands over again: once, where
  messages tell their numbers, and QoS 1 perhaps twice where they do not.
- No message makes more hops than it may.
- Of each group of a shared subscription, whose members do not change, one member's clients get it.
- After calm all databases are equal.

Links may lose, delay and reorder frames, which TCP does not: the members must not care.
"""

import itertools
import random
from collections import Counter, defaultdict
from functools import partial

from holdfast.protocol.topics.names import is_shared, matches
from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.effects import DeliverLocally, Dropped, Message, StoreRetained
from holdfast_federation.core.frames import HOPS_MAX, Data, InvalidFrame, Retained, decode
from holdfast_federation.core.identity import MessageId
from holdfast_federation.core.policy import OPEN, LinkPolicy
from holdfast_federation.core.retained.clock import Version
from holdfast_federation.sidecar.status import CONTROL
from holdfast_lab.targets.graph import LAN_EDGES as LAN_EDGES
from holdfast_lab.targets.graph import edges_of as edges_of
from tests.sim.schedule import Wrong
from tests.support.sim_federation_member import WALL_S, SimMember, node_id
from tests.support.sim_links import LinkedTime, Weather, pair

DATA_KIND = 4


def number_of(node: bytes) -> int:
    return int.from_bytes(node, "big")


def random_edges(count: int, rng: random.Random, degree_max: int = 5) -> list[tuple[int, int]]:
    """As members join: each links with two, who have room."""
    degrees = [0] * count
    edges = [(0, 1)]
    degrees[0] = degrees[1] = 1
    for number in range(2, count):
        open_to = [other for other in range(number) if degrees[other] < degree_max]
        for other in rng.sample(open_to, min(2, len(open_to))):
            edges.append((other, number))
            degrees[other] += 1
            degrees[number] += 1
    return edges


class World(LinkedTime[bytes]):
    step_s = 0.05

    def __init__(
        self,
        count: int,
        edges: list[tuple[int, int]],
        seed: int = 0,
        weather: Weather | None = None,
        config: FederationConfig | None = None,
        subscriptions: dict[int, list[str]] | None = None,
    ) -> None:
        super().__init__(seed, weather or Weather())
        self.config = config or FederationConfig()
        self.epoch_step = 1
        self.edges = edges
        self.members = [SimMember(self, number) for number in range(count)]
        self.synced_at: dict[int, float] = defaultdict(float)
        self.by_id = {member.node: member for member in self.members}
        # Of (a, b) with a < b: the generation of the connection that is up.
        self.links: dict[tuple[bytes, bytes], int] = {}
        self.control_frames = 0
        self.copies: Counter[MessageId] = Counter()
        self.hops: Counter[int] = Counter()
        self.unstored: set[MessageId] = set()
        self.published: dict[MessageId, tuple[int, Message]] = {}
        # By each id under which it was handed over: the first one, and its number at its broker.
        self.firsts: dict[MessageId, tuple[MessageId, int]] = {}
        # By first ids: the members that were known to want it then.
        self.wanting: dict[MessageId, tuple[bytes, ...]] = {}
        self.promised: set[MessageId] = set()
        self.arrivals: dict[MessageId, dict[int, float]] = defaultdict(dict)
        # Of a payload and a group with its filter: the members whose clients of the group have it.
        self.group_arrivals: dict[tuple[bytes, str], list[int]] = defaultdict(list)
        # By topic and version: the members that have stored it.
        self.stored_versions: dict[str, dict[Version, set[int]]] = {}
        # Of (node, peer): what its end of the link lets through.
        self.policies: dict[tuple[bytes, bytes], LinkPolicy] = {}
        self.frames: Counter[int] = Counter()
        self.dropped: list[Dropped] = []
        self.conflicts = 0
        self._generations = itertools.count(1)
        for number, filters in (subscriptions or {}).items():
            self.members[number].filters = filters
        for a, b in edges:
            for one, other in ((a, b), (b, a)):
                self.members[one].desired[node_id(other)] = f"mqtt://{other}"
        for member in self.members:
            member.start()

    def step_epochs(self) -> None:
        """A place for a mistake: what is done about epochs when a member starts."""

    # The network

    def hears(self, a: bytes, b: bytes) -> bool:
        runs = self.by_id[a].core is not None and self.by_id[b].core is not None
        return runs and super().hears(a, b)

    def send(self, sender: SimMember, peer: bytes, data: bytes) -> None:
        self.frames[data[1]] += 1
        if data[1] in CONTROL:
            self.control_frames += 1
        elif data[1] == DATA_KIND:
            self._check_data(data)
        generation = self.links.get(pair(sender.node, peer))
        if generation is not None:
            arrive = partial(self._arrive, sender.node, peer, generation, data)
            self.carry(sender.node, peer, arrive)

    def _arrive(self, sender: bytes, peer: bytes, generation: int, data: bytes) -> None:
        if self.links.get(pair(sender, peer)) == generation and self.hears(sender, peer):
            self.by_id[peer].call(lambda core, now: core.frame(sender, data, now))

    def _check_data(self, data: bytes) -> None:
        try:
            frame = decode(data)
        except InvalidFrame as error:
            raise Wrong(str(error)) from error
        assert isinstance(frame, Data)
        self.copies[frame.id] += 1
        if frame.hops > min(frame.hops_max, HOPS_MAX):
            raise Wrong(f"{frame.id.sequence} made hop {frame.hops} of {frame.hops_max}")
        if frame.id in self.unstored:
            raise Wrong(f"{frame.id.sequence} was sent before it was stored")

    def dial(self, member: SimMember, node: bytes) -> None:
        self.at(self.now + self.delay(), lambda: self.connect(member.node, node))

    def connect(self, a: bytes, b: bytes) -> None:
        if pair(a, b) in self.links or not self.hears(a, b):
            return
        self.links[pair(a, b)] = next(self._generations)
        for node, peer in ((a, b), (b, a)):
            policy = self.policies.get((node, peer), OPEN)
            if self.by_id[node].core is not None:
                self._link_up(node, peer, policy)

    def _link_up(self, node: bytes, peer: bytes, policy: LinkPolicy) -> None:
        self.by_id[node].call(lambda core, now: core.link_up(peer, now, policy))

    def close(self, closer: bytes, peer: bytes) -> None:
        """By one end; the other hears of it where it can."""
        generation = self.links.pop(pair(closer, peer), None)
        if generation is not None:
            self.at(self.now + self.delay(), lambda: self._closed(peer, closer))

    def _closed(self, node: bytes, peer: bytes) -> None:
        """A member on the other side of a partition finds out by itself."""
        if self.hears(node, peer) and pair(node, peer) not in self.links:
            self.by_id[node].call(lambda core, now: core.link_down(peer, now))

    def kill_link(self, a: int, b: int) -> None:
        """The connection breaks; both ends see it."""
        one, other = node_id(a), node_id(b)
        if self.links.pop(pair(one, other), None) is not None:
            self._lose(one, other)
            self._lose(other, one)

    def _lose(self, node: bytes, peer: bytes) -> None:
        if self.by_id[node].core is not None:
            self.by_id[node].call(lambda core, now: core.link_down(peer, now))

    # Faults

    def crash(self, number: int, is_silent: bool = False) -> None:
        """What was not synced is lost. Silent: the host is gone, no connection is closed."""
        member = self.members[number]
        if member.core is None:
            return
        member.disk.remembered = member.core.memory(self.now, WALL_S + self.now)
        hearing = [key for key in self.links if member.node in key and self.hears(*key)]
        member.core = None
        member.life += 1
        self.unstored = {id for id in self.unstored if id.node != member.node}
        for key in [] if is_silent else hearing:
            del self.links[key]
            self._lose(key[0] if key[1] == member.node else key[1], member.node)

    def restart(self, number: int) -> None:
        member = self.members[number]
        if member.core is not None:
            return
        for key in [key for key in self.links if member.node in key]:
            del self.links[key]
        member.start()

    def partition(self, numbers: set[int]) -> None:
        self.sides = {node_id(number): 1 for number in numbers}

    # Clients

    def publish(
        self,
        number: int,
        topic: str,
        qos: int = 1,
        payload: bytes = b"x",
        is_retained: bool = False,
    ) -> MessageId | None:
        message = Message(topic, payload, qos, is_retained)
        member = self.members[number]
        if is_retained:
            member.broker_retains(message, False)
        for group in member.groups(topic):
            self.group_arrivals[payload, group].append(number)
        id = member.publish(message)
        if id is None:
            return None
        if id in self.published:
            raise Wrong(f"two messages are {id.epoch}.{id.sequence} of {number}")
        self.published[id] = (number, message)
        return id

    def handed_over(
        self, id: MessageId, first: MessageId, number: int, wanting: tuple[bytes, ...]
    ) -> None:
        """To the member, maybe again. `wanting`: the members that it knows of."""
        self.firsts[id] = (first, number)
        self.wanting.setdefault(first, wanting)

    def conflicted(self, member: SimMember, epoch: int) -> None:
        """Others know a later start of the member than this one."""
        self.conflicts += 1

    def first_of(self, id: MessageId) -> MessageId:
        return self.firsts[id][0] if id in self.firsts else id

    def number_of_message(self, id: MessageId) -> int | None:
        return self.firsts[id][1] if id in self.firsts else None

    def promise(self, id: MessageId) -> None:
        """Its publisher has the acknowledgement, and its broker will not hand it over again."""
        self.promised.add(self.first_of(id))

    def subscribers(self, id: MessageId) -> set[int]:
        origin, message = self.published[id]
        return {
            member.number
            for member in self.members
            if member.number != origin
            # A shared filter, as it is written, matches none of these topics.
            and any(matches(filter, message.topic) for filter in member.filters)
        }

    # What must hold

    def check_delivery(self, member: SimMember, effect: DeliverLocally) -> None:
        self.hops[effect.hops] += 1
        if effect.hops > HOPS_MAX:
            raise Wrong(f"{effect.hops} hops")
        # What is for a group only may have been given to it again, as another message.
        first = self.first_of(effect.id)
        if first not in self.published and effect.message.qos and effect.is_plain:
            raise Wrong("a message that nobody published")

    def check_known(self, member: SimMember, effect: DeliverLocally) -> None:
        """It was found to be there."""
        first = self.first_of(effect.id)
        is_due = effect.is_plain and member.node in self.wanting[first]
        if is_due and member.number not in self.arrivals[first]:
            raise Wrong(f"{first.epoch}.{first.sequence} taken for known at {member.number}")

    def retained(self, member: SimMember, effect: StoreRetained) -> None:
        frame = decode(effect.data)
        assert isinstance(frame, Retained)
        versions = self.stored_versions.setdefault(effect.topic, {})
        versions.setdefault(frame.messages[0].version, set()).add(member.number)

    def arrived(self, member: SimMember, effect: DeliverLocally, groups: list[str]) -> None:
        """For good: a client may have it."""
        message = effect.message
        if message.is_retained:
            member.broker_retains(message, True)
        for group in groups:
            self.group_arrivals[message.payload, group].append(member.number)
        if not effect.is_plain:
            return
        first = self.first_of(effect.id)
        is_again = member.number in self.arrivals[first]
        may_repeat = message.qos == 1 and not self.by_id[first.node].tells_places
        if effect.id in member.disk.delivered or (is_again and not may_repeat):
            raise Wrong(f"{effect.id.epoch}.{effect.id.sequence} twice at {member.number}")
        self.arrivals[first].setdefault(member.number, self.now)
        # QoS 0 waits for nobody: its order is one of its own.
        key = (effect.id.node, effect.message.topic, effect.message.qos > 0)
        order = (effect.id.epoch, effect.id.sequence)
        if order <= member.newest.get(key, (0, 0)):
            raise Wrong(f"{order} after {member.newest[key]} at {member.number}")
        member.newest[key] = order

    def digests(self) -> set[bytes]:
        return {member.core.database.digest for member in self.members if member.core is not None}

    def is_agreed(self) -> bool:
        return len(self.digests()) == 1

    def is_stable(self) -> bool:
        return self.is_agreed() and all(
            len(member.member.database.entries) == len(self.members)
            and len(member.member.links.usable(self.now)) >= len(member.desired)
            for member in self.members
        )

    def missing(self) -> list[tuple[MessageId, int]]:
        return [
            (id, number)
            for id in self.promised & self.published.keys()
            for number in self.subscribers(id)
            if number not in self.arrivals[id]
        ]

    def calm(self) -> None:
        self.heal()
        self.weather.loss = 0.0
        for member in self.members:
            self.restart(member.number)

    def settle(self, limit_s: float = 60.0) -> None:
        """No more faults: everyone is back, and everything promised arrives."""
        self.calm()
        end = self.now + limit_s
        while not self.is_agreed() or self.missing():
            if self.now > end:
                raise Wrong(f"not well within {limit_s} s: missing {self.missing()[:3]}")
            self.run(self.step_s)
        self.run(2.0)
        # A confirmation that was lost follows a retransmission.
        end = self.now + self.config.retry_max_s
        while self.now < end and any(len(member.member.custody) for member in self.members):
            self.run(0.5)
        for member in self.members:
            if len(member.member.custody):
                raise Wrong(f"{len(member.member.custody)} left in the custody of {member.number}")


def plain_filters(member: SimMember) -> list[str]:
    return [filter for filter in member.filters if not is_shared(filter)]


FAULTS = ("crash", "silent crash", "restart", "restart", "kill link", "cut", "partition", "heal")


def random_weather(rng: random.Random) -> Weather:
    return Weather(
        delay_s=(0.001, rng.choice((0.005, 0.05))),
        loss=rng.choice((0.0, 0.0, 0.02)),
        reorders=rng.random() < 0.3,
        sync_s=(0.0005, rng.choice((0.005, 0.3))),
    )


def rough_world(seed: int, duration_s: float = 20.0, settle_s: float = 60.0) -> World:
    """Publishing from all sides, while links and members come and go."""
    rng = random.Random(seed)
    count = rng.choice((4, 6, 8, 12))
    edges = edges_of(LAN_EDGES) if count == 12 else random_edges(count, rng)
    subscriptions = {
        number: [rng.choice(("#", "a/#", "+/1", "a/1", "b/+"))]
        for number in rng.sample(range(count), min(5, count - 1))
    }
    weather = random_weather(rng)
    world = World(count, edges, seed, weather, subscriptions=subscriptions)
    for member in world.members:
        member.tells_places = rng.random() < 0.7
    world.run_until(world.is_stable, 60.0)
    end = world.now + duration_s
    while world.now < end:
        for _ in range(rng.randint(0, 3)):
            number = rng.randrange(count)
            if world.members[number].core is not None:
                topic = rng.choice(("a/1", "a/2", "b/1", "$x/1"))
                world.publish(number, topic, rng.choice((0, 1, 1, 2)))
        if rng.random() < 0.1:
            happen(world, rng)
        world.run(rng.choice((0.002, 0.05, 0.2)))
    world.settle(settle_s)
    return world


def happen(world: World, rng: random.Random) -> None:
    kind = rng.choice(FAULTS)
    number = rng.randrange(len(world.members))
    a, b = rng.choice(world.edges)
    if kind in ("crash", "silent crash"):
        world.crash(number, kind == "silent crash")
    elif kind == "restart":
        for member in world.members:
            if rng.random() < 0.5:
                world.restart(member.number)
    elif kind == "kill link":
        world.kill_link(a, b)
    elif kind == "cut":
        world.cut.add(pair(node_id(a), node_id(b)))
    elif kind == "partition":
        size = rng.randint(1, len(world.members) - 1)
        world.partition(set(rng.sample(range(len(world.members)), size)))
    else:
        world.heal()
