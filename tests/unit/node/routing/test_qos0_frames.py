"""Frames with QoS 0 messages for other nodes: when they leave, and in which order."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.log.batch import Batch
from holdfast.log.journal.journal import Journal
from holdfast.log.record import MESSAGE, Record
from holdfast.node.context import NEVER, ClusterContext
from holdfast.node.frame_kinds import COMMIT, QOS0
from holdfast.node.routing.qos0_frames import GATHER_S, Qos0Frames

NODES = ("n2", "n3")


class Sender:
    def __init__(self) -> None:
        self.context = ClusterContext("n1", Journal(1))
        self.context.connected = set(NODES)
        self.frames = Qos0Frames(self.context)
        self.now = 100.0
        self.number = 0

    def message(self, node: str) -> int:
        builder = self.frames.builder(node, 10)
        assert builder is not None
        self.number += 1
        builder.add(Record(0, MESSAGE, topic=b"t", payload=b"%d" % self.number))
        return self.number

    def turn(self) -> list[tuple[str, int, list[int]]]:
        """(node, kind, the numbers of the messages) of the frames that leave."""
        self.frames.flush(self.now)
        sent, self.context.outgoing = self.context.outgoing, []
        return [(node, kind, self.numbers(kind, payload)) for node, kind, payload in sent]

    def numbers(self, kind: int, payload: bytes | list[bytes]) -> list[int]:
        assert isinstance(payload, bytes)
        if kind == QOS0:
            return [int(each.payload) for each in Batch(payload).records()]
        return [int(payload)]


def test_a_message_alone_waits_for_nothing() -> None:
    sender = Sender()
    assert sender.frames.timer() == NEVER
    for _ in range(3):
        number = sender.message("n2")
        assert sender.turn() == [("n2", QOS0, [number])]
        assert sender.frames.timer() == NEVER
        sender.now += GATHER_S


def test_those_behind_it_share_a_frame() -> None:
    sender = Sender()
    sender.message("n2")
    sender.turn()
    for _ in range(3):
        sender.now += GATHER_S / 4
        sender.message("n2")
        assert sender.turn() == []
    sender.now = sender.frames.timer()
    assert sender.turn() == [("n2", QOS0, [2, 3, 4])]
    assert sender.turn() == []


STEP = st.tuples(st.sampled_from(NODES), st.booleans(), st.booleans(), st.floats(0, 2 * GATHER_S))


@given(st.lists(STEP, max_size=40))
def test_no_other_frame_overtakes_a_message(steps: list[tuple[str, bool, bool, float]]) -> None:
    """To whichever node, because a third one may pass on what follows from it."""
    sender = Sender()
    order: list[int] = []
    for node, is_message, ends_turn, passed_s in steps:
        if is_message:
            sender.message(node)
        else:
            sender.number += 1
            sender.context.send(node, COMMIT, b"%d" % sender.number)
        if ends_turn:
            sent = sender.turn()
            kinds = [kind for _, kind, _ in sent]
            assert kinds == sorted(kinds, key=lambda kind: kind != QOS0)
            assert COMMIT not in kinds or not sender.frames._outbound
            order += [each for _, _, numbers in sent for each in numbers]
            sender.now += passed_s
    sender.now += GATHER_S
    order += [each for _, _, numbers in sender.turn() for each in numbers]
    assert sorted(order) == list(range(1, sender.number + 1))


def test_a_node_whose_link_is_lost_gets_nothing_later() -> None:
    sender = Sender()
    sender.message("n2")
    sender.turn()
    sender.message("n2")
    sender.message("n3")
    sender.frames.forget("n2")
    sender.now += GATHER_S
    assert sender.turn() == [("n3", QOS0, [3])]
