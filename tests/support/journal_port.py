"""The port of a node whose parts a test drives without a cluster node around them."""

from collections import deque
from collections.abc import Callable

from holdfast.log.journal.journal import Journal
from holdfast.log.record import Record
from holdfast.node.config import NodeConfig
from holdfast.node.node_state import ClusterPort, GroupPort, NodeState, Promise
from holdfast.node.session.connection import Connection
from holdfast.node.session.message import Message
from holdfast.node.session.session import Group, Inflight, Session, Subscription


class NoGroups(GroupPort):
    """No group has a coordinator."""

    def changed(self, group: Group) -> None:
        pass

    def finished(self, group: Group, partition: int, offset: int) -> None:
        pass

    def received(self, group: Group, entry: Inflight) -> None:
        pass

    def move_record(self, group: Group, session: Session, entry: Inflight) -> None:
        pass


class JournalPort(ClusterPort):
    """Records go into the node's own journal. Promises wait in `promises` for the test."""

    def __init__(self, state: NodeState) -> None:
        self.state = state
        self.groups = NoGroups()
        self.promises: deque[Promise] = deque()

    def append(self, record: Record) -> None:
        self.state.journal.append(record)

    def publish(self, record: Record, promise: Promise) -> None:
        self.state.journal.append(record)
        self.promises.append(promise)

    def promise(self, promise: Promise) -> None:
        self.promises.append(promise)

    def release(self) -> None:
        """Keep every promise, because all records are committed."""
        while self.promises:
            self.promises.popleft().release(self.state)

    def promise_interest(self, promise: Promise) -> None:
        promise.release(self.state)

    def hold_filters(
        self, connection: Connection, filters: list[str], then: Callable[[], None]
    ) -> bool:
        return False

    def is_congested(self, part: int) -> bool:
        return False

    def spread(self, message: Message, topic: str, behind: int) -> None:
        pass

    def has_groups(self) -> bool:
        return True

    def request_retained(self, subscriptions: list[Subscription]) -> None:
        pass

    def is_retained_behind(self, topic: str, subscription: Subscription) -> bool:
        return False

    def session_detached(self, session: Session) -> None:
        pass

    def count_filter(self, filter: str, more: int) -> None:
        pass


def new_state(config: NodeConfig, journal: Journal) -> NodeState:
    """The state of a node with a `JournalPort`."""
    state = NodeState(config, journal)
    state.cluster = JournalPort(state)
    state.recorded = state
    return state


def release_promises(state: NodeState) -> None:
    """Keep every promise of a `JournalPort`."""
    port = state.cluster
    assert isinstance(port, JournalPort)
    port.release()
