"""Shared subscriptions over three real nodes, with members on each of them."""

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import pytest

from holdfast.log.partition import partition_of
from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.e2e.wire import PUBACK, RECEIVE_MAXIMUM, UNSUBACK, Closed, Wire, publish, unsubscribe

PARTITIONS = 12
SETTINGS: dict[str, dict[str, Any]] = {"cluster": {"partitions": PARTITIONS}}
WINDOW = 100
TOPICS = 20
numbers = itertools.count(1)


@pytest.fixture(scope="module", params=((), ("n3",)), ids=("nodes", "gateway"))
def processes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterProcesses]:
    gateways: tuple[str, ...] = request.param
    directory = tmp_path_factory.mktemp("groups")
    with ClusterProcesses(directory, 3 + len(gateways), SETTINGS, gateways=gateways) as started:
        yield started


@pytest.fixture
def cluster(processes: ClusterProcesses) -> ClusterProcesses:
    dead = [name for name, node in processes.nodes.items() if node.process is None]
    processes.restart(*dead)
    processes.wait_healthy()
    return processes


class Member(threading.Thread):
    """Receives and acknowledges until it is closed; goes to the next node when one has gone."""

    def __init__(self, team: "Team", name: str, nodes: list[str], expiry_s: int) -> None:
        super().__init__()
        self.team = team
        self.client_id = name
        self.nodes = itertools.cycle(nodes)
        self.expiry_s = expiry_s
        self.subscribed = threading.Event()
        self.is_over = False
        self.counts: Counter[bytes] = Counter()

    def run(self) -> None:
        while not self.is_over:
            try:
                self._session(next(self.nodes))
            except (OSError, Closed):
                # TimeoutError too: the connection is given up.
                continue

    def _session(self, node: str) -> None:
        team = self.team
        with Wire(team.cluster.nodes[node].port) as wire:
            connack = wire.connect(self.client_id, self.expiry_s == 0, self.expiry_s)
            if connack.reason:
                return
            if not connack.session_present:
                assert wire.subscribe((team.filter, team.qos)) == [team.qos]
            self.subscribed.set()
            while not self.is_over:
                try:
                    message = wire.message(0.3)
                except TimeoutError:
                    continue
                self.counts[message.payload] += 1
            wire.disconnect()


class Team:
    """A group with one member for each of `nodes`, which may name one several times."""

    def __init__(
        self,
        cluster: ClusterProcesses,
        nodes: list[str],
        qos: int,
        expiry_s: int = 0,
    ) -> None:
        self.cluster = cluster
        self.number = next(numbers)
        self.topic = f"jobs{self.number}"
        self.filter = f"$share/workers{self.number}/{self.topic}/#"
        self.qos = qos
        self.expiry_s = expiry_s
        self.members: list[Member] = []
        self.add_members(nodes)

    def add_members(self, nodes: list[str]) -> None:
        for node in nodes:
            name = f"w{self.number}-{len(self.members)}"
            route = [node, *self.cluster.nodes]
            self.members.append(Member(self, name, route, self.expiry_s))

    def roles(self) -> list[str]:
        """The node that coordinates the group, and the two others."""
        coordinator = self.cluster.leader_of(partition_of(self.filter.encode(), PARTITIONS))
        nodes = self.cluster.nodes
        others = [name for name in nodes if name != coordinator]
        # A gateway publishes.
        others.sort(key=lambda name: not nodes[name].is_gateway)
        return [coordinator, *others[:2]]

    @property
    def received(self) -> Counter[bytes]:
        total: Counter[bytes] = Counter()
        for member in self.members:
            total += Counter(dict(member.counts))
        return total

    def __enter__(self) -> "Team":
        for member in self.members:
            member.start()
        for member in self.members:
            assert member.subscribed.wait(30)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for member in self.members:
            member.is_over = True
        for member in self.members:
            member.join(30)

    def publish(self, node: str, first: int, count: int, qos: int = 1) -> list[bytes]:
        """Until all of them are acknowledged; returns them."""
        payloads = [b"%d" % number for number in range(first, first + count)]
        with Wire(self.cluster.nodes[node].port, timeout_s=30) as wire:
            wire.connect(f"publisher{self.number}-{first}")
            if qos != 1:
                for payload in payloads:
                    assert wire.publish(self._topic(payload), payload, qos) == 0
                if not qos:
                    wire.ping()
                return payloads
            waiting: dict[int, bytes] = {}
            left = list(reversed(payloads))
            while left or waiting:
                while left and len(waiting) < WINDOW:
                    payload = left.pop()
                    packet_id = wire.next_packet_id()
                    waiting[packet_id] = payload
                    wire.send(publish(self._topic(payload), payload, 1, packet_id))
                answer = wire.expect(PUBACK)
                payload = waiting.pop(answer.packet_id)
                if answer.reason >= 0x80:
                    left.append(payload)
        return payloads

    def _topic(self, payload: bytes) -> str:
        return f"{self.topic}/{int(payload) % TOPICS}"

    def await_all(self, payloads: list[bytes]) -> Counter[bytes]:
        wanted = set(payloads)
        until(
            lambda: wanted <= self.received.keys(),
            f"all of {len(wanted)} received",
            30.0,
        )
        return self.received


class Traffic(threading.Thread):
    """Publishes while its block runs, and a little longer."""

    def __init__(self, team: Team, node: str, first: int) -> None:
        super().__init__(daemon=True)
        self.team = team
        self.node = node
        self.first = first
        self.payloads: list[bytes] = []
        self.is_over = threading.Event()

    def run(self) -> None:
        while True:
            is_last = self.is_over.is_set()
            first = self.first + len(self.payloads)
            self.payloads += self.team.publish(self.node, first, 200)
            if is_last:
                return

    def __enter__(self) -> "Traffic":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self.join(60)
        assert not self.is_alive(), "not everything was acknowledged"


@pytest.mark.parametrize("expiry_s", [0, 600])
def test_each_message_once_and_evenly(cluster: ClusterProcesses, expiry_s: int) -> None:
    with Team(cluster, ["n1", "n1", "n1", "n2", "n2", "n3"], 1, expiry_s) as team:
        payloads = team.publish("n1", 0, 1000)
        payloads += team.publish("n2", 1000, 1000)
        payloads += team.publish("n3", 2000, 1000)
        received = team.await_all(payloads)
        shares = [sum(member.counts.values()) for member in team.members]
    assert received == Counter(payloads)
    assert min(shares) > 250, shares
    assert max(shares) < 1000, shares


def test_qos2_exactly_once(cluster: ClusterProcesses) -> None:
    with Team(cluster, ["n1", "n2", "n3"], 2, 600) as team:
        payloads = team.publish("n2", 0, 90, 2)
        received = team.await_all(payloads)
        assert min(len(member.counts) for member in team.members) > 20
    assert received == Counter(payloads)


def test_qos0_once(cluster: ClusterProcesses) -> None:
    with Team(cluster, ["n1", "n1", "n2", "n3"], 0) as team:
        payloads = team.publish("n1", 0, 300, 0)
        payloads += team.publish("n3", 300, 300, 0)
        received = team.await_all(payloads)
        assert min(len(member.counts) for member in team.members) > 20
    assert received == Counter(payloads)


def test_a_slow_member_does_not_starve_others(cluster: ClusterProcesses) -> None:
    with Team(cluster, ["n1", "n3"], 1) as team, Wire(cluster.nodes["n2"].port) as slow:
        slow.connect("slow", props=[(RECEIVE_MAXIMUM, 5)])
        slow.subscribe((team.filter, 1))
        payloads = team.publish("n2", 0, 500)
        until(lambda: len(team.received) == 495, "all but those of the slow one", 30.0)
        slow.abort()
        received = team.await_all(payloads)
    assert received == Counter(payloads)


def test_what_nobody_was_there_for_waits_for_a_durable_member(cluster: ClusterProcesses) -> None:
    with Team(cluster, ["n1", "n2"], 1, 600) as team:
        payloads = team.publish("n3", 0, 100)
        team.await_all(payloads)
    payloads += team.publish("n3", 100, 100)
    with Wire(cluster.nodes["n3"].port) as wire:
        assert wire.connect(team.members[0].client_id, False, 600).session_present
        later = [wire.message().payload for _ in range(100)]
    assert Counter(later) + team.received == Counter(payloads)


def test_a_group_that_was_durable_ends(cluster: ClusterProcesses) -> None:
    team = Team(cluster, [], 1)
    with Wire(cluster.nodes["n1"].port) as wire:
        wire.connect(f"durable{team.number}", True, 600)
        wire.subscribe((team.filter, 1))
        team.publish("n2", 0, 5)
        for _ in range(5):
            wire.message()
        wire.send(unsubscribe(wire.next_packet_id(), [team.filter]))
        wire.expect(UNSUBACK)
        team.publish("n1", 5, 5)
        wire.subscribe((team.filter, 1))
        team.publish("n3", 10, 1)
        # The coordinator ends the group when its member's record has left the group's home, which
        # may be after the UNSUBACK.
        while (payload := wire.message().payload) != b"10":
            assert int(payload) in range(5, 10)


def test_a_group_that_has_ended_begins_anew(cluster: ClusterProcesses) -> None:
    with Team(cluster, ["n1", "n2"], 1) as team:
        team.await_all(team.publish("n3", 0, 20))
    # Their acknowledgements tell that this node has them, and the next member is here too.
    team.publish("n2", 20, 20)
    with Wire(cluster.nodes["n2"].port) as wire:
        wire.connect("afterwards")
        wire.subscribe((team.filter, 1))
        team.publish("n1", 40, 1)
        assert wire.message().payload == b"40"


@pytest.mark.parametrize("whose", ["coordinator", "member"])
def test_nothing_is_lost_with_a_node(cluster: ClusterProcesses, whose: str) -> None:
    with Team(cluster, ["n1", "n1", "n2", "n2", "n3", "n3"], 1) as team:
        coordinator, publisher, other = team.roles()
        victim = coordinator if whose == "coordinator" else other
        payloads = team.publish(publisher, 0, 1000)
        received = team.await_all(payloads)
        assert received == Counter(payloads)
        with Traffic(team, publisher, 1000) as traffic:
            until(lambda: len(team.received) > 1300, "some of the next", 30.0)
            cluster.kill9(victim)
            until(lambda: leads_nothing(cluster, victim), "the others lead", 30.0)
        payloads += traffic.payloads
        received = team.await_all(payloads)
    assert received.keys() == set(payloads)
    duplicates = sum(received.values()) - len(received)
    # What was with some member just then.
    assert duplicates < 600, duplicates


def leads_nothing(cluster: ClusterProcesses, node: str) -> bool:
    partitions = cluster.status().get("partitions") or []
    return bool(partitions) and all(each["leader"] not in ("", node) for each in partitions)


def test_each_message_once_while_the_coordinator_moves(cluster: ClusterProcesses) -> None:
    team = Team(cluster, [], 1)
    coordinator, publisher, other = team.roles()
    team.add_members([publisher, publisher, other, other])
    with team:
        with Traffic(team, publisher, 0) as traffic:
            until(lambda: len(team.received) > 300, "some of them", 30.0)
            drain = f"/cluster/drain?node={coordinator}"
            assert cluster.nodes[publisher].admin(drain, "POST")[0] < 300
            until(lambda: leads_nothing(cluster, coordinator), "the others lead", 30.0)
        received = team.await_all(traffic.payloads)
    assert received == Counter(traffic.payloads)
    undrain = f"/cluster/undrain?node={coordinator}"
    assert cluster.nodes[publisher].admin(undrain, "POST")[0] < 300
    cluster.wait_healthy()
