"""Resolves the promises to clients, in order per connection.

A promise waits for its record, and for the earlier promises of the same connection. MQTT requires
acknowledgements in the order of the PUBLISH packets (MQTT 5.0, section 4.6). Other connections do
not wait: a partition without a leader delays only the clients that publish to it.
"""

from collections import deque

from holdfast.node.node_state import NodeState, Promise
from holdfast.node.refusal import Rejection
from holdfast.node.session.connection import Connection


class PromiseQueues:
    """The promises that wait, in one queue for each connection.

    Invariant: the first promise of a queue has `waiting` above 0. While it is resolved, the queue
    may be empty, and the promise may add others.
    """

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._queues: dict[Connection, deque[Promise]] = {}

    def add(self, promise: Promise) -> None:
        """Queues the promise behind those of its connection, or resolves it at once if nothing is
        before it and it has no condition."""
        if not self._queues and not promise.waiting:
            self._resolve(promise)
            return
        connection = promise.connection
        queue = None if connection is None else self._queues.get(connection)
        if not queue and not promise.waiting:
            self._resolve(promise)
        elif queue is not None:
            queue.append(promise)
        elif connection is not None:
            self._queues[connection] = deque((promise,))

    def refuse(self, promise: Promise, refusal: Rejection) -> None:
        """Marks the promise as refused."""
        if promise.refusal is None and promise.connection is not None:
            promise.connection.refusals_due += 1
        promise.refusal = refusal

    def settle(self, promise: Promise) -> None:
        """Counts one condition of the promise as met, and resolves the promises of its connection
        that are due."""
        promise.waiting -= 1
        assert promise.waiting >= 0, "a condition is met twice"
        if promise.waiting:
            return
        connection = promise.connection
        if connection is None:
            self._resolve(promise)
            return
        queue = self._queues.get(connection)
        if queue is None or queue[0] is not promise:
            return
        while queue and not queue[0].waiting:
            self._resolve(queue.popleft())
        if not queue and self._queues.get(connection) is queue:
            del self._queues[connection]

    def check(self) -> None:
        """Raises `AssertionError` for a queue whose first promise waits for nothing."""
        for connection, queue in self._queues.items():
            assert queue, "an empty queue"
            assert queue[0].waiting > 0, "the first promise waits for nothing"
            refused = sum(promise.refusal is not None for promise in queue)
            assert refused <= connection.refusals_due, "refusals that are not counted"
            assert all(promise.connection is connection for promise in queue), "another's promise"

    def _resolve(self, promise: Promise) -> None:
        try:
            refusal = promise.refusal
            if refusal is None:
                promise.release(self._state)
                return
            if promise.connection is not None:
                promise.connection.refusals_due -= 1
                assert promise.connection.refusals_due >= 0, "a refusal is sent twice"
            promise.refuse(self._state, refusal)
        except AssertionError as error:
            self._state.stop_promise(promise, error)
