"""Links through a third node: the handshake, order, epochs, bounds and refusals of the core, with
queues in place of the connections between the nodes."""

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.node.features import RELAYED_LINKS
from holdfast.node.frame_kinds import RELAYED, BadFrame
from holdfast.node.replicate.disk_position import DiskMemory, Known
from holdfast.node.runtime import relayed_links as core
from holdfast.node.runtime.relayed_links import (
    CloseDirect,
    Deliver,
    LinkDown,
    LinkUp,
    RelayedLinks,
    RelaySend,
    encode_relayed,
)
from holdfast.security.peer_identity import PeerIdentity, Refusal, level_word

CLUSTER = "c1"
KIND = 20


@dataclass
class Node:
    """A node whose `heard` says what its failure detector has heard lately."""

    name: str
    mesh: "Mesh"
    features: str = level_word()
    members: dict[str, object] = field(default_factory=dict)
    heard: set[str] = field(default_factory=set)
    refuses: set[str] = field(default_factory=set)
    pending: dict[str, int] = field(default_factory=dict)
    up: dict[str, str] = field(default_factory=dict)
    """The links of the cluster's core: "" is a direct one, a name the node that it goes through."""
    got: list[tuple[str, int, bytes]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    identities: dict[str, PeerIdentity] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metadata = SimpleNamespace(nodes=self.members, removed=set(), cluster_id=CLUSTER)
        context: Any = SimpleNamespace(node_id=self.name, metadata=self.metadata)
        self.disk = 0
        self.relayed = RelayedLinks(
            context, self._detector(), DiskMemory(), lambda node: self.pending.get(node, 0)
        )
        self.relayed.objection = self._objection
        self.relayed.own_disk = self._disk

    def _detector(self) -> Any:
        mesh = self.mesh
        return SimpleNamespace(
            unheard=lambda now: {
                node: [
                    each
                    for each in sorted(self.heard)
                    if each in mesh.nodes and node in mesh.nodes[each].heard
                ]
                for node in sorted(self.members.keys() - self.heard - {self.name})
            }
        )

    def _objection(self, peer: PeerIdentity, known: Known) -> Refusal | None:
        return Refusal("older", "is an older copy") if peer.node_id in self.refuses else None

    def _disk(self) -> str:
        self.disk += 1
        return f"1.2.{self.disk}"

    def identity(self) -> PeerIdentity:
        return PeerIdentity(
            self.name, f"i{self.name}", CLUSTER, features=self.features, process=f"p{self.name}"
        )

    def carry_out(self) -> None:
        while self.relayed.effects:
            effect = self.relayed.effects.pop(0)
            if isinstance(effect, RelaySend):
                self.mesh.push(self.name, effect.node, effect.payload)
            elif isinstance(effect, CloseDirect):
                self.mesh.cut(self.name, effect.node)
            elif isinstance(effect, LinkUp):
                node = effect.identity.node_id
                self.events.append(f"{node} through {effect.through}")
                assert node not in self.up, "two links to one node"
                self.up[node] = effect.through
                self.identities[node] = effect.identity
                self.heard.add(node)
            elif isinstance(effect, LinkDown):
                self.events.append(f"{effect.node} lost")
                assert self.up.pop(effect.node) == effect.through
                self.heard.discard(effect.node)
            else:
                assert isinstance(effect, Deliver)
                assert effect.node in self.up, "a frame of a link that is not there"
                self.got.append((effect.node, effect.kind, effect.payload))
        self.relayed.check()


class Mesh:
    """Nodes, and a pair of queues for each connection."""

    def __init__(self, names: str = "abc") -> None:
        self.nodes: dict[str, Node] = {}
        self.pipes: dict[tuple[str, str], deque[bytes]] = {}
        self.frames = 0
        self.now = 0.0
        for name in names:
            self.nodes[name] = Node(name, self)
        for node in self.nodes.values():
            node.members.update(dict.fromkeys(names))
        for pair in combinations(names, 2):
            self.connect(*pair)
        self.run()

    def connect(self, first: str, second: str) -> None:
        for name, other in ((first, second), (second, first)):
            node, peer = self.nodes[name], self.nodes[other]
            self.pipes[name, other] = deque()
            node.relayed.direct_up(peer.identity())
            node.carry_out()
            assert other not in node.up
            node.up[other] = ""
            node.heard.add(other)

    def cut(self, first: str, second: str) -> None:
        """Both ends lose their connection."""
        for name, other in ((first, second), (second, first)):
            if self.pipes.pop((name, other), None) is not None:
                node = self.nodes[name]
                assert node.up.pop(other) == ""
                node.heard.discard(other)
                node.relayed.direct_down(other)
        for name in (first, second):
            self.nodes[name].carry_out()

    def push(self, source: str, target: str, payload: bytes) -> None:
        self.frames += 1
        if (source, target) in self.pipes:
            self.pipes[source, target].append(payload)

    def deliver(self, source: str, target: str) -> bool:
        """The next frame of one direction."""
        pipe = self.pipes.get((source, target))
        if not pipe:
            return False
        node = self.nodes[target]
        node.relayed.receive(source, pipe.popleft(), self.now)
        node.carry_out()
        return True

    def run(self) -> None:
        """Until nothing is on its way."""
        while any(self.deliver(*pair) for pair in list(self.pipes)):
            pass

    def step(self, passes_s: float = 0.1) -> None:
        self.now += passes_s
        for node in self.nodes.values():
            node.relayed.step(self.now)
            node.carry_out()

    def settle(self) -> None:
        for _ in range(100):
            self.step()
            self.run()

    def send(self, source: str, target: str, payload: bytes) -> None:
        node = self.nodes[source]
        node.relayed.send(target, KIND, payload)
        node.carry_out()

    def got(self, name: str, source: str) -> list[bytes]:
        return [each[2] for each in self.nodes[name].got if each[0] == source]


def linked(names: str = "abc") -> Mesh:
    """a and b without a connection."""
    mesh = Mesh(names)
    mesh.cut("a", "b")
    mesh.step()
    mesh.run()
    return mesh


def test_nothing_is_sent_while_all_are_heard() -> None:
    mesh = Mesh("abcd")
    mesh.settle()
    assert mesh.frames == 0


def test_a_lost_link_goes_through_the_third_node_and_back() -> None:
    mesh = linked()
    a, b = mesh.nodes["a"], mesh.nodes["b"]
    assert (a.up["b"], b.up["a"]) == ("c", "c")
    # The relay has authenticated the identity; the disk is what the end has said now.
    assert a.identities["b"] == replace(b.identity(), disk="1.2.1")
    assert b.identities["a"] == replace(a.identity(), disk="1.2.1")
    mesh.connect("a", "b")
    mesh.run()
    assert (a.up["b"], b.up["a"]) == ("", "")
    assert a.events == ["b through c", "b lost"]
    assert not mesh.nodes["c"].relayed._pairs


@pytest.mark.parametrize("both_open", [False, True])
def test_one_link_comes_of_two_openings(both_open: bool) -> None:
    mesh = Mesh("abcd")
    mesh.cut("a", "b")
    if both_open:
        # Through different nodes.
        direct = mesh.nodes["b"].relayed._direct
        direct["c"] = replace(direct["c"], features="v2")
    mesh.settle()
    a, b = mesh.nodes["a"], mesh.nodes["b"]
    assert a.up["b"] == b.up["a"] != ""
    assert sum(len(each.relayed._pairs) for each in mesh.nodes.values()) == 1


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 5 << 20])
def test_frames_of_any_size_arrive_in_order(size: int) -> None:
    mesh = linked()
    sent = [bytes([number]) + b"x" * size for number in range(3)]
    for payload in sent:
        mesh.send("a", "b", payload)
        mesh.send("b", "a", payload)
    mesh.run()
    assert mesh.got("b", "a") == mesh.got("a", "b") == sent


def test_an_end_sends_no_more_than_the_window_ahead() -> None:
    mesh = linked()
    for _ in range(100):
        mesh.send("a", "b", bytes(100_000))
    ahead = sum(len(each) for each in mesh.pipes["a", "c"])
    assert ahead <= core.WINDOW_BYTES + core.CHUNK_BYTES + 1000
    mesh.run()
    assert len(mesh.got("b", "a")) == 100


def test_too_much_that_waits_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "WAITING_BYTES_MAX", 1 << 20)
    mesh = linked()
    for _ in range(30):
        if "b" in mesh.nodes["a"].up:
            mesh.send("a", "b", bytes(100_000))
    assert mesh.nodes["a"].events[-1] == "b lost"
    mesh.run()
    assert mesh.nodes["b"].events[-1] == "a lost"


def test_a_relay_keeps_its_own_frames_ahead_and_what_it_holds_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = linked()
    relay = mesh.nodes["c"]
    relay.pending["b"] = core.BUSY_BYTES + 1
    for number in range(10):
        mesh.send("a", "b", bytes([number]) * 50_000)
    mesh.run()
    assert mesh.got("b", "a") == []
    assert relay.relayed.held_bytes > 500_000
    assert relay.relayed.timer(1.0) == 1.0 + core.DRAIN_S
    relay.pending.clear()
    while relay.relayed.held_bytes:
        before = relay.relayed.held_bytes
        relay.relayed.drain()
        relay.carry_out()
        assert before - relay.relayed.held_bytes <= core.BUSY_BYTES + core.CHUNK_BYTES + 100
    mesh.run()
    assert [each[0] for each in mesh.got("b", "a")] == list(range(10))
    # Beyond the bound the link ends for both, and nothing of it is kept.
    monkeypatch.setattr(core, "HELD_BYTES_MAX", 200_000)
    relay.pending["b"] = core.BUSY_BYTES + 1
    for _ in range(10):
        mesh.send("a", "b", bytes(50_000))
    mesh.run()
    assert relay.relayed.held_bytes == len(relay.relayed._pairs) == 0
    assert mesh.nodes["a"].events[-1] == "b lost"
    assert mesh.nodes["b"].events[-1] == "a lost"


def test_the_loss_of_the_relay_loses_the_link_and_another_one_relays() -> None:
    mesh = linked("abcd")
    assert mesh.nodes["a"].up["b"] == "c"
    mesh.send("a", "b", b"lost" * 50_000)
    mesh.deliver("a", "c")
    mesh.cut("c", "b")
    mesh.run()
    assert "b" not in mesh.nodes["a"].up
    assert "a" not in mesh.nodes["b"].up
    mesh.settle()
    assert mesh.nodes["a"].up["b"] == mesh.nodes["b"].up["a"] == "d"
    assert mesh.nodes["b"].up["c"] != ""
    assert mesh.got("b", "a") == []


def test_frames_of_an_earlier_link_are_dropped() -> None:
    mesh = linked()
    a = mesh.nodes["a"]
    mesh.send("b", "a", b"old")
    a.relayed.close("b", "it is closed")
    a.carry_out()
    while mesh.deliver("a", "c"):
        pass
    a.relayed.step(mesh.now + 1.0)
    a.carry_out()
    # The old frame comes behind the new opening, at the relay and at the end.
    mesh.run()
    mesh.send("b", "a", b"new")
    mesh.run()
    assert a.up["b"] == "c"
    assert mesh.got("a", "b") == [b"new"]


def test_frames_through_an_earlier_relay_are_dropped() -> None:
    mesh = linked("abcd")
    a = mesh.nodes["a"]
    assert a.up["b"] == "c"
    mesh.send("b", "a", b"old")
    mesh.deliver("b", "c")
    a.heard.discard("b")
    mesh.step()
    while any(mesh.deliver(*pair) for pair in ("ad", "db", "bd", "da")):
        pass
    assert a.up["b"] == "d"
    # The relay of the earlier link was slow.
    assert mesh.deliver("c", "a")
    mesh.send("b", "a", b"new")
    mesh.run()
    assert mesh.got("a", "b") == [b"new"]


def test_a_node_that_does_not_answer_is_tried_through_each_other_one_and_later_again() -> None:
    mesh = Mesh("abcd")
    mesh.cut("a", "b")
    for relay in "cd":
        # What they send to b arrives much later.
        mesh.pipes[relay, "b"] = deque()
    asked = []
    for _ in range(16):
        mesh.step()
        for relay in "cd":
            while mesh.pipes["a", relay]:
                payload = mesh.pipes["a", relay].popleft()
                asked += [relay] * (payload[0] == core.OPEN)
    assert asked == ["c", "d"] * 2
    assert "b" not in mesh.nodes["a"].up


@pytest.mark.parametrize("reason", ["stranger", "removed", "objection", "cluster", "version"])
@pytest.mark.parametrize("end", ["a", "b"])
def test_an_end_refuses(reason: str, end: str) -> None:
    mesh = Mesh()
    mesh.cut("a", "b")
    other = "b" if end == "a" else "a"
    node, peer = mesh.nodes[end], mesh.nodes[other]
    if reason == "stranger":
        del node.members[other]
    elif reason == "removed":
        node.metadata.removed.add((other, peer.identity().incarnation))
    elif reason == "objection":
        node.refuses.add(other)
    elif reason == "cluster":
        node.metadata.cluster_id = "c2"
        relay = mesh.nodes["c"].relayed._direct
        relay[other] = replace(relay[other], cluster_id="c9")
    else:
        relay = mesh.nodes["c"].relayed._direct
        relay[other] = replace(relay[other], features="questions")
        assert RELAYED_LINKS not in relay[other].features
    for _ in range(40):
        mesh.step()
        mesh.run()
        assert other not in node.up
        assert end not in peer.up
    assert mesh.frames < 100, "refused openings are repeated too often"
    # The end that confirms learns last that it is refused.
    assert len(peer.events) <= 4
    assert not mesh.nodes["c"].relayed._pairs


def test_a_link_ends_when_the_metadata_removes_its_node() -> None:
    mesh = linked()
    a = mesh.nodes["a"]
    del a.members["b"]
    a.relayed.review()
    a.carry_out()
    mesh.run()
    assert "b" not in a.up
    assert "a" not in mesh.nodes["b"].up


def test_a_node_of_an_older_version_relays_nothing_and_gets_no_frame() -> None:
    mesh = Mesh()
    for node in mesh.nodes.values():
        node.relayed._direct["c"] = replace(mesh.nodes["c"].identity(), features="v2")
        node.relayed._direct.pop(node.name, None)
    mesh.cut("a", "b")
    mesh.settle()
    assert mesh.frames == 0


def bad_pieces() -> list[bytes]:
    ends = [b"", b"\x14", b"\x14\x02", bytes([RELAYED]) + b"\x00x"]
    return [encode_relayed(core.DATA | core.FORWARDED, 1, "b", each) for each in ends]


@pytest.mark.parametrize("number", range(4))
def test_a_bad_piece_ends_the_relayed_link_alone(number: int) -> None:
    mesh = linked()
    a = mesh.nodes["a"]
    epoch = a.relayed.links["b"].epoch
    payload = bytearray(bad_pieces()[number])
    payload[1:9] = epoch.to_bytes(8, "big")
    a.relayed.receive("c", bytes(payload), mesh.now)
    a.carry_out()
    mesh.run()
    assert "b" not in a.up
    assert a.up["c"] == ""
    assert "a" not in mesh.nodes["b"].up


@pytest.mark.parametrize("credit", [b"", b"\0\0\0", b"\0\0\0\1", b"\xff" * 4])
def test_a_credit_that_cannot_be_right_ends_the_relayed_link(credit: bytes) -> None:
    mesh = linked()
    a = mesh.nodes["a"]
    epoch = a.relayed.links["b"].epoch
    frame = encode_relayed(core.CREDIT | core.FORWARDED, epoch, "b", credit)
    a.relayed.receive("c", frame, mesh.now)
    a.carry_out()
    assert "b" not in a.up


@pytest.mark.parametrize("identity", [b"", b"{}", b"[" * 20_000, b'{"node_id":"x"}', b"\xff"])
def test_an_identity_that_the_relay_cannot_have_written_is_its_fault(identity: bytes) -> None:
    mesh = Mesh()
    mesh.cut("a", "b")
    mesh.step()
    opening = mesh.nodes["a"].relayed._openings["b"]
    frame = encode_relayed(core.ACCEPT | core.FORWARDED, opening.epoch, "b", identity)
    with pytest.raises(BadFrame):
        mesh.nodes["a"].relayed.receive("c", frame, mesh.now)


def test_whatever_a_node_sends_only_bad_frame_comes_out() -> None:
    chance = random.Random(7)
    mesh = linked("abcd")
    a = mesh.nodes["a"]
    epochs = [0, 1, 2, a.relayed.links["b"].epoch]
    for _ in range(20_000):
        kind = chance.randrange(8) | chance.choice((0, core.FORWARDED))
        body = chance.choice((b"", chance.randbytes(chance.randrange(40)), b'{"node_id":"b"}'))
        payload = encode_relayed(kind, chance.choice(epochs), chance.choice("abcdx"), body)
        payload = payload[: chance.choice((len(payload), chance.randrange(len(payload) + 1)))]
        try:
            a.relayed.receive(chance.choice("cd"), payload, mesh.now)
        except BadFrame:
            pass
        a.relayed.effects = [each for each in a.relayed.effects if not isinstance(each, RelaySend)]
        a.carry_out()


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_losses_and_frames(seed: int) -> None:
    """Each frame that arrives is the next one of its link: none is lost between two, and none of an
    earlier link comes. When the rest is quiet, both ends agree."""
    chance = random.Random(seed)
    names = "abcde"[: chance.choice((3, 4, 5))]
    mesh = Mesh(names)
    sent: dict[tuple[str, str], list[bytes]] = {}
    number = 0
    for _ in range(1500):
        name, other = chance.sample(names, 2)
        node = mesh.nodes[name]
        pick = chance.random()
        if pick < 0.02 and (name, other) in mesh.pipes:
            mesh.cut(name, other)
        elif pick < 0.04 and (name, other) not in mesh.pipes:
            mesh.connect(*sorted((name, other)))
        elif pick < 0.06:
            # One end does not hear the other, though the connection is there.
            node.heard.discard(other)
        elif pick < 0.08:
            node.pending[other] = chance.choice((0, core.BUSY_BYTES + 1))
        elif pick < 0.12:
            mesh.step(0.05)
        elif pick < 0.3 and node.up.get(other):
            number += 1
            link = (name, other)
            payload = b"%d " % number + bytes(chance.choice((0, 10, 70_000)))
            sent.setdefault(link, []).append(payload)
            mesh.send(name, other, payload)
        elif pick < 0.33:
            node.relayed.drain()
            node.carry_out()
        else:
            mesh.deliver(name, other)
    for node in mesh.nodes.values():
        node.pending.clear()
        for other in names:
            # What is connected is heard.
            if other in node.up:
                node.heard.add(other)
    for _ in range(60):
        mesh.step()
        for node in mesh.nodes.values():
            node.relayed.drain()
            node.carry_out()
        mesh.run()
    for name, other in combinations(names, 2):
        first, second = mesh.nodes[name], mesh.nodes[other]
        assert first.up.get(other) == second.up.get(name), f"{name} and {other} disagree"
        if any((name, each) in mesh.pipes and (each, other) in mesh.pipes for each in names):
            assert other in first.up, f"{name} and {other} have a way and no link"
    for node in mesh.nodes.values():
        for other in names:
            got = mesh.got(node.name, other)
            assert got == [each for each in sent.get((other, node.name), []) if each in set(got)]
    for node in mesh.nodes.values():
        relayed = {each for each in node.up.values() if each}
        assert all(mesh.nodes[each].relayed._pairs for each in relayed)
