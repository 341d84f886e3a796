"""A client that is refused takes nothing over in a cluster, whichever node has its connection."""

from collections.abc import Callable
from functools import partial

import pytest

from holdfast.node.effects import AskRights, AskTopics, Effect
from holdfast.node.ownership.releases import FEATURE
from holdfast.node.topic_rights.questions import handle_topics
from holdfast.protocol.mqtt import packets as m
from holdfast.security.identity.asked_rules import ALLOW, DENIED, FAILED, AskedRules
from tests.sim.host import Host
from tests.sim.process import Process
from tests.unit.node.test_rights_cluster import LONG_S, Peer, Stage

UNAVAILABLE = 0x88
CLIENT = "device"


@pytest.fixture
def stage() -> Stage:
    stage = Stage()
    stage.until(lambda: all(_voters(host) == 3 for host in stage.world.hosts.values()))
    return stage


def _voters(host: Host) -> int:
    assert host.process is not None
    return len(host.process.cluster_node.meta.membership.voters)


def connect(
    stage: Stage, node: str, *, clean: bool = False, expiry_s: int = LONG_S, will: bool = False
) -> Peer:
    """A CONNECT whose reply is awaited elsewhere."""
    peer = Peer(stage, node, "alice", CLIENT)
    fields: dict[int, object] = {17: expiry_s} if expiry_s else {}
    last = m.Will("public/will", b"will", 1, False) if will else None
    peer.send(m.Connect(5, clean, 0, CLIENT, last, None, None, fields))  # type: ignore[arg-type]
    return peer


def connack(peer: Peer, within_s: float = 20.0) -> m.Connack:
    peer.stage.until(lambda: any(isinstance(each, m.Connack) for each in peer.packets), within_s)
    found = peer.answer(m.Connack)
    assert isinstance(found, m.Connack)
    return found


def is_alive(peer: Peer) -> bool:
    if peer.is_closed:
        return False
    peer.send(m.Pingreq())
    peer.answer(m.Pingresp)
    return True


def isolate(stage: Stage, node: str) -> None:
    name = stage.names[node]
    for other in stage.world.hosts:
        if other != name:
            stage.world.network.cut(name, other)
            stage.world.network.cut(other, name)


def host_of(stage: Stage, node: str) -> Host:
    return stage.world.hosts[stage.names[node]]


def process_of(stage: Stage, node: str) -> Process:
    process = host_of(stage, node).process
    assert process is not None
    return process


# ----------------------------------------------------------------------------- without a majority


WAITS_S = (0.0, 0.3, 5.0)
ISOLATED = [
    # Each pair of values is in those that are not long.
    pytest.param(
        node,
        LONG_S if lives else 0,
        clean,
        waits_s,
        marks=()
        if (clean, lives) == ((each + turn) % 3 > 0, (each - turn) % 3 > 0)
        else pytest.mark.long,
    )
    for each, node in enumerate("abc")
    for turn, waits_s in enumerate(WAITS_S)
    for clean in (False, True)
    for lives in (False, True)
]


@pytest.mark.parametrize(("node", "expiry_s", "clean", "waits_s"), ISOLATED)
def test_a_node_without_a_majority_leaves_the_live_connection_alone(
    stage: Stage, node: str, expiry_s: int, clean: bool, waits_s: float
) -> None:
    """Also in the time before it knows that it is cut off, and if it leads the home partition."""
    live = connect(stage, node, expiry_s=expiry_s)
    assert connack(live).reason == 0
    isolate(stage, node)
    stage.run(waits_s)
    later = connect(stage, node, clean=clean, expiry_s=expiry_s)
    assert connack(later).reason == UNAVAILABLE
    assert is_alive(live)
    assert stage.total("sessions_taken_over") == 0
    stage.world.network.heal()
    stage.run(5.0)
    # The lease of the session has run out if another node took it for down.
    if not live.is_closed:
        assert is_alive(live)
    assert connack(connect(stage, node)).reason == 0
    stage.until(lambda: live.is_closed)


@pytest.mark.parametrize("expiry_s", [0, LONG_S])
@pytest.mark.parametrize("nodes", ["ab", "aa", "ac", "ca", "cc"])
def test_a_connection_is_taken_over_at_any_node(stage: Stage, nodes: str, expiry_s: int) -> None:
    live = connect(stage, nodes[0], expiry_s=expiry_s, will=True)
    assert connack(live).reason == 0
    later = connect(stage, nodes[1], expiry_s=expiry_s)
    assert connack(later, 1.0).session_present == (expiry_s > 0)
    assert live.is_closed
    assert is_alive(later)
    assert stage.total("sessions_taken_over") == 1


@pytest.mark.parametrize("expiry_s", [0, LONG_S])
@pytest.mark.parametrize("nodes", ["ab", "aa"])
def test_a_coordinator_of_an_older_version_finds_the_session_released(
    stage: Stage, nodes: str, expiry_s: int
) -> None:
    """It orders nothing of the node that requests the session."""
    for name in "ab":
        features = process_of(stage, name).cluster_node.context.features
        for other in features:
            features[other] = ""
    live = connect(stage, nodes[0], expiry_s=expiry_s)
    assert connack(live).reason == 0
    later = connect(stage, nodes[1], expiry_s=expiry_s)
    if nodes[0] == nodes[1]:
        stage.run(0.01)
        assert live.is_closed
    assert connack(later, 1.0).session_present == (expiry_s > 0)
    assert stage.total("sessions_taken_over") == 1


def test_the_feature_is_announced(stage: Stage) -> None:
    for host in stage.world.hosts.values():
        assert host.process is not None
        context = host.process.cluster_node.context
        assert all(context.understands(name, FEATURE) for name in stage.world.hosts)
        assert not context.understands("another", FEATURE)


# ------------------------------------------------------- while a service decides about each filter


class Service:
    """It decides about topics at each node, once the test says so."""

    def __init__(self, stage: Stage) -> None:
        self.verdicts: dict[str, str] = {}
        self.asked: list[str] = []
        self.is_held = False
        self.held: list[Callable[[], None]] = []
        for host in stage.world.hosts.values():
            assert host.process is not None
            host.process.state.admission.asks_rights = True

    def carry_out(self, process: Process, effect: Effect) -> bool:
        if isinstance(effect, AskRights):
            process.post(lambda: process.node.handle_rights(effect, AskedRules()))
        elif isinstance(effect, AskTopics):
            self.asked += effect.topics
            answers = [(self.verdicts.get(each, ALLOW), 60.0) for each in effect.topics]
            reply = partial(handle_topics, process.state, effect, answers)
            if self.is_held:
                self.held.append(lambda: process.post(reply))
            else:
                process.post(reply)
        else:
            return False
        return True


@pytest.fixture
def service(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service(stage)
    carry_out = Process.carry_out

    def ask(process: Process, effect: Effect) -> None:
        if not service.carry_out(process, effect):
            carry_out(process, effect)

    monkeypatch.setattr(Process, "carry_out", ask)
    return service


def subscribed(stage: Stage, peer: Peer, filter: str, packet_id: int = 9) -> None:
    peer.send(m.Subscribe(packet_id, [m.SubscriptionRequest(filter, 1)]))
    suback = peer.answer(m.Suback)
    assert isinstance(suback, m.Suback)
    assert suback.reasons == [1]


NODES = ["ab", "ac", "ca", "aa", "cc"]


@pytest.mark.parametrize("verdict", [ALLOW, DENIED, FAILED])
@pytest.mark.parametrize("nodes", NODES)
def test_filters_that_are_accepted_while_the_service_is_asked(
    stage: Stage, service: Service, nodes: str, verdict: str
) -> None:
    """At the node that has the session, between the question and the takeover."""
    live = connect(stage, nodes[0])
    assert connack(live).reason == 0
    subscribed(stage, live, "public/a")
    stage.run(0.5)
    service.asked.clear()
    service.is_held = True
    later = connect(stage, nodes[1])
    stage.until(lambda: bool(service.held))
    assert service.asked == ["public/a"]
    held, service.held = service.held, []
    service.is_held = False
    subscribed(stage, live, "public/b", 10)
    service.verdicts["public/b"] = verdict
    known = process_of(stage, nodes[1]).images.state.sessions[CLIENT].subscriptions
    stage.until(lambda: "public/b" in known)
    if nodes[0] != nodes[1]:
        # The other node applies it only once it has decided what to ask.
        late = known.pop("public/b")
    for each in held:
        each()
    if nodes[0] != nodes[1]:
        asking = process_of(stage, nodes[1]).cluster_node.acquisition.asking
        stage.until(lambda: bool(asking))
        known["public/b"] = late
    reply = connack(later)
    assert "public/b" in service.asked[1:]
    if verdict == FAILED:
        assert reply.reason == UNAVAILABLE
        assert is_alive(live)
        assert stage.total("sessions_taken_over") == 0
        return
    assert reply.reason == 0
    assert reply.session_present
    stage.until(lambda: live.is_closed)
    source = stage.login("b", "bob")
    stage.publish(source, "public/b", 3, 1)
    texts = stage.publish(source, "public/a", 3, 1)
    stage.until(lambda: set(texts) <= set(later.payloads))
    stage.run(0.5)
    assert len(later.payloads) == (6 if verdict == ALLOW else 3)


def test_messages_stay_in_order_at_a_node_that_had_the_session_before(stage: Stage) -> None:
    """It knows the next packet id of that time, and another node has used later ones. Inflight
    messages are sent again in the order of their ids. [MQTT-4.6.0-1]"""
    writer = stage.login("c", "alice", "writer")

    def publish(reader: Peer, count: int) -> list[str]:
        texts = stage.publish(writer, "public/x", count, 1)
        stage.until(lambda: reader.payloads[-count:] == texts)
        stage.run(0.5)
        return texts

    def moved(before: Peer, node: str) -> Peer:
        before.leave()
        reader = connect(stage, node)
        reader.acknowledges = False
        assert connack(reader).session_present
        return reader

    first = stage.login("a", "alice", CLIENT, expiry_s=LONG_S)
    stage.subscribe(first, "public/#", 1)
    publish(first, 3)
    second = moved(first, "b")
    second.acknowledges = True
    publish(second, 6)
    second.acknowledges = False
    texts = publish(second, 2)
    third = moved(second, "a")
    texts += publish(third, 1)
    last = moved(third, "c")
    stage.until(lambda: len(last.payloads) == len(texts))
    assert last.payloads == texts
