"""Requests for sessions, as the client's node and the coordinator keep them."""

from collections import deque
from collections.abc import Callable
from typing import Final

from msgspec import UNSET

from holdfast.node.connections.accepted_connect import AcceptedConnect
from holdfast.node.context import NEVER
from holdfast.node.feeds.filter_holds import FilterHold
from holdfast.node.frames import OpenedFrame, OpenFrame
from holdfast.node.session.connection import Connection

NOTHING: Final = -1
STALE_MAX: Final = 100


class PendingOpen:
    """A CONNECT that waits for its session."""

    def __init__(
        self,
        number: int,
        connection: Connection,
        client_id: str,
        home: int,
        opening: AcceptedConnect,
    ) -> None:
        self.number = number
        self.connection = connection
        self.client_id = client_id
        self.home = home
        self.opening = opening
        # When to send SESSION_OPEN, first or again, and when to look at the entry next.
        self.send_at = 0.0
        self.wake_at = NEVER
        self.refused_at = 0.0
        # True once SESSION_OPEN was sent. A reply follows, and a session to close if the client has
        # disconnected.
        self.is_sent = False
        # The SESSION_OPENED, or None before the reply. `epoch` may grow with a second reply.
        self.reply: OpenedFrame | None = None
        # The read barrier that must be passed first. NOTHING: none.
        self.barrier = NOTHING
        # The announcement of the session's filters, at a node that is fed.
        self.hold: FilterHold | None = None

    @property
    def is_recorded(self) -> bool:
        """True if a record names this node as owner of the session. It is valid only after the
        reply."""
        assert self.reply is not None
        return self.reply.present or self.opening.expiry_s > 0 or self.opening.will is not None


class SessionRequest:
    """The request of one node for one session, decoded from SESSION_OPEN."""

    def __init__(self, node: str, frame: OpenFrame) -> None:
        self.node = node
        self.number = frame.request
        self.client_id = frame.client
        self.clean_start = frame.clean
        self.expiry_s = frame.expiry_s
        self.username = frame.username
        # The authenticated user, or "" for none. None: the node does not report it, because it is
        # older or cannot authenticate users.
        self.user: str | None = None
        if frame.user is not UNSET:
            self.user = frame.user or ""
        self.will = None if frame.will is None else frame.will.will()
        self.filters = frame.filters
        # The time until which the request waits for the previous owner, `waits_for`.
        self.deadline = 0.0
        self.waits_for = ""
        # True while its `open` record is appended and not committed.
        self.is_opening = False
        # True if its node does not know it: another process runs there.
        self.is_orphan = False
        # The newest event of `owners.Owners` when it came.
        self.came_after = 0

    @property
    def recorded(self) -> bool:
        """True if the session needs an `open` record: it outlives its connection, or has a will."""
        return self.expiry_s > 0 or self.will is not None


class SessionRequests:
    """The requests of all nodes for the sessions of one coordinator, in order per client.

    The first request of a client is being served, and the others wait for it.
    """

    def __init__(self, partitions: int, home: Callable[[str], int]) -> None:
        self._home = home
        # Per home partition. No queue is empty.
        self._queues: list[dict[str, deque[SessionRequest]]] = [{} for _ in range(partitions)]
        # The requests that wait for an owner, by deadline. Those that do not any more, or have a
        # later deadline, are among them.
        self._waiting: deque[tuple[float, SessionRequest]] = deque()

    def _of(self, client_id: str) -> "dict[str, deque[SessionRequest]]":
        return self._queues[self._home(client_id)]

    def first(self, client_id: str) -> SessionRequest | None:
        queue = self._of(client_id).get(client_id)
        return None if queue is None else queue[0]

    def firsts(self) -> list[SessionRequest]:
        """Returns the request of each client that is being served."""
        return [queue[0] for queues in self._queues for queue in queues.values()]

    def wait(self, request: SessionRequest, deadline: float) -> None:
        """Lets the request wait for the owner until the deadline. Each deadline is later than the
        one before."""
        request.deadline = deadline
        self._waiting.append((deadline, request))

    def _is_waiting(self, deadline: float, request: SessionRequest) -> bool:
        is_served = self.first(request.client_id) is request
        return is_served and request.waits_for != "" and request.deadline == deadline

    def timer(self) -> float:
        """Returns the earliest deadline of the requests that wait for an owner. It may be too
        early: at most STALE_MAX entries that do not count any more are removed at once."""
        waiting = self._waiting
        for _ in range(STALE_MAX):
            if not waiting or self._is_waiting(*waiting[0]):
                break
            waiting.popleft()
        return waiting[0][0] if waiting else NEVER

    def pop_waiting(self) -> SessionRequest | None:
        """Removes the entry with that deadline. Returns its request if it still waits."""
        deadline, request = self._waiting.popleft()
        return request if self._is_waiting(deadline, request) else None

    def find(self, request: SessionRequest) -> SessionRequest | None:
        """Returns the queued request that `request` repeats or withdraws."""
        for each in self._of(request.client_id).get(request.client_id, ()):
            if each.node == request.node and each.number == request.number:
                return each
        return None

    def of_node(self, node: str, home: int) -> list[SessionRequest]:
        queues = self._queues[home].values()
        return [each for queue in queues for each in queue if each.node == node]

    def add(self, request: SessionRequest) -> bool:
        """Queues a request. Returns True if it is the only one of its client."""
        queue = self._of(request.client_id).setdefault(request.client_id, deque())
        queue.append(request)
        return len(queue) == 1

    def remove_waiting(self, request: SessionRequest) -> None:
        """Removes a request that is not being served, if it is queued."""
        queue = self._of(request.client_id).get(request.client_id)
        if queue is not None and queue[0] is not request and request in queue:
            queue.remove(request)

    def remove_first(self, request: SessionRequest) -> SessionRequest | None:
        """Removes a request if it is being served. Returns the next one of the client."""
        queues = self._of(request.client_id)
        queue = queues.get(request.client_id)
        if queue is None or queue[0] is not request:
            return None
        queue.popleft()
        if queue:
            return queue[0]
        del queues[request.client_id]
        return None

    def stop_leading(self, partition: int) -> None:
        """Drops the requests of the clients with this home partition."""
        self._queues[partition] = {}
