"""Filters that reach the leader of a fed partition later than their SUBACK may wait."""

from collections.abc import Callable

import pytest
from msgspec import json

from holdfast.node.feeds.feeds import Feeds
from holdfast.node.feeds.frames import FeedFrom, aligned_part, decode_feed_from
from holdfast.node.frame_kinds import FEED, FEED_FROM, INTEREST
from holdfast.node.metadata.model import DATA
from holdfast.node.node_state import NodeState, Promise
from holdfast.node.publish.promises import PromiseQueues
from holdfast.node.publish.retained_updates import RetainedUpdates
from holdfast.node.routing.interest_frames import INTEREST_DECODER, InterestAck
from holdfast.node.routing.qos0_routing import WAIT_S, Qos0Routing
from tests.unit.node.feeds.test_feeds import Node


class Left(Promise):
    """A SUBACK that notes that it has left."""

    has_left = False

    def release(self, state: NodeState) -> None:
        self.has_left = True


class FedNode:
    """n2, which stored its only partition and is fed by n1 now."""

    def __init__(self) -> None:
        node = Node("n2", DATA)
        self.state, self.context = node.state, node.context
        self.context.leader = lambda partition: "n1"  # type: ignore[method-assign]
        self.context.epoch = lambda partition: 1  # type: ignore[method-assign]
        self.interest = Qos0Routing(
            node.state, node.context, RetainedUpdates(node.state), PromiseQueues(node.state)
        )
        self.feeds = Feeds(
            node.state, node.context, node.log, node.applier, node.forwarding, self.interest
        )
        self.context.connected.add("n1")
        self.interest.connected("n1")
        self.feeds.connected("n1")
        self.turn()
        self.acknowledge()

    def be_fed(self) -> None:
        self.context.unstored.add(0)
        self.feeds.receiver.lose(0)

    def turn(self) -> list[tuple[str, object]]:
        """Ends a turn. The filters and the feeds that it announces and requests, in order."""
        self.interest.release()
        self.interest.flush()
        self.feeds.flush()
        found: list[tuple[str, object]] = []
        for _, kind, payload in self.context.outgoing:
            assert isinstance(payload, bytes)
            if kind == INTEREST:
                found += [("filter", each) for each in INTEREST_DECODER.decode(payload).added]
            elif kind == FEED_FROM:
                found += [("feed", each.position) for each in decode_feed_from(payload)]
                self.request: FeedFrom = decode_feed_from(payload)[-1]
        self.context.outgoing.clear()
        return found

    def begin_feed(self) -> None:
        self.feeds.handle_frame("n1", FEED, aligned_part(self.request.request, []))
        while self.state.work:
            self.state.run_work()

    def acknowledge(self) -> None:
        self.interest.handle_ack("n1", json.encode(InterestAck(self.interest.number)))


def subscribe(node: FedNode) -> Left:
    """A SUBSCRIBE without a hold, whose record is committed now."""
    node.interest.subscribed("a")
    suback = Left(None)
    node.interest.promise(suback)
    return suback


def wait_too_long(node: FedNode) -> None:
    node.state.now += WAIT_S


@pytest.mark.parametrize(
    ("acknowledge", "again"),
    [(FedNode.acknowledge, []), (wait_too_long, [("feed", 0)])],
)
def test_a_suback_leaves_no_feed_without_its_filters(
    acknowledge: Callable[[FedNode], None], again: list[tuple[str, int]]
) -> None:
    """The node stored the partition when the SUBSCRIBE came, and is fed before its record is
    committed. A leader that does not acknowledge the filter in time has its feed requested again
    behind the filter, with the SUBACK: it would send no message of the filter otherwise."""
    node = FedNode()
    node.be_fed()
    assert node.turn() == [("feed", 0)]
    node.begin_feed()
    suback = subscribe(node)
    assert node.turn() == [("filter", "a")]
    assert not suback.has_left
    assert node.feeds.receiver.is_live(0)
    acknowledge(node)
    assert node.turn() == again
    assert suback.has_left
    assert node.feeds.receiver.is_live(0) == (not again)
