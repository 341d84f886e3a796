"""A member keeps the packet id of a shared group's QoS 2 record until the log says that the group
has finished with it: PUBREL waits for that."""

from holdfast.cluster.fabric import Fabric
from holdfast.cluster.forwarding import Appender, Forwarding
from holdfast.cluster.images import Images
from holdfast.cluster.promises import Promise
from holdfast.cluster.shares import FINISH_WAIT_S, Shares
from holdfast.log.journal import Journal
from holdfast.log.record import CURSOR, Record
from holdfast.node.config import NodeConfig
from holdfast.node.state import Group, Held, NodeState
from holdfast.session.session import Session
from holdfast.session.state import encode_cursor

KEY = "$share/g/t/#"
PLACE = (1, 7)


class Pubrel(Held):
    is_sent = False

    def release(self, state: NodeState) -> None:
        self.is_sent = True


class Member:
    def __init__(self) -> None:
        journal = Journal(2, replicated=True)
        config = NodeConfig(partitions=2)
        self.state = NodeState(config, journal)
        self.images = Images(NodeState(config, journal))
        fabric = Fabric("n1", journal)
        forwarding = Forwarding(self.state, fabric, Appender())
        self.shares = Shares(
            self.state, fabric, forwarding, self.images, lambda *_: None, lambda *_: None
        )
        self.session = Session("c", b"c")
        self.session.groups = [Group("g", "t/#")]
        self.pubrel = Pubrel()

    def wait(self) -> None:
        keys = self.shares.unfinished(self.session, PLACE)
        promise = Promise(self.pubrel)
        promise.waiting = len(keys)
        for key in keys:
            self.shares.wait(key, PLACE, promise)

    def log(self, positions: list[tuple[int, int]], *done: tuple[int, int]) -> None:
        payload = encode_cursor(positions, {}, list(done))
        record = Record(0, CURSOR, client_id=KEY.encode(), sequence=3, payload=payload)
        self.images.groups.apply(record)
        self.shares.flush()


def test_it_waits_for_the_log() -> None:
    member = Member()
    member.wait()
    member.log([(0, 5), (1, 5)], (1, 6))
    assert not member.pubrel.is_sent
    member.log([], PLACE)
    assert member.pubrel.is_sent


def test_positions_behind_it_do_as_well() -> None:
    member = Member()
    member.wait()
    member.log([(1, 8)])
    assert member.pubrel.is_sent


def test_what_the_log_says_already_is_not_waited_for() -> None:
    member = Member()
    member.log([(1, 5)], PLACE)
    assert member.shares.unfinished(member.session, PLACE) == []


def test_a_group_that_has_ended_is_not_waited_for_long() -> None:
    member = Member()
    member.wait()
    member.state.now += FINISH_WAIT_S / 2
    member.shares.tidy()
    assert not member.pubrel.is_sent
    member.state.now += FINISH_WAIT_S / 2
    member.shares.tidy()
    assert member.pubrel.is_sent
