"""Creates a queue by SUBSCRIBE, and deletes it for an operator.

The record of a queue says where it begins, and counts only if there is none with its key. So two
nodes may begin the same queue at once: the first record in its home partition counts everywhere.
"""

from collections.abc import Callable
from operator import lt

from holdfast.node.delivery.replay import StartPlan
from holdfast.node.features import QUEUES
from holdfast.node.node_state import CallbackPromise, NodeState, Promise
from holdfast.node.rights import proves_names
from holdfast.node.session.connection import Connection
from holdfast.node.session.session import Session, Subscription
from holdfast.node.state.session_records import EndRecord, QueueRecord
from holdfast.node.state.state_records import (
    append_change,
)
from holdfast.protocol.topics.names import is_queue


class QueuePromise(Promise):
    """The promise of a queue whose record is on its way to the log. Its SUBSCRIBE waits behind it.

    The replicated state has the queue when the promise is released.
    """

    def __init__(self, connection: Connection, key: str, creator: str, is_new: bool) -> None:
        """`is_new`: this node knew no such queue."""
        super().__init__(connection)
        self.key = key
        self.creator = creator
        self.is_new = is_new

    def release(self, state: NodeState) -> None:
        if self.is_new:
            state.note("info", "queue_created", {"queue": self.key, "client": self.creator})


def create_queue(
    state: NodeState, connection: Connection, key: str, start: list[int], creator: str
) -> None:
    """Begins a queue at these offsets, unless there is one. The caller promises the rest of the
    SUBSCRIBE after it.

    The record is appended also if this node has the queue, because its home partition decides.
    Counter-example: an operator has deleted the queue, and this node has not applied that. The
    client receives SUBACK, there is no queue, and what comes while the client is away is lost.
    """
    owner = None if connection.session is None else connection.session.username
    is_known = key in state.recorded.queues
    if is_known and state.cluster.older_nodes(QUEUES):
        return
    is_past = any(map(lt, start, state.delivered))
    promise = QueuePromise(connection, key, creator, not is_known)
    change = QueueRecord(key, start, creator, owner or "", is_past)
    append_change(state, key.encode(), change, promise=promise)


def begin_queues(
    state: NodeState,
    connection: Connection,
    session: Session,
    accepted: list[Subscription],
    plan: StartPlan,
) -> None:
    """Begins the accepted queues that do not exist."""
    starts: dict[str, list[int]] = {}
    for request, granted in zip(plan.packet.subscriptions, plan.granted, strict=True):
        if granted is not None:
            starts[request.filter] = granted.start
    for key in {each.filter: None for each in accepted if is_queue(each.filter)}:
        start = starts.get(key) or list(state.delivered)
        create_queue(state, connection, key, start, session.client_id)


def needs_history(state: NodeState, filter: str) -> bool:
    """Whether the filter is that of a queue that began in the past, as far as this node has applied
    the log. A SUBSCRIBE asks again when its own record of the queue is applied."""
    keeper = state.recorded.queues.get(filter)
    return keeper is not None and keeper.is_past


class QueueRoom:
    """The queues that one SUBSCRIBE may begin, within `limits.queues` and the share of its user."""

    def __init__(self, state: NodeState, session: Session) -> None:
        self._state = state
        self._session = session
        self._begun = 0
        # Counted once, because a packet may have thousands of filters; -1: not counted.
        self._own = -1

    def has(self, filter: str, plan: StartPlan | None) -> bool:
        """Whether the filter is not that of a queue, or there is one, or there is room for it. A
        new one is counted."""
        if not is_queue(filter):
            return True
        state = self._state
        queues = state.recorded.queues
        if filter in queues:
            return True
        most = state.config.queues_max
        left = most - len(queues) - self._begun
        text = state.cluster.older_nodes(QUEUES)
        if not text and left <= 0:
            text = f"there are {most} queues, which is the limit"
        if not text and proves_names(state):
            user = self._session.username
            if self._own < 0:
                self._own = sum(each.username == user for each in queues.values())
            # Nobody may have more than is left for the others: only an operator ends a queue.
            if self._own + self._begun >= left:
                text = "this user has as many queues as there is room for all others"
        if not text:
            self._begun += 1
        elif plan is not None:
            plan.error = plan.error or text
        return not text


def delete_queue(state: NodeState, key: str, done: Callable[[str], None]) -> None:
    """Ends a queue. Its group ends with it, or with the group's last member."""
    append_change(state, key.encode(), EndRecord(key), promise=CallbackPromise(done))
    state.note("info", "queue_deleted", {"queue": key})
