"""Connects the feeds of a node with its other parts: those that it serves, and those it gets."""

from collections.abc import Callable, Collection, Iterable
from functools import partial

from holdfast.log import record as log_record
from holdfast.node import frame_kinds as kinds
from holdfast.node.context import ClusterContext
from holdfast.node.feeds.filter_holds import FilterHolds
from holdfast.node.feeds.receiver import FeedReceiver
from holdfast.node.feeds.server import FeedServer
from holdfast.node.groups.group_state import Coordination
from holdfast.node.node_state import NodeState
from holdfast.node.ownership.acquisition import SessionAcquisition
from holdfast.node.ownership.requests import PendingOpen
from holdfast.node.publish.apply import Applier, ApplyingLog
from holdfast.node.publish.forwarding import RecordForwarder
from holdfast.node.publish.leader_sync import LeaderSync
from holdfast.node.routing.qos0_routing import Qos0Routing
from holdfast.node.session.connection import CLOSED, Connection
from holdfast.node.session.session import Group
from holdfast.node.state.transfer import Transfer


def _is_coordinated(group: Group) -> bool:
    return group.coordination is not None


def _no_more() -> None:
    """Does nothing at the end of a hold: its group looks at it."""


class Feeds:
    """The feeds of a node, in both directions."""

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        log: ApplyingLog,
        applier: Applier,
        forwarding: RecordForwarder,
        interest: Qos0Routing,
    ) -> None:
        self._state = state
        self._context = context
        self._applier = applier
        self._log = log
        self._interest = interest
        self.server = FeedServer(
            state, context, log, lambda topic: interest.route(topic).nodes, interest.is_applying
        )
        self.receiver = FeedReceiver(state, context, applier, forwarding)
        self.holds = FilterHolds(state, interest, self.receiver)
        applier.fed = self.server.live
        applier.on_committed = self.server.applied
        interest.before_ack = self.server.send_marks
        # Called with a node that waits for commits of these partitions. PartEffects sets it.
        self.await_commits: Callable[[str, Iterable[int]], None] = lambda node, partitions: None
        interest.before_suback = self.holds.leave_laggards
        self.receiver.is_announced = interest.is_announced
        self.receiver.announced = lambda: interest.number

    def forwarded(self, node: str, partition: int, begin: int) -> None:
        """Notes that the records from the offset `begin` to the end of the log are of `node`, which
        waits for their commit."""
        self.server.forwarded(node, partition, begin)
        self.await_commits(node, (partition,))

    def hurry(self, node: str) -> None:
        """Sends the next marks and commits at once, up to the present log ends: the node waits for
        them."""
        self.server.hurry(node)
        self.await_commits(node, range(len(self._context.leading)))

    def needing(self, partition: int, begin: int, end: int) -> Collection[str] | None:
        """The nodes that need the commit of the records [begin, end) at once, because they deliver
        one of them. None: each node, because of the state or of shared groups."""
        nodes: set[str] = set()
        at = begin
        for batch in self._log.uncommitted[partition]:
            base = batch.base_offset
            if at >= batch.end_offset or at < base:
                continue
            heads = batch.heads()
            topics, _ = batch.topics()
            last = min(end, batch.end_offset)
            for index in range(at - base, last - base):
                kind, flags, _ = heads[index]
                if kind != log_record.MESSAGE or flags & log_record.STATE_FLAGS:
                    return None
                route = self._interest.route(topics[index].decode())
                if route.picks:
                    return None
                nodes.update(route.nodes)
            at = last
            if at == end:
                return nodes
        return None

    def connect(
        self, alignment: LeaderSync, acquisition: SessionAcquisition, transfer: Transfer
    ) -> None:
        """Connects the parts that are made later. The state of a partition that is fed is
        transferred at each start, because no disk here has it."""
        alignment.on_lost = self.receiver.lose
        self._acquisition = acquisition
        acquisition.holds_filters = self._hold_of_session
        self.receiver.may_ask = lambda partition: not transfer.lacks(partition)

    def announce_group(self, coordination: Coordination) -> None:
        """Announces the filter of a group that is coordinated here. Its records are assigned from
        the moment on when all feeds have it."""
        cursor = coordination.cursor
        hold = self.holds.hold([cursor.filter], _no_more, partial(_is_coordinated, cursor))
        coordination.has_filter = lambda: hold.is_over

    def connected(self, node: str) -> None:
        """Begins with a new link."""
        self.server.disconnected(node)
        self.receiver.connected(node)

    def disconnected(self, node: str) -> None:
        """Ends the feeds over a link that is lost."""
        self.server.disconnected(node)
        self.receiver.disconnected(node)

    def handle_frame(self, node: str, kind: int, payload: bytes) -> bool:
        """Takes a frame of feeds; False: it is none. Raises BadFrame when it is malformed."""
        if kind == kinds.FEED:
            self.receiver.handle_feed(node, payload)
        elif kind == kinds.FEED_FROM:
            self.server.handle_request(node, payload)
        elif kind == kinds.FEED_ACK:
            self.server.handle_ack(node, payload)
        elif kind == kinds.INTEREST_ACK:
            self.receiver.after(node, partial(self._interest.handle_ack, node, payload))
        else:
            return False
        return True

    def restored(self, partition: int) -> None:
        """Goes on from the offset of the replicated state that was received."""
        offset = self._applier.starts[partition]
        fed = self.receiver.partitions[partition]
        fed.marked, fed.generation = 0, self._context.generation
        self._applier.note_fed(partition, offset)
        self._state.delivered[partition] = offset

    def hold_filters(
        self, connection: Connection, filters: list[str], then: Callable[[], None]
    ) -> bool:
        """Announces the filters of a SUBSCRIBE. True: `then` continues it."""
        if not self._context.unstored:
            return False

        def is_needed() -> bool:
            session = connection.session
            return (
                connection.state != CLOSED
                and session is not None
                and (connection.is_subscribing or session.subscribes_awaited > 0)
            )

        return not self.holds.hold(filters, then, is_needed).is_over

    def _hold_of_session(self, asking: PendingOpen, filters: list[str]) -> bool:
        """Announces the filters of a session that is resumed. True: it has to wait."""
        if asking.hold is None:
            waiting, number = self._acquisition.asking, asking.number
            asking.hold = self.holds.hold(
                filters, self._acquisition.applied, lambda: number in waiting
            )
        return not asking.hold.is_over

    def flush(self) -> None:
        """Sends what has gathered, at the end of a turn. The filters have left before."""
        self.holds.advance()
        self.receiver.flush()

    def timer(self) -> float:
        marks_at = self.server.timer()
        holds_at = self.holds.timer()
        return marks_at if holds_at is None else min(marks_at, holds_at)

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two turns."""
        self.server.check()
        self.receiver.check()
