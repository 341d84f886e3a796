"""Links between two nodes that are lost for good, while a third node hears both.

Every partition acknowledges through every node while they are down. One may be the link between the
Raft leader and the leader of a partition, which would otherwise wait for each other.
"""

import itertools
import random
from itertools import combinations

import pytest

from holdfast.log.partition import partition_of
from holdfast.node.metadata.model import NodeInfo, NodePhase, PartitionInfo
from holdfast.protocol.mqtt import packets as m
from tests.sim.checks import Message
from tests.unit.node.test_rights_cluster import Peer, Stage

WITHIN_S = 10.0
"""The most seconds from the loss of a link until everything acknowledges."""


def voting_stage(nodes: int = 3, replicas: int = 3) -> Stage:
    found = Stage(nodes, replicas)
    world = found.world
    for host in world.hosts.values():
        assert host.process is not None
        host.process.state.acl = None

    def all_vote() -> bool:
        metadata = world.newest_metadata()
        return metadata is not None and len(metadata.voters) == min(5, len(world.hosts))

    found.until(all_vote)
    return found


def topics(stage: Stage) -> list[str]:
    """One topic for each partition."""
    partitions = stage.world.settings.partitions
    names = (f"t/{number}" for number in itertools.count())
    found: dict[int, str] = {}
    while len(found) < partitions:
        name = next(names)
        found.setdefault(partition_of(name.encode(), partitions), name)
    return list(found.values())


class Device:
    """A client that stays at one node: it connects again whenever the node closes it, and sends
    what is not acknowledged again."""

    def __init__(self, stage: Stage, node: str, number: int) -> None:
        self.stage = stage
        self.node = node
        self.client_id = f"device-{node}-{number}"
        self.peer: Peer | None = None
        self.waiting: dict[int, Message] = {}
        for packet_id, topic in enumerate(topics(stage), 1):
            message = Message(f"#{node}-{number}-{packet_id}", self.client_id, topic, packet_id, 1)
            stage.world.checks.published(message)
            self.waiting[packet_id] = message

    def step(self) -> None:
        """Process what has arrived."""
        peer = self.peer
        if peer is None or peer.is_closed:
            peer = self.peer = Peer(self.stage, self.node, "alice", self.client_id)
            peer.send(m.Connect(5, True, 0, peer.client_id, None, None, None, {}))
            return
        packets = peer.packets
        peer.packets = []
        for packet in packets:
            if isinstance(packet, m.Connack) and packet.reason == 0:
                for packet_id in self.waiting:
                    self._send(packet_id)
            elif isinstance(packet, m.Ack) and packet.kind == m.PUBACK:
                if packet.reason:
                    self._send(packet.packet_id)
                else:
                    del self.waiting[packet.packet_id]

    def _send(self, packet_id: int) -> None:
        assert self.peer is not None
        message = self.waiting[packet_id]
        message.times_sent += 1
        raw, text = message.topic.encode(), message.text.encode()
        self.peer.send(m.Publish(raw, text, 1, False, False, packet_id, b"", 0, -1))


@pytest.mark.parametrize("pair", ["ab", "bc", "ca"])
@pytest.mark.parametrize("one_way", [False, True])
def test_every_partition_acknowledges_through_every_node(pair: str, one_way: bool) -> None:
    stage = voting_stage()
    first, second = (stage.names[each] for each in pair)
    network = stage.world.network
    network.cut(first, second)
    if not one_way:
        network.cut(second, first)
    acknowledge_all(stage, 1)
    # The nodes at both ends go on when the ownership of their sessions is due for confirmation.
    stage.run(20.0)
    acknowledge_all(stage, 2)
    network.heal()
    stage.until(lambda: all(each.leader == each.replicas[0] for each in partitions(stage)))


LINKS = [
    # One of a and one of two later nodes: the others differ in their numbers only, and are long.
    pytest.param(link, marks=pytest.mark.long if link not in (("a", "b"), ("d", "e")) else ())
    for link in combinations("abcde", 2)
]


@pytest.mark.parametrize("pair", LINKS)
def test_five_nodes_go_on_without_a_link(pair: tuple[str, str]) -> None:
    """Each node still hears three of the four others."""
    stage = voting_stage(5)
    cut(stage, pair)
    acknowledge_all(stage, 1)
    stage.run(20.0)
    acknowledge_all(stage, 2)


@pytest.mark.parametrize("first", LINKS)
def test_five_nodes_go_on_without_two_links(first: tuple[str, str]) -> None:
    """With each later link, so that the ten tests have all 45 pairs."""
    links = list(combinations("abcde", 2))
    stage = voting_stage(5)
    for number, second in enumerate(links[links.index(first) + 1 :]):
        for link in (first, second):
            cut(stage, link)
        acknowledge_all(stage, number)
        heal(stage)


@pytest.mark.parametrize("seed", range(2))
def test_any_graph_with_a_third_node_for_each_pair(seed: int) -> None:
    """The most links are lost that may be, so most nodes have two that are left."""
    stage = voting_stage(5)
    chance = random.Random(seed)
    links = set(combinations("abcde", 2))
    for link in chance.sample(sorted(links), len(links)):
        if all(reaches(links - {link}, *pair) for pair in combinations("abcde", 2)):
            links.remove(link)
            cut(stage, link)
    assert len(links) < 8
    acknowledge_all(stage, 1)
    stage.run(20.0)
    acknowledge_all(stage, 2)
    assert not any(info.state == NodePhase.DOWN for info in nodes(stage))
    heal(stage)


class Flow:
    """A durable subscriber at a node, its publisher at another one, and a message each 20 ms."""

    def __init__(self, stage: Stage, node: str, other: str, topic: str) -> None:
        self.stage = stage
        self.topic = topic
        self.reader = stage.login(node, "alice", f"reader-{topic}", expiry_s=600)
        stage.subscribe(self.reader, topic, 1)
        self.writer = stage.login(other, "alice", f"writer-{topic}")
        self.sent_at: list[float] = []
        self.waits_s: list[float] = []
        """The time of each message until it was acknowledged and delivered."""
        self.seen = 0

    def step(self) -> None:
        now = self.stage.world.schedule.now
        done = min(len(self.reader.payloads), len(self.writer.packets))
        self.waits_s += [now - at for at in self.sent_at[len(self.waits_s) : done]]
        if not self.sent_at or now >= self.sent_at[-1] + 0.02:
            number = len(self.sent_at) + 1
            text = f"#{self.topic}-{number}"
            message = Message(text, self.writer.client_id, self.topic, number, 1)
            message.times_sent = 1
            self.stage.world.checks.published(message)
            topic, payload = self.topic.encode(), text.encode()
            self.writer.send(m.Publish(topic, payload, 1, False, False, number, b"", 0, -1))
            self.sent_at.append(now)

    def longest_s(self) -> float:
        """The longest wait since the last call, also of messages that wait now."""
        now = self.stage.world.schedule.now
        waits_s = self.waits_s[self.seen :] + [now - at for at in self.sent_at[len(self.waits_s) :]]
        self.seen = len(self.waits_s)
        return max(waits_s)


@pytest.mark.parametrize("shares", [False, True])
def test_a_lost_link_concerns_those_that_need_it(shares: bool) -> None:
    """Six nodes with two replicas. No client of any node notices the loss if what it needs is at
    other nodes, and no session is suspended. A partition of both nodes waits for the relay."""
    stage = voting_stage(6, 2)
    stage.until(lambda: all(len(each.in_sync) == 2 for each in partitions(stage)))
    places = [set(each.replicas) for each in partitions(stage)]
    pair = next(
        set(pair)
        for pair in combinations(stage.world.hosts, 2)
        if (set(pair) in places) == shares and any(place.isdisjoint(pair) for place in places)
    )
    hosts = list(stage.world.hosts)
    rings = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    elsewhere = next(number for number, place in enumerate(places) if place.isdisjoint(pair))
    flows = [Flow(stage, *ends, name_in(stage, elsewhere, at)) for at, ends in enumerate(rings)]
    needing = [Flow(stage, *ends, name_in(stage, places.index(pair), 9)) for ends in rings[:shares]]

    def run(seconds: float) -> float:
        until = stage.world.schedule.now + seconds
        while stage.world.schedule.now < until:
            for flow in flows + needing:
                flow.step()
            stage.run(0.002)
        return max(flow.longest_s() for flow in flows)

    usual_s = run(0.5)
    assert usual_s < 0.1
    first, second = pair
    stage.world.network.cut(first, second)
    stage.world.network.cut(second, first)
    assert run(1.5) < 2 * usual_s
    for flow in needing:
        assert 0.2 < flow.longest_s() < 1.0
    for host in stage.world.hosts.values():
        assert host.process is not None
        assert host.process.cluster_node.ownership.count == 0
    assert not any(info.state == NodePhase.DOWN for info in nodes(stage))


def name_in(stage: Stage, partition: int, number: int) -> str:
    """A topic of a partition."""
    names = (f"f{number}/{at}" for at in itertools.count())
    count = stage.world.settings.partitions
    return next(name for name in names if partition_of(name.encode(), count) == partition)


def reaches(links: set[tuple[str, str]], first: str, second: str) -> bool:
    """Directly, or through one node."""
    both = links | {(b, a) for a, b in links}
    return (first, second) in both or any(
        (first, each) in both and (each, second) in both for each in "abcde"
    )


def cut(stage: Stage, link: tuple[str, str]) -> None:
    first, second = (stage.names[each] for each in link)
    stage.world.network.cut(first, second)
    stage.world.network.cut(second, first)


def heal(stage: Stage) -> None:
    """And wait until each pair has its own link again, and no other."""
    stage.world.network.heal()

    def is_whole() -> bool:
        processes = [each.process for each in stage.world.hosts.values()]
        return all(
            each is not None
            and len(each.links) == len(processes) - 1
            and not each.runtime.links.relayed.links
            and not each.runtime.links.relayed._pairs
            for each in processes
        )

    stage.until(is_whole)


def nodes(stage: Stage) -> list[NodeInfo]:
    metadata = stage.world.newest_metadata()
    assert metadata is not None
    return [*metadata.nodes.values()]


def partitions(stage: Stage) -> tuple[PartitionInfo, ...]:
    metadata = stage.world.newest_metadata()
    assert metadata is not None
    return metadata.partitions


def acknowledge_all(stage: Stage, number: int) -> None:
    """Publish to every partition through every node until all of it is acknowledged."""
    began = stage.world.schedule.now
    devices = [Device(stage, node, number) for node in stage.world.hosts]
    while any(device.waiting for device in devices):
        missing = {
            device.node: [each.topic for each in device.waiting.values()] for device in devices
        }
        assert stage.world.schedule.now - began < WITHIN_S, missing
        for device in devices:
            device.step()
        stage.run(0.01)
