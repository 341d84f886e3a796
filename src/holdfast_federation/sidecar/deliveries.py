"""Queues messages from the federation to the broker.

- The edge receives messages in the order in which the member delivered them. When it comes up
  again, it receives all unfinished ones again, from the first.
- The position of an origin is that of its first unfinished message. A message that finishes before
  an older one therefore moves nothing. Otherwise a crash would lose the older one: its origin would
  not send it again.
- The windows of the origins bound the queue, because no message in it is confirmed.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from holdfast_federation.core.effects import DeliverLocally
from holdfast_federation.core.identity import MessageId
from holdfast_federation.core.messages.streams import Position
from holdfast_federation.sidecar.edge import Edge

Pass = Callable[[bytes, Position, list[MessageId]], None]
"""A callback with an origin, its new position, and the ids of the messages below it."""


@dataclass(slots=True, eq=False)
class _Delivery:
    effect: DeliverLocally
    accepted_at: float
    is_done: bool = False


class Deliveries:
    """Gives deliveries to the edge and advances the positions of their origins."""

    def __init__(self, edge: Edge, passed: Pass, counts: Counter[str]) -> None:
        """`counts`: receives the messages that the edge did not get, by reason."""
        self._edge = edge
        self._passed = passed
        self._counts = counts
        self._is_up = False
        # Counts the times that the edge came up. A late `done` of an earlier time is ignored: the
        # message has been given to the edge again.
        self._generation = 0
        self._waiting: dict[MessageId, _Delivery] = {}
        self._origins: dict[bytes, deque[_Delivery]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_up(self) -> bool:
        return self._is_up

    def accept(self, effect: DeliverLocally, now: float) -> None:
        """Accepts a delivery. QoS 0 is dropped while the edge is down; other messages wait for
        it."""
        if not effect.message.qos:
            if self._is_up:
                self._edge.deliver(effect, _do_nothing)
            else:
                self._counts["edge down"] += 1
            return
        delivery = _Delivery(effect, now)
        self._waiting[effect.id] = delivery
        self._origins.setdefault(effect.id.node, deque()).append(delivery)
        if self._is_up:
            self._deliver(delivery, now)

    def up(self, now: float) -> None:
        """Gives all unfinished deliveries to the edge, in order."""
        self._is_up = True
        self._generation += 1
        generation = self._generation
        for delivery in list(self._waiting.values()):
            # The edge may go down in the middle of this loop.
            if generation == self._generation and self._is_up and not delivery.is_done:
                self._deliver(delivery, now)

    def down(self) -> None:
        """Stops giving deliveries to the edge. They stay in the queue, unfinished."""
        self._is_up = False

    def _deliver(self, delivery: _Delivery, now: float) -> None:
        effect = delivery.effect
        expiry_s = effect.message.expiry_s
        if expiry_s is not None:
            left_s = expiry_s - (now - delivery.accepted_at)
            if left_s <= 0:
                self._counts["expired"] += 1
                self._done(delivery)
                return
            effect = replace(effect, message=replace(effect.message, expiry_s=left_s))
        generation = self._generation

        def done() -> None:
            if self._is_up and generation == self._generation and not delivery.is_done:
                self._done(delivery)

        self._edge.deliver(effect, done)

    def _done(self, delivery: _Delivery) -> None:
        delivery.is_done = True
        origin = delivery.effect.id.node
        queue = self._origins[origin]
        # By epoch: the messages, and the place behind the last of them.
        passed: dict[int, tuple[int, list[MessageId]]] = {}
        while queue and queue[0].is_done:
            effect = queue.popleft().effect
            del self._waiting[effect.id]
            _, ids = passed.get(effect.id.epoch, (0, []))
            passed[effect.id.epoch] = effect.place + 1, [*ids, effect.id]
        if not queue:
            del self._origins[origin]
        for epoch, (place, ids) in passed.items():
            self._passed(origin, (epoch, place), ids)


def _do_nothing() -> None:
    pass
