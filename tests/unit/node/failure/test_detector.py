"""The failure detector: detectors of several nodes, virtual time, a network that can be cut."""

import random
from dataclasses import replace
from itertools import pairwise, product

import pytest

from holdfast.node.failure.detector import (
    Beat,
    Detector,
    DetectorConfig,
    HeardAgain,
    Heartbeat,
    Suspected,
    decode_heartbeat,
    encode_heartbeat,
)
from holdfast.node.failure.health import Presence
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.metadata.model import ClusterMetadata, NodeInfo
from holdfast.node.metadata.status import stop_effect

CONFIG = DetectorConfig()
STEP_S = 0.01


class Mesh:
    def __init__(self, *nodes: str, connect: bool = True) -> None:
        self.now = 100.0
        self.detectors: dict[str, Detector] = {}
        self.paused: set[str] = set()
        self.dead: set[str] = set()
        self.cut: set[tuple[str, str]] = set()
        """(sender, receiver): nothing arrives."""
        self.inbox: dict[str, list[tuple[str, bytes]]] = {}
        self.delayed = False
        """Nothing arrives now, but later."""
        self.events: list[tuple[float, str, object]] = []
        self.beats: dict[str, list[float]] = {}
        self.members: list[str] = []
        for node in nodes:
            self.add(node, connect)

    def add(self, node: str, connect: bool = True) -> None:
        self.members.append(node)
        self.detectors[node] = Detector(node, Presence("i1", f"{node}:1"), CONFIG, self.now)
        self.inbox[node] = []
        self.dead.discard(node)
        for detector in self.detectors.values():
            detector.set_members(self.members, self.now)
        if connect:
            for other in self.detectors:
                if other != node and other not in self.dead:
                    self.connect(node, other)

    def connect(self, one: str, two: str) -> None:
        self.detectors[one].connected(two, Presence("i1", f"{two}:1"), self.now)
        self.detectors[two].connected(one, Presence("i1", f"{one}:1"), self.now)

    def kill(self, node: str) -> None:
        self.dead.add(node)
        for other, detector in self.detectors.items():
            if other not in self.dead:
                detector.closed(node, False, self.now)
                detector.closed(node, True, self.now)

    def run(self, duration_s: float) -> None:
        end = self.now + duration_s
        while self.now < end:
            self.now += STEP_S
            for node, detector in self.detectors.items():
                if node not in self.dead and node not in self.paused:
                    self.turn(node, detector)

    def turn(self, node: str, detector: Detector) -> None:
        """Timers first: the harder order for a node that was paused."""
        due = detector.timer()
        if due is not None and self.now >= due:
            detector.handle_timers(self.now)
        if not self.delayed:
            for sender, payload in self.inbox[node]:
                detector.handle_heartbeat(sender, payload, self.now)
            self.inbox[node].clear()
        detector.check(self.now)
        effects, detector.effects = detector.effects, []
        for effect in effects:
            if isinstance(effect, Beat):
                self.beats.setdefault(node, []).append(self.now)
                self.broadcast(node, effect.payload)
            else:
                self.events.append((self.now, node, effect))

    def broadcast(self, sender: str, payload: bytes) -> None:
        for node in self.detectors:
            if node != sender and node not in self.dead and (sender, node) not in self.cut:
                self.inbox[node].append((sender, payload))

    def suspects(self, node: str) -> set[str]:
        return set(self.detectors[node].suspects(self.now))

    def confirmed(self, node: str, other: str) -> bool:
        return other in self.detectors[node].health(self.now).dead

    def until(self, condition: str, node: str, other: str, limit_s: float = 5.0) -> float:
        """Runs until it is so; returns how long that took."""
        start = self.now
        while self.now < start + limit_s:
            self.run(STEP_S)
            is_so = other in self.suspects(node) if condition == "suspects" else None
            if is_so or (condition == "confirmed" and self.confirmed(node, other)):
                return self.now - start
        raise AssertionError(f"{node} {condition} {other} never")


def test_all_is_well() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.run(30)
    assert mesh.events == []
    health = mesh.detectors["a"].health(mesh.now)
    assert set(health.present) == {"a", "b", "c"}
    assert health.suspected == health.dead == health.leaving == frozenset()
    assert mesh.detectors["a"].health(mesh.now) is health


def test_the_heartbeats_of_all_nodes_leave_together_and_none_later() -> None:
    """Each node that joins has another phase, so that a node would wake up for each of them."""
    mesh = Mesh("a")
    for number, name in enumerate("bcdefg"):
        mesh.run(0.03 + 0.02 * number)
        mesh.add(name)
    mesh.run(1)
    mesh.beats.clear()
    mesh.run(2)
    first = mesh.beats["a"]
    assert 19 <= len(first) <= 21
    for times in mesh.beats.values():
        for one, other in pairwise(times):
            assert other - one <= CONFIG.heartbeat_s + 1.5 * STEP_S
        assert all(min(abs(time - each) for each in first) < 2.5 * STEP_S for time in times)


def test_a_dead_process_is_confirmed_at_once() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    mesh.kill("c")
    assert mesh.suspects("a") == mesh.suspects("b") == {"c"}
    assert mesh.until("confirmed", "a", "c") <= 3 * STEP_S
    health = mesh.detectors["a"].health(mesh.now)
    assert health.dead == {"c"}
    assert "c" not in health.present


def test_silence_takes_its_time() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    mesh.paused.add("c")
    took_s = mesh.until("suspects", "a", "c")
    assert CONFIG.suspect_s - CONFIG.heartbeat_s < took_s < CONFIG.suspect_s + 0.1
    mesh.until("confirmed", "a", "c", limit_s=0.2)


def test_a_closed_link_alone_is_no_death() -> None:
    """Cut in the network: the socket is closed, and nobody answers. Silence decides."""
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    mesh.detectors["a"].closed("c", False, mesh.now)
    mesh.cut.add(("c", "a"))
    mesh.run(0.2)
    assert mesh.suspects("a") == set()
    assert "c" not in mesh.detectors["a"].health(mesh.now).present
    mesh.until("suspects", "a", "c")


def test_one_broken_link_is_not_a_dead_node() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    mesh.cut.add(("c", "a"))
    mesh.until("suspects", "a", "c")
    mesh.run(3)
    assert not mesh.confirmed("a", "c")
    assert mesh.detectors["a"].health(mesh.now).dead == frozenset()
    mesh.cut.add(("c", "b"))
    mesh.until("confirmed", "a", "c", limit_s=1.0)


def test_the_witness_counts() -> None:
    mesh = Mesh("a", "b", "witness")
    mesh.run(1)
    mesh.cut.add(("b", "a"))
    mesh.until("suspects", "a", "b")
    mesh.run(1)
    assert not mesh.confirmed("a", "b")
    mesh.cut.add(("b", "witness"))
    mesh.until("confirmed", "a", "b")


def test_with_nobody_left_to_ask_ours_is_the_only_opinion() -> None:
    mesh = Mesh("a", "b")
    mesh.run(1)
    mesh.kill("b")
    assert mesh.confirmed("a", "b")


def test_a_paused_node_accuses_nobody_when_it_goes_on() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    for pause_s in (0.3, 0.6, 5.0, 30.0):
        mesh.paused.add("a")
        # What is sent meanwhile is lost: the buffers are full.
        mesh.cut |= {("b", "a"), ("c", "a")}
        mesh.run(pause_s)
        mesh.paused.discard("a")
        assert mesh.suspects("a") == set()
        mesh.run(0.05)
        assert mesh.suspects("a") == set()
        mesh.cut.clear()
        mesh.run(2)
        assert mesh.suspects("a") == set()
    assert [event for event in mesh.events if event[1] == "a"] == []


def test_after_a_pause_real_silence_is_found() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    mesh.paused |= {"a", "c"}
    mesh.run(2)
    mesh.paused.discard("a")
    took_s = mesh.until("confirmed", "a", "c")
    assert took_s < CONFIG.well_after_s + CONFIG.suspect_s + 0.2


def test_a_lagging_loop_accuses_nobody() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    mesh.cut.add(("b", "a"))
    for _ in range(20):
        mesh.detectors["a"].loop_lag(0.25, mesh.now)
        mesh.run(0.3)
        assert mesh.suspects("a") == set()
    mesh.until("suspects", "a", "b", limit_s=1.5)
    mesh.detectors["a"].loop_lag(0.25, mesh.now)
    assert mesh.suspects("a") == set(), "it keeps that to itself until it is well"
    assert "b" not in mesh.detectors["a"].health(mesh.now).present


def test_a_small_lag_is_no_lag() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    mesh.paused.add("b")
    for _ in range(4):
        mesh.detectors["a"].loop_lag(0.19, mesh.now)
        mesh.run(0.1)
    mesh.until("suspects", "a", "b", limit_s=0.3)


def test_a_refused_connection_is_a_fact_for_a_lagging_node_too() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    mesh.detectors["a"].loop_lag(3.0, mesh.now)
    mesh.kill("c")
    assert mesh.suspects("a") == {"c"}


def test_others_that_are_too_busy_are_not_waited_for_for_ever() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    mesh.paused.add("c")
    mesh.until("suspects", "a", "c")
    for _ in range(8):
        mesh.detectors["b"].loop_lag(0.25, mesh.now)
        mesh.run(0.2)
        assert not mesh.confirmed("a", "c")
    for _ in range(4):
        mesh.detectors["b"].loop_lag(0.25, mesh.now)
        mesh.run(0.2)
    assert mesh.confirmed("a", "c")


@pytest.mark.parametrize("seed", range(8))
def test_only_who_was_paused_is_ever_dead(seed: int) -> None:
    """One node at a time is held up, one link at a time is cut in one direction."""
    generator = random.Random(seed)
    nodes = ["a", "b", "c", "d"]
    mesh = Mesh(*nodes)
    mesh.run(1)
    running_since = dict.fromkeys(nodes, 0.0)
    deaths = 0
    for _ in range(25):
        sender, receiver = generator.sample(nodes, 2)
        mesh.cut = {(sender, receiver)} if generator.random() < 0.5 else set()
        paused = generator.choice(nodes)
        mesh.paused = {paused} if generator.random() < 0.7 else set()
        end = mesh.now + generator.choice([0.05, 0.3, 0.6, 2.0])
        while mesh.now < end:
            mesh.run(STEP_S)
            for node in mesh.paused:
                running_since[node] = mesh.now
            for node in set(nodes) - mesh.paused:
                for dead in mesh.detectors[node].health(mesh.now).dead:
                    deaths += 1
                    # As long as the opinion of somebody who fell silent meanwhile counts.
                    running_s = mesh.now - running_since[dead]
                    assert running_s < CONFIG.suspect_s + CONFIG.heartbeat_s
    assert deaths


def test_it_is_heard_again() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    mesh.kill("c")
    mesh.run(0.5)
    mesh.members.remove("c")
    mesh.add("c")
    mesh.run(0.2)
    assert not mesh.suspects("a")
    assert set(mesh.detectors["a"].health(mesh.now).present) == {"a", "b", "c"}
    kinds = [type(event[2]) for event in mesh.events if event[1] == "a"]
    assert kinds == [Suspected, HeardAgain]


def test_nodes_that_start_together_are_given_time() -> None:
    mesh = Mesh("a", "b", "c", connect=False)
    mesh.connect("a", "b")
    for node in ("a", "b"):
        mesh.detectors[node].closed("c", True, mesh.now)
    mesh.run(CONFIG.first_contact_s - 0.1)
    assert mesh.suspects("a") == set()
    mesh.until("confirmed", "a", "c", limit_s=0.3)


def test_a_node_that_leaves_needs_no_second_opinion() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    mesh.detectors["c"].leave(mesh.now)
    mesh.run(0.02)
    assert mesh.detectors["a"].health(mesh.now).leaving == {"c"}
    assert mesh.detectors["c"].health(mesh.now).leaving == {"c"}
    mesh.dead.add("c")
    mesh.detectors["a"].closed("c", True, mesh.now)
    assert mesh.confirmed("a", "c")
    mesh.members.remove("c")
    mesh.add("c")
    mesh.run(0.2)
    assert mesh.detectors["a"].health(mesh.now).leaving == frozenset()


def test_a_node_that_has_left_leaves_until_it_is_suspected() -> None:
    """Its link is closed before anybody finds out that nothing listens any more. Taken for a node
    that stays, it would be given back what others have just taken over from it."""
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    mesh.detectors["c"].leave(mesh.now)
    mesh.run(0.02)
    mesh.dead.add("c")
    for node in ("a", "b"):
        mesh.detectors[node].closed("c", False, mesh.now)
        health = mesh.detectors[node].health(mesh.now)
        assert (health.leaving, health.suspected) == ({"c"}, frozenset())
        assert "c" not in health.present
    mesh.until("confirmed", "a", "c", limit_s=CONFIG.suspect_s + 0.1)
    assert mesh.detectors["a"].health(mesh.now).leaving == frozenset()
    mesh.members.remove("c")
    mesh.add("c")
    mesh.run(0.2)
    assert mesh.detectors["a"].health(mesh.now).leaving == frozenset()


@pytest.mark.parametrize("seed", range(50))
def test_of_nodes_that_ask_to_stop_one_leaves(seed: int) -> None:
    """However the heartbeats cross: each alone could be spared, two cannot."""
    chance = random.Random(seed)
    mesh = Mesh("a", "b", "c")
    mesh.run(1 + chance.random())
    nodes = {name: NodeInfo(name, "i1", f"{name}:1", "", "") for name in "abc"}
    metadata = ClusterMetadata("c", 3, 2, nodes, (), 1, ("a", "b", "c"))
    chosen = chance.sample("abc", 2)
    asks = {node: mesh.now + chance.choice((0, 0.4)) * chance.random() for node in chosen}
    asked: list[str] = []
    left: list[str] = []
    while mesh.now < max(asks.values()) + 2:
        mesh.delayed = chance.random() < 0.5
        mesh.run(STEP_S)
        for node, at in asks.items():
            detector = mesh.detectors[node]
            if node not in asked and mesh.now >= at:
                detector.ask_to_stop(mesh.now)
                asked.append(node)
            effect = stop_effect(metadata, detector.health(mesh.now), node)
            if node not in left and detector.is_asking_known() and not effect.is_passing:
                detector.leave(mesh.now)
                left.append(node)
    assert len(left) == 1, (asks, left)


def test_a_node_says_that_its_disk_is_full() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    mesh.detectors["c"].set_full(True, mesh.now)
    mesh.run(0.02)
    for node in "abc":
        health = mesh.detectors[node].health(mesh.now)
        assert health.full == health.unhealthy == {"c"}
        assert not health.dead
    mesh.detectors["c"].set_full(False, mesh.now)
    mesh.run(0.02)
    assert mesh.detectors["a"].health(mesh.now).full == frozenset()


def test_a_node_knows_until_when_it_was_heard() -> None:
    mesh = Mesh("a", "b", "c")
    assert mesh.detectors["a"].acknowledged_at("b") == float("-inf")
    mesh.run(1)
    assert mesh.now - 0.25 < mesh.detectors["a"].acknowledged_at("b") < mesh.now
    # It hears, and is not heard: nobody has confirmed what it has sent since.
    mesh.cut = {("a", "b"), ("a", "c")}
    cut_at = mesh.now
    mesh.run(2)
    assert not mesh.suspects("a")
    for node in "bc":
        assert mesh.detectors["a"].acknowledged_at(node) <= cut_at
        assert mesh.suspects(node) == {"a"}
    mesh.cut.clear()
    mesh.run(0.3)
    assert mesh.detectors["a"].acknowledged_at("b") > cut_at + 2


def test_nobody_suspects_a_node_before_it_knows_that_it_may_be() -> None:
    """Whatever is cut, and when."""
    for seed in range(10):
        chance = random.Random(seed)
        mesh = Mesh("a", "b", "c")
        mesh.run(1 + chance.random() * 0.2)
        mesh.cut = {(one, two) for one, two in product("abc", repeat=2) if chance.random() < 0.5}
        for _ in range(100):
            mesh.run(STEP_S)
            for other in "bc":
                held_until = mesh.detectors["a"].acknowledged_at(other) + CONFIG.suspect_s
                assert "a" not in mesh.suspects(other) or mesh.now >= held_until


def test_a_node_says_that_its_disk_does_not_answer() -> None:
    """Nobody else can know; and nobody takes it for dead."""
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    mesh.detectors["c"].set_stalled(True, mesh.now)
    mesh.run(0.02)
    for node in "abc":
        health = mesh.detectors[node].health(mesh.now)
        assert health.stalled == {"c"}
        assert not health.dead
        assert "c" in health.present
    mesh.detectors["c"].set_stalled(False, mesh.now)
    mesh.run(0.02)
    assert mesh.detectors["a"].health(mesh.now).stalled == frozenset()
    mesh.detectors["c"].set_stalled(True, mesh.now)
    mesh.run(0.02)
    mesh.kill("c")
    assert mesh.detectors["a"].health(mesh.now).stalled == frozenset()
    mesh.members.remove("c")
    mesh.add("c")
    mesh.run(0.2)
    assert mesh.detectors["a"].health(mesh.now).stalled == frozenset()


def test_a_node_says_that_its_log_is_damaged() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    mesh.detectors["c"].set_damaged(mesh.now)
    mesh.run(0.02)
    for node in "abc":
        health = mesh.detectors[node].health(mesh.now)
        assert health.damaged == {"c"}
        assert not health.dead
    # With another disk it is another node.
    mesh.kill("c")
    mesh.members.remove("c")
    mesh.add("c")
    mesh.run(0.2)
    assert not mesh.detectors["a"].health(mesh.now).damaged


def test_opinions_of_strangers_do_not_count() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    mesh.cut |= {("c", "a")}
    mesh.until("suspects", "a", "c")
    stranger = mesh.detectors["a"]
    stranger.connected("x", Presence("i1", "x:1"), mesh.now)
    payload = encode_heartbeat(Heartbeat(1, suspected=frozenset({"c"})))
    stranger.handle_heartbeat("x", payload, mesh.now)
    assert not mesh.confirmed("a", "c")


def test_an_older_heartbeat_changes_nothing() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    mesh.cut |= {("c", "a"), ("b", "a")}
    detector = mesh.detectors["a"]
    accusing = encode_heartbeat(Heartbeat(1000, suspected=frozenset({"c"})))
    detector.handle_heartbeat("b", accusing, mesh.now)
    detector.handle_heartbeat("b", encode_heartbeat(Heartbeat(999)), mesh.now)
    mesh.detectors["a"].closed("c", True, mesh.now)
    assert mesh.confirmed("a", "c")


def test_removed_members_are_forgotten() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.run(1)
    mesh.kill("c")
    mesh.run(0.1)
    for node in ("a", "b"):
        mesh.detectors[node].set_members(["a", "b"], mesh.now)
    assert mesh.suspects("a") == set()
    mesh.run(3)
    assert mesh.detectors["a"].health(mesh.now).dead == frozenset()


@pytest.mark.parametrize("seconds", [0.0, 0.123, 5e6])
def test_heartbeats_come_through(seconds: float) -> None:
    names = frozenset({"n1", "a-very_long-node-id-of-32-charac"})
    for leaving, well, *disk, asks in product((False, True), repeat=6):
        heard = {"n1": 2**63, "n2": 0}
        stalled, damaged, full = disk
        beat = Heartbeat(2**63, seconds, leaving, well, names, stalled, damaged, heard, full, asks)
        read = decode_heartbeat(encode_heartbeat(beat))
        assert replace(read, lag_s=seconds) == beat
        assert read.lag_s == min(seconds, (2**32 - 1) / 1000)


def test_bad_heartbeats_are_refused() -> None:
    good = encode_heartbeat(Heartbeat(7, 0.1, suspected=frozenset({"n1", "n2"})))
    for end in range(len(good)):
        with pytest.raises(BadFrame):
            decode_heartbeat(good[:end])
    for bad in (good + b"x", good[:-1] + b"\xff", good[:13] + b"\xff\xff" + good[15:]):
        with pytest.raises(BadFrame):
            decode_heartbeat(bad)
    for position in range(13, len(good)):
        for value in range(256):
            mutated = good[:position] + bytes([value]) + good[position + 1 :]
            try:
                decode_heartbeat(mutated)
            except BadFrame:
                pass
