"""Two inputs about one shared group, the second while the records of the first are not committed.

The coordinator decides on what is applied. So what the members have and receive in the end must be
what comes of the two inputs one after the other. All pairs run in one simulated cluster, each with
a group of its own. The home of all groups and sessions commits nothing while the pairs are sent.
"""

from collections.abc import Callable
from functools import cache
from itertools import permutations
from typing import Final

import pytest

from holdfast.log.partition import partition_of
from holdfast.protocol.mqtt import packets as m
from tests.sim.checks import Message
from tests.sim.process import Process
from tests.unit.node.test_rights_cluster import LONG_S, Peer, Stage

APPLIED_S: Final = 0.1
"""For an UNSUBSCRIBE."""
TIDIED_S: Final = 0.3
"""For the coordinator, which ends groups each `node.TIDY_S`. Links are not given up yet."""
SETTLED_S: Final = 7.0
"""Longer than every wait of a coordinator with a limit."""


class Group:
    """One group: the durable client `one` is its member, and connected."""

    def __init__(self, stage: Stage, number: int, history: tuple[str, ...]) -> None:
        self.stage = stage
        self.number = number
        self.history = history
        self.key = self._name("$share/g{}/s" + f"{number}/#")
        self.topic = self._name(f"s{number}/" + "{}", "a" if history in ENDINGS else "c")
        self.texts = 0
        self.old: list[Peer] = []
        self.one = stage.login("a", "alice", self._name(f"one{number}-" + "{}"), expiry_s=LONG_S)
        self.two: Peer | None = None
        self.two_id = self._name(f"two{number}-" + "{}")
        self.guest = stage.login("b", "alice", f"guest{number}")
        self.publisher = stage.login("b", "bob", f"p{number}")
        stage.subscribe(self.one, self.key, 1)

    def _name(self, text: str, node: str = "c") -> str:
        """A name whose home the node leads, by default the coordinator."""
        metadata = self.stage.world.newest_metadata()
        assert metadata is not None
        count = self.stage.world.settings.partitions
        return next(
            name
            for name in map(text.format, range(1000))
            if metadata.partitions[partition_of(name.encode(), count)].leader
            == self.stage.names[node]
        )

    # Inputs

    def publish(self) -> None:
        self.texts += 1
        text = f"{self.number}.{self.texts}"
        message = Message(text, self.publisher.client_id, self.topic, self.texts, 1)
        self.stage.world.checks.published(message)
        self.publisher.send(
            m.Publish(self.topic.encode(), text.encode(), 1, False, False, self.texts, b"", 0, -1)
        )

    def subscribe(self) -> None:
        self.one.send(m.Subscribe(9, [m.SubscriptionRequest(self.key, 1)]))

    def unsubscribe(self) -> None:
        self.one.send(m.Unsubscribe(9, [self.key]))

    def connect(self, client_id: str, *, clean: bool) -> Peer:
        peer = Peer(self.stage, "b", "alice", client_id)
        fields: dict[int, object] = {17: LONG_S}
        peer.send(m.Connect(5, clean, 0, client_id, None, None, None, fields))  # type: ignore[arg-type]
        return peer

    def begin_again(self) -> None:
        """The client connects elsewhere, with Clean Start."""
        self.old.append(self.one)
        self.one = self.connect(self.one.client_id, clean=True)

    def resume(self) -> None:
        self.old.append(self.one)
        self.one = self.connect(self.one.client_id, clean=False)

    def lose(self) -> None:
        self.one.lose()

    def join(self) -> None:
        """Another client becomes a member."""
        if self.two is None:
            self.two = self.connect(self.two_id, clean=True)
        self.two.send(m.Subscribe(9, [m.SubscriptionRequest(self.key, 1)]))

    def join_for_now(self) -> None:
        """A client becomes a member whose session no record has."""
        self.guest.send(m.Subscribe(9, [m.SubscriptionRequest(self.key, 1)]))

    # Outcome

    def outcome(self) -> object:
        per_node = [self._recorded(host.process) for host in self.stage.world.data_hosts]
        assert per_node[1:] == per_node[:-1]
        names = per_node[0].replace(self.one.client_id, "one").replace(self.two_id, "two")
        peers = [*self.old, self.one, self.guest, *([] if self.two is None else [self.two])]
        # A message of QoS 1 may come again with a connection.
        texts = {text.partition(".")[2] for peer in peers for text in peer.payloads}
        return names, sorted(texts)

    def _recorded(self, process: Process | None) -> str:
        """The subscriptions and the member records."""
        assert process is not None
        group = process.images.state.groups.get(self.key)
        members = [] if group is None else sorted(each.client_id for each in group.members)
        return f"{members} {sorted(process.images.group_members.recorded.get(self.key, ()))}"


INPUTS: Final[dict[str, Callable[[Group], None]]] = {
    "publish": Group.publish,
    "subscribe": Group.subscribe,
    "unsubscribe": Group.unsubscribe,
    "begin again": Group.begin_again,
    "resume": Group.resume,
    "lose": Group.lose,
    "join": Group.join,
    "join for now": Group.join_for_now,
}
END: Final = "the group ends"
ENDINGS: Final = [
    *((END, name) for name in INPUTS),
    # The message is committed, and of no member.
    *((END, "publish", name) for name in ("subscribe", "join", "join for now")),
]
HISTORIES: Final[list[tuple[str, ...]]] = [*permutations(INPUTS, 2), *ENDINGS]


def outcomes(*, in_flight: bool, is_lost: bool = False) -> list[object]:
    """For each history, who is a member by the log, and what the members have received in the end.

    `is_lost`: the node of the home is killed with the records.
    """
    stage = Stage()
    stage.run(1.0)
    groups = [Group(stage, number, names) for number, names in enumerate(HISTORIES)]
    stage.run(2.0)
    home = stage.names["c"]
    network = stage.world.network
    for group in groups:
        if END in group.history:
            group.unsubscribe()
    stage.run(APPLIED_S)
    coordinator = stage.world.hosts[home].process
    assert coordinator is not None
    before = list(coordinator.journal.high_watermark)
    led = coordinator.cluster_node.context.leading
    if in_flight:
        # A link through another node would commit.
        for host in stage.world.hosts.values():
            assert host.process is not None
            host.process.runtime.links.relayed.objection = None
        network.cut(home, stage.names["b"])
        network.cut(stage.names["b"], home)
    for step in range(max(map(len, HISTORIES))):
        for group in groups:
            if step < len(group.history) and group.history[step] != END:
                INPUTS[group.history[step]](group)
        # The ends of groups are the first step.
        first_s = TIDIED_S if in_flight else SETTLED_S
        stage.run(first_s if step == 0 else APPLIED_S if in_flight else SETTLED_S)
    if in_flight:
        after = coordinator.journal.high_watermark
        assert not any(led[at] and after[at] != before[at] for at in range(len(after)))
        homes = coordinator.cluster_node.groups.coordinator.homes.led.values()
        ended = set().union(*(each.ended for each in homes))
        assert ended == {group.key for group in groups if END in group.history}
    if is_lost:
        stage.world.hosts[home].kill(power=True)
    network.heal()
    stage.run(SETTLED_S)
    if is_lost:
        stage.world.hosts[home].start()
        stage.until(stage.world.is_in_sync)
        stage.run(SETTLED_S)
    # Whoever is a member, or was, is there in the end.
    for group in groups:
        group.resume()
        group.publish()
    stage.run(SETTLED_S)
    return [group.outcome() for group in groups]


@cache
def serial_outcomes() -> list[object]:
    return outcomes(in_flight=False)


@pytest.mark.parametrize("is_lost", [False, True])
def test_inputs_of_a_group_are_decided_one_after_the_other(is_lost: bool) -> None:
    found = outcomes(in_flight=True, is_lost=is_lost)
    serial = dict(zip(HISTORIES, serial_outcomes(), strict=True))
    # Two clients may be first. What follows an end has seen it.
    allowed = {names: [serial[names]] for names in HISTORIES}
    for names in permutations(INPUTS, 2):
        allowed[names].append(serial[names[::-1]])
    # A CONNECT is withdrawn with its connection if it has no reply yet.
    for second in ("resume", "lose"):
        allowed["begin again", second].append(serial["lose", "resume"])
    wrong = [
        (names, each, allowed[names])
        for names, each in zip(HISTORIES, found, strict=True)
        if each not in allowed[names]
    ]
    assert not wrong, "\n".join(map(str, wrong))
