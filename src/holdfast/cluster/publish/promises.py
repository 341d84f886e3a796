"""The promises to clients, resolved in order per connection.

A promise waits for its records, and for the earlier promises of the same connection. MQTT requires
acknowledgements in the order of the PUBLISH packets (MQTT 5.0, section 4.6). Other connections do
not wait: a partition without a leader delays only the clients that publish to it.
"""

from collections import deque

from holdfast.broker.state import Held, NodeState


class Promise:
    """An acknowledgement or delivery that waits for commits.

    `waiting`: the number of records it still waits for. `reason` from 0x80 on: it is refused, with
    `text`.
    """

    def __init__(self, held: Held) -> None:
        self.held = held
        self.waiting = 0
        self.reason = 0
        self.text = ""

    def refuse(self, reason: int, text: str) -> None:
        """Marks the promise as refused. With a reason below 0x80 it is released as if committed."""
        connection = self.held.connection
        if reason >= 0x80 > self.reason and connection is not None:
            connection.refusals_due += 1
        self.reason = reason
        self.text = text

    def keep(self, state: NodeState) -> None:
        """Releases or refuses what was promised."""
        if self.reason >= 0x80:
            if self.held.connection is not None:
                self.held.connection.refusals_due -= 1
            self.held.refuse(state, self.reason, self.text)
        else:
            self.held.release(state)


def enqueue(state: NodeState, promise: Promise) -> None:
    """Queues the promise behind those of its connection, or resolves it at once if none is before
    it."""
    connection = promise.held.connection
    if connection is None:
        if not promise.waiting:
            promise.keep(state)
        return
    queue: deque[Promise] | None = connection.promises
    if queue is None:
        if not promise.waiting:
            promise.keep(state)
            return
        queue = deque()
        connection.promises = queue
    elif not queue and not promise.waiting:
        promise.keep(state)
        return
    queue.append(promise)


def settled(state: NodeState, promise: Promise) -> None:
    """Counts one condition of the promise as met, and resolves the promises of its connection that
    are due."""
    promise.waiting -= 1
    if promise.waiting:
        return
    connection = promise.held.connection
    if connection is None:
        promise.keep(state)
        return
    queue: deque[Promise] | None = connection.promises
    if queue is None or queue[0] is not promise:
        return
    while queue and not queue[0].waiting:
        queue.popleft().keep(state)
