"""Members of the published protocol in virtual time, by a seed: what happens to them, and what
must hold.

- A member hands a publication to its subscribers once in its life, never one of its own clients.
- Nothing is published retained, and no publication makes more hops than it may.
- After calm everybody knows the same root, distances and parents are those of the graph, and what
  is published then reaches all subscribers.

A message to a neighbour is one that its federator finds on its broker. Brokers are not modelled,
but what reaches one without a federator is lost.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from bench.paper.config import PaperConfig
from bench.paper.effects import (
    ConnectNeighbour,
    DeliverLocally,
    DisconnectNeighbour,
    Effect,
    PublishToNeighbour,
    Refused,
)
from bench.paper.member import PaperMember
from bench.paper.messages import BEACON, FEDERATED, ROUTING, TOPOLOGY_ANN
from bench.paper.topic import PaperMesh, mesh
from tests.sim.schedule import Wrong
from tests.support.sim_links import LinkedTime, Weather

TOPIC = "t"


class SimPaperMember:
    """A federator, and the subscribers of its broker."""

    def __init__(self, world: "PaperWorld", id: int) -> None:
        self.world = world
        self.id = id
        self.epoch = 0
        self.core: PaperMember | None = None
        self.life = 0
        self.linked: set[int] = set()
        """Whose brokers it has a connection to."""
        self.wanted: set[str] = set()
        self._armed = float("inf")

    @property
    def member(self) -> PaperMember:
        assert self.core is not None
        return self.core

    def start(self) -> None:
        world = self.world
        self.life += 1
        self.epoch += world.epoch_step
        self.linked = set()
        self._armed = float("inf")
        neighbours = {other: f"tcp://{other}" for other in sorted(world.graph[self.id])}
        self.core = PaperMember(self.id, self.epoch, world.config, neighbours, world.now)
        self.call(lambda core, now: None)

    def call(self, input: Callable[[PaperMember, float], object]) -> None:
        """Do it, carry out what follows, arm the timer."""
        core = self.member
        input(core, self.world.now)
        for effect in core.take_effects():
            self._carry_out(effect)
        at = core.timer()
        if at < self._armed:
            self._armed = at
            life = self.life
            self.world.at(at, lambda: self._ring(life, at))

    def hear(self, topic: str, payload: bytes) -> None:
        if self.core is not None:
            self.call(lambda core, now: core.handle(topic, payload, now))

    def _ring(self, life: int, at: float) -> None:
        if life != self.life or self.core is None or self._armed != at:
            return
        self._armed = float("inf")
        self.call(lambda core, now: core.handle_timers(now))

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case PublishToNeighbour():
                if effect.neighbour not in self.linked:
                    raise Wrong(f"{self.id} publishes on a broker that it is not connected to")
                self.world.send(self, effect)
            case DeliverLocally():
                self.world.deliver(self, effect)
            case ConnectNeighbour(neighbour, _):
                self.linked.add(neighbour)
            case DisconnectNeighbour(neighbour):
                self.linked.discard(neighbour)
            case Refused(_, reason, text):
                raise Wrong(f"{self.id} refuses what another member says: {reason}: {text}")


class PaperWorld(LinkedTime[int]):
    def __init__(
        self,
        count: int,
        edges: list[tuple[int, int]],
        seed: int = 0,
        subscribers: dict[int, list[str]] | None = None,
        weather: Weather | None = None,
        config: PaperConfig | None = None,
    ) -> None:
        super().__init__(seed, weather or Weather((0.002, 0.002)))
        self.config = config or PaperConfig()
        self.epoch_step = 1
        self.edges = edges
        self.graph: dict[int, set[int]] = {number: set() for number in range(count)}
        for a, b in edges:
            self.graph[a].add(b)
            self.graph[b].add(a)
        self.sent: Counter[str] = Counter()
        """Messages between members, by the kind that their topic names."""
        self.copies: Counter[bytes] = Counter()
        """Of each publication, by its payload."""
        self.published: dict[bytes, tuple[int, str]] = {}
        self.arrivals: dict[bytes, dict[int, float]] = defaultdict(dict)
        self._delivered: set[tuple[int, int, bytes]] = set()
        self.members = [SimPaperMember(self, number) for number in range(count)]
        for member in self.members:
            member.start()
        for number, topics in (subscribers or {}).items():
            for topic in topics:
                self.subscribe(number, topic)

    # Links

    def send(self, sender: SimPaperMember, effect: PublishToNeighbour) -> None:
        self.check(effect)
        if not self.hears(sender.id, effect.neighbour):
            return
        receiver = self.members[effect.neighbour]
        # A federator that has started meanwhile has subscribed anew: nothing waits for it.
        life = receiver.life

        def arrive() -> None:
            if receiver.life == life and self.hears(sender.id, receiver.id):
                receiver.hear(effect.topic, effect.payload)

        self.carry(sender.id, receiver.id, arrive)

    def check(self, effect: PublishToNeighbour) -> None:
        self.sent[effect.topic.split("/")[1]] += 1
        if effect.retain:
            raise Wrong(f"{effect.topic} is published retained")
        if not effect.topic.startswith(ROUTING):
            return
        message: dict[str, Any] = msgspec.json.decode(effect.payload)
        payload = msgspec.convert(message["Payload"], bytes)
        self.copies[payload] += 1
        if not 0 < message["Hops"] <= self.config.hops_max:
            raise Wrong(f"{payload!r} makes hop {message['Hops']}")
        # Every member sends a message once to each of its neighbours, at most.
        if self.copies[payload] > 2 * len(self.edges) * len(self.members):
            raise Wrong(f"{payload!r} is in a loop")

    # Clients

    def subscribe(self, number: int, topic: str) -> None:
        """With beacons from some moment of the next interval on, whether there is a federator or
        not."""
        self.members[number].wanted.add(topic)

        def beacon() -> None:
            if topic in self.members[number].wanted:
                self.members[number].hear(BEACON + topic, b"")
                self.at(self.now + self.config.beacon_interval_s, beacon)

        self.at(self.now + self.rng.uniform(0, self.config.beacon_interval_s), beacon)

    def publish(self, number: int, topic: str = TOPIC) -> bytes:
        payload = b"%d from %d" % (len(self.published), number)
        self.published[payload] = (number, topic)
        self.members[number].hear(FEDERATED + topic, payload)
        return payload

    def deliver(self, member: SimPaperMember, effect: DeliverLocally) -> None:
        origin, topic = self.published[effect.payload]
        if effect.topic != FEDERATED + topic:
            raise Wrong(f"{effect.payload!r} is delivered as {effect.topic}")
        if origin == member.id:
            raise Wrong(f"{effect.payload!r} comes back to {member.id}")
        key = (member.id, member.life, effect.payload)
        if key in self._delivered:
            raise Wrong(f"{effect.payload!r} twice at {member.id}")
        self._delivered.add(key)
        self.arrivals[effect.payload][member.id] = self.now

    def subscribers(self, topic: str) -> set[int]:
        return {member.id for member in self.members if topic in member.wanted}

    def missing(self, payload: bytes) -> set[int]:
        origin, topic = self.published[payload]
        return self.subscribers(topic) - {origin} - set(self.arrivals[payload])

    # Faults

    def crash(self, number: int, detected_s: float | None = None) -> None:
        """`detected_s`: until the topology manager has its neighbours remove it."""
        member = self.members[number]
        if member.core is None:
            return
        member.core = None
        member.life += 1
        if detected_s is not None:
            life = member.life
            self.at(self.now + detected_s, lambda: self._removed(number, life))

    def _removed(self, number: int, life: int) -> None:
        if self.members[number].life == life:
            for other in sorted(self.graph[number]):
                self.members[other].hear(TOPOLOGY_ANN[0], announcement(number, "REMOVE"))

    def restart(self, number: int) -> None:
        """It joins again, and its neighbours are told."""
        if self.members[number].core is not None:
            return
        self.members[number].start()
        for other in sorted(self.graph[number]):
            self.members[other].hear(TOPOLOGY_ANN[1], announcement(number, "NEW"))

    def partition(self, numbers: set[int]) -> None:
        self.sides = dict.fromkeys(numbers, 1)

    # What must hold in the end

    def roots(self, topic: str = TOPIC) -> set[int | None]:
        """Whom those that run take for the root."""
        return {
            member.core.view(topic, self.now).root
            for member in self.members
            if member.core is not None
        }

    def mesh(self, topic: str = TOPIC) -> PaperMesh:
        return mesh(
            topic,
            {
                member.id: member.core.view(topic, self.now)
                for member in self.members
                if member.core is not None
            },
        )

    def is_agreed(self, topic: str = TOPIC) -> bool:
        roots = self.roots(topic)
        return len(roots) == 1 and None not in roots

    def distances(self, root: int) -> dict[int, int]:
        found = {root: 0}
        queue = deque([root])
        while queue:
            node = queue.popleft()
            for other in sorted(self.graph[node] - found.keys()):
                found[other] = found[node] + 1
                queue.append(other)
        return found

    def true_parents(self, topic: str = TOPIC) -> dict[int, tuple[int, ...]]:
        """By the graph: of all members of the mesh but the root, the lowest of those nearer."""
        (root,) = self.roots(topic)
        assert root is not None
        distances = self.distances(root)
        parents: dict[int, tuple[int, ...]] = {}
        queue = deque(self.subscribers(topic) - {root})
        while queue:
            node = queue.popleft()
            if node in parents:
                continue
            nearer = (each for each in self.graph[node] if distances[each] < distances[node])
            parents[node] = tuple(sorted(nearer)[: self.config.redundancy])
            queue.extend(parent for parent in parents[node] if parent != root)
        return parents

    def is_true(self, topic: str = TOPIC) -> bool:
        (root,) = self.roots(topic)
        assert root is not None
        distances = self.distances(root)
        if any(
            member.member.view(topic, self.now).distance != distances[member.id]
            for member in self.members
        ):
            return False
        parents, true_parents = self.mesh(topic).parents, self.true_parents(topic)
        if self.config.reply_delay_s:
            return parents == true_parents
        # Who answers at once answers some that are none of the lowest.
        return parents.items() >= true_parents.items()

    def settle(self) -> None:
        """No more faults: everybody is back, and the meshes are what they should be."""
        self.heal()
        self.weather.loss = 0.0
        self.weather.delay_s = (0.002, 0.002)
        for member in self.members:
            self.restart(member.id)
        config = self.config
        # Old answers are forgotten after an expiry; before, there may be one of an old root.
        self.run(2 * config.root_expires_s + config.core_ann_interval_s + config.beacon_interval_s)
        topics = {topic for member in self.members for topic in member.wanted}
        for topic in sorted(topics):
            if not self.is_agreed(topic):
                raise Wrong(f"roots of {topic}: {self.roots(topic)}")
            # But for the moment in which an announcement spreads.
            self.run_until(partial(self.is_true, topic), config.core_ann_interval_s)
            payloads = [self.publish(member.id, topic) for member in self.members]
            self.run(1.0)
            for payload in payloads:
                if self.missing(payload):
                    raise Wrong(f"{payload!r} is not at {sorted(self.missing(payload))}")


def announcement(number: int, action: str) -> bytes:
    """Of a topology manager."""
    return b'{"neighbor":{"id":%d,"ip":"tcp://%d"},"action":"%s"}' % (
        number,
        number,
        action.encode(),
    )
