"""Promises to clients, kept in order.

A promise waits for records, and behind what was promised to the same connection before. Other
connections do not wait: a partition without a leader holds back only those who wrote to it.
"""

from collections import deque

from holdfast.broker.state import Held, NodeState


class Promise:
    """`waiting`: for how many records. `reason` from 0x80 on: refused, with `text`."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self.waiting = 0
        self.reason = 0
        self.text = ""

    def refuse(self, reason: int, text: str) -> None:
        """Or, below 0x80, release it as if what it waits for were committed."""
        connection = self.held.connection
        if reason >= 0x80 > self.reason and connection is not None:
            connection.refusals_due += 1
        self.reason = reason
        self.text = text

    def keep(self, state: NodeState) -> None:
        if self.reason >= 0x80:
            if self.held.connection is not None:
                self.held.connection.refusals_due -= 1
            self.held.refuse(state, self.reason, self.text)
        else:
            self.held.release(state)


def enqueue(state: NodeState, promise: Promise) -> None:
    """Put it behind what its connection waits for, and keep what can be kept."""
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
    """One of the records that the promise waits for is committed, or refused."""
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
