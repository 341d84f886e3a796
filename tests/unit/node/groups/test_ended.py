"""A shared group with a durable member that is away ends for no coordinator, however little of the
other partitions that one has applied."""

from collections.abc import Callable

import pytest

from holdfast.log.partition import partition_of
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.packets import Publish
from tests.sim.checks import Message
from tests.sim.client import Client
from tests.sim.host import Host
from tests.sim.process import Process
from tests.sim.world import Settings, World
from tests.unit.node.groups.test_groups import QuietClient, is_ready

AWAY_S = 9.0
"""Longer than every wait of a coordinator with a limit."""


class Receiver:
    """A durable member of the group, with what it has received."""

    def __init__(self, world: World, name: str, filter: str, qos: int = 1) -> None:
        self.client = Client(world, name, 5, filters=((filter, qos),))
        self.received: list[str] = []
        self.client.on_message = self._arrived

    def _arrived(self, packet: Publish) -> None:
        self.received.append(packet.payload.decode())


class Corner:
    """Three nodes. `hub` leads Raft, `left` leads the home of the member's session, `right` that of
    the group and the topic."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed, SETTINGS)
        self._count = 0
        self.hub = "n1"
        for host in self.world.hosts.values():
            host.start()
        self.until(lambda: all(map(is_ready, self.world.hosts.values())))
        self.until(self.world.is_in_sync)
        self.run(1.0)
        names = list(self.world.hosts)
        leader = self.process(names[0]).cluster_node.meta.leader_id
        self.hub = next(each for each in names if leader.startswith(each))
        self.left, self.right = (each for each in names if each != self.hub)
        self.member = self.name("m", self.left)
        self.filter = self.name("$share/g{}/s/#", self.right)
        self.topic = self.name("s/", self.right)
        self.publisher = Client(self.world, self.name("p", self.hub), 5)
        self.publisher.connect(self.host(self.hub))
        self.until(lambda: self.publisher.is_connected)

    def process(self, name: str) -> Process:
        process = self.world.hosts[name].process
        assert process is not None
        return process

    def host(self, name: str) -> Host:
        return self.world.hosts[name]

    def home(self, key: str) -> int:
        return partition_of(key.encode(), self.world.settings.partitions)

    def name(self, text: str, node: str) -> str:
        """A name like `text` whose home partition the node leads."""
        context = self.process(self.hub).cluster_node.context
        numbers = range(1000)
        names = (text.format(n) if "{" in text else f"{text}{n}" for n in numbers)
        return next(each for each in names if context.leader(self.home(each)) == node)

    def until(self, condition: Callable[[], bool], within_s: float = 20.0) -> None:
        deadline = self.world.schedule.now + within_s
        while not condition():
            assert self.world.schedule.now < deadline
            self.run(0.005)

    def run(self, seconds: float) -> None:
        self.world.schedule.run(seconds)

    def publish(self, *texts: str, qos: int = 1) -> None:
        for text in texts:
            self._count += 1
            message = Message(text, self.publisher.name, self.topic, self._count, qos)
            self.world.checks.published(message)
            self.publisher.publish(message)
        self.until(lambda: not self.publisher.outgoing)

    def connect(self, receiver: Receiver, name: str = "") -> None:
        receiver.client.connect(self.host(name or self.hub))
        self.until(lambda: receiver.client.is_connected and receiver.client.is_subscribed)

    def cut(self, first: str, second: str) -> None:
        """Cuts a link, also through the third node: a report would arrive that way."""
        for name in (first, second):
            self.process(name).runtime.links.relayed.objection = None
        self.world.network.cut(first, second)
        self.world.network.cut(second, first)


SETTINGS = Settings(partitions=8, outbox_messages=1000, casts=())


@pytest.mark.parametrize("seed", [1, 2])
def test_behind_a_cut_link(seed: int) -> None:
    corner = Corner(seed)
    corner.cut(corner.left, corner.right)
    corner.run(7.0)
    member = Receiver(corner.world, corner.member, corner.filter)
    corner.connect(member)
    corner.publish("first")
    corner.until(lambda: member.received == ["first"])
    member.client.disconnect()
    corner.run(AWAY_S)
    corner.publish("1", "2", "3", "4", "5")
    corner.run(1.0)
    corner.connect(member)
    corner.until(lambda: len(member.received) == 6)
    assert member.received == ["first", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("returns_first", [True, False])
def test_while_its_coordinator_lags(seed: int, returns_first: bool) -> None:
    """No link is down: the coordinator does not follow the home of the session for a while."""
    corner = Corner(seed)
    node = corner.process(corner.right).cluster_node
    home = corner.home(corner.member)
    node.replication.suspend(home)
    member = Receiver(corner.world, corner.member, corner.filter, 2)
    corner.connect(member)
    corner.publish("first", qos=2)
    corner.until(lambda: member.received == ["first"])
    corner.run(1.0)
    member.client.disconnect()
    corner.run(AWAY_S)
    corner.publish("1", "2", "3", qos=2)
    corner.run(1.0)
    if returns_first:
        corner.connect(member)
    else:
        node.replication.resume(home, node.state.now)
        corner.run(1.0)
        corner.connect(member)
    corner.until(lambda: len(member.received) >= 4)
    corner.run(2.0)
    assert member.received == ["first", "1", "2", "3"]


class Leaver(Receiver):
    """A member with QoS 2 that unsubscribes. It acknowledges nothing until it may."""

    def __init__(self, corner: Corner, name: str) -> None:
        super().__init__(corner.world, name, corner.filter, 2)
        self.client = QuietClient(corner.world, name, 5, filters=((corner.filter, 2),))
        self.client.is_quiet = True
        self.client.on_message = self._arrived
        self.unsubacks = 0
        handle = self.client._handle

        def noted(packet: m.Packet) -> None:
            self.unsubacks += isinstance(packet, m.Unsuback)
            handle(packet)

        self.client._handle = noted  # type: ignore[method-assign]


@pytest.mark.parametrize("mode", ["keep", "complete"])
@pytest.mark.parametrize("seed", [5, 6, 7])
def test_a_qos_2_record_of_a_member_that_unsubscribes_goes_to_nobody_else(
    seed: int, mode: str
) -> None:
    """Its node is lost before the coordinator hears of it. [MQTT-4.8.2-4]"""
    corner = Corner(seed)
    one = Leaver(corner, corner.name("one", corner.hub))
    corner.connect(one, corner.left)
    corner.publish("x", "y", qos=2)
    corner.until(lambda: len(one.received) == 2)
    corner.run(1.0)
    corner.cut(corner.left, corner.right)
    one.client._write(encode(m.Unsubscribe(9, [corner.filter]), 5))
    corner.until(lambda: one.unsubacks == 1)
    if mode == "complete":
        one.client.is_quiet = False
        for packet_id in list(one.client._incoming):
            one.client._reply(m.PUBREC, packet_id)
        corner.run(0.5)
    corner.host(corner.left).kill(power=False)
    one.client.is_subscribed = True
    one.client.filters = ()
    two = Receiver(corner.world, corner.name("two", corner.hub), corner.filter, 2)
    corner.connect(two)
    corner.run(8.0)
    one.client.is_quiet = False
    one.client.connect(corner.host(corner.hub))
    corner.until(lambda: one.client.is_connected)
    corner.run(3.0)
    assert sorted(set(one.received)) == ["x", "y"]
    assert two.received == []
    corner.publish("z", qos=2)
    corner.until(lambda: two.received == ["z"])


@pytest.mark.parametrize("seed", [1, 2])
def test_a_record_of_a_lost_node_waits_for_the_home_of_its_session(seed: int) -> None:
    """The coordinator does not follow the home of the session that keeps the record, and so does
    not see that it keeps it."""
    corner = Corner(seed)
    node = corner.process(corner.right).cluster_node
    one = Leaver(corner, corner.name("one", corner.hub))
    home = corner.home(one.client.name)
    node.replication.suspend(home)
    corner.connect(one, corner.left)
    corner.publish("x", "y", qos=2)
    corner.until(lambda: len(one.received) == 2)
    two = Receiver(corner.world, corner.name("two", corner.right), corner.filter, 2)
    corner.connect(two)
    corner.host(corner.left).kill(power=False)
    corner.run(AWAY_S)
    assert two.received == []
    node.replication.resume(home, node.state.now)
    one.client.is_quiet = False
    one.client.connect(corner.host(corner.hub))
    corner.until(lambda: one.client.is_connected)
    corner.run(3.0)
    assert sorted(set(one.received)) == ["x", "y"]
    assert two.received == []
