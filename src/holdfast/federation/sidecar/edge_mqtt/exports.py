"""What the broker sends us for the federation: each publication once, acknowledged in order.

- Acknowledged is only what the federator is done with. What it is done with while there is no
  connection is not given to it again when the broker repeats it, as long as the session lasts.
- A copy is not a publication: while subscriptions overlap, because one is about to replace another,
  a broker may send one for each. Then consecutive packets of equal content are one publication if
  each came by another subscription. `fence` parts what was published before a moment from what was
  published after it, so that equal ones are told apart.
- A retained message that is replayed is no publication.
- While nobody can know who wants what (`hold`), nothing is given on.

Pure.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from holdfast.client.protocol.effects import Message as Received
from holdfast.federation.core.effects import Message
from holdfast.federation.core.routing.interest import may_leave
from holdfast.federation.sidecar.edge_mqtt.loop_marker import is_marked, outbound
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.topics.trie import SubscriptionTrie

HELD_UNACKNOWLEDGED_MAX: Final = 10_000
"""Messages of QoS 0 that wait while everything is held; more are dropped."""

Publish = Callable[[Message, Callable[[], None]], None]


class Replays(Enum):
    """How retained messages come that were stored before the subscription."""

    NONE = "none"
    """MQTT 5: we subscribe so that they do not."""
    FLAGGED = "flagged"
    """MQTT 3: with the retain flag, which nothing else has."""
    AT_FIRST = "at first"
    """MQTT 3, as a bridge: with the retain flag, which new ones have, too, but before them."""


@dataclass(slots=True, eq=False)
class UnacknowledgedExport:
    """Received with QoS 1 or 2, and not acknowledged."""

    message: Received
    is_done: bool = False


class Exports:
    def __init__(
        self, publish: Publish, acknowledge: Callable[[Received], bool], replays: Replays
    ) -> None:
        """`acknowledge` is called for the messages of a connection in their order. False: that
        connection is gone."""
        self._publish = publish
        self._acknowledge = acknowledge
        self.replays = replays
        self.counts: Counter[str] = Counter()
        """Messages, by what became of them."""
        self.is_changing = False
        """Subscriptions may overlap."""
        self.is_settling = False
        """Replayed retained messages may come (`Replays.AT_FIRST`)."""
        self._allowed = SubscriptionTrie()
        # By packet id, over connections; and in order of arrival on this one.
        self._pending: dict[int, UnacknowledgedExport] = {}
        self._queue: deque[UnacknowledgedExport] = deque()
        self._connection = 0
        self._last: Received | None = None
        self._last_ids: set[int] = set()
        # Not looked at yet; None: nothing is held.
        self._held: deque[Received] | None = None

    def __len__(self) -> int:
        return len(self._pending)

    def allow(self, filters: frozenset[str]) -> None:
        """What may leave, and is wanted; the subscriptions may be wider."""
        self._allowed = SubscriptionTrie()
        for filter in filters:
            self._allowed.add(filter, None, True)

    def forget_session(self) -> None:
        """The broker has no session of ours any more: it repeats nothing."""
        self._pending.clear()
        self._queue.clear()

    def new_client(self) -> None:
        """Its connections are counted from 1 again."""
        self._connection = 0

    def hold(self) -> None:
        """Until `release`; the broker's window closes meanwhile."""
        if self._held is None:
            self._held = deque()

    def release(self) -> None:
        held, self._held = self._held, None
        for received in held or ():
            self.take(received)

    def fence(self) -> None:
        self._last = None

    def take(self, received: Received) -> None:
        if received.connection != self._connection:
            self._connection = received.connection
            self._queue.clear()
            self._last = None
            if self._held is not None:
                # They come again.
                self._held = deque(one for one in self._held if not one.qos)
        if self._held is not None:
            if received.qos or len(self._held) < HELD_UNACKNOWLEDGED_MAX:
                self._held.append(received)
            else:
                self.counts["no room"] += 1
            return
        if not received.qos:
            if self._reason_against(received) is None:
                self._publish(outbound(received), _nothing)
            return
        pending = self._pending.get(received.packet_id)
        if pending is not None and received.dup and _is_same(pending.message, received):
            pending.message = received
            self._queue.append(pending)
            self.counts["repeated"] += 1
            self._acknowledge_done()
            return
        pending = UnacknowledgedExport(received)
        self._pending[received.packet_id] = pending
        self._queue.append(pending)
        if self._reason_against(received) is None:
            self._publish(outbound(received), lambda: self._done(pending))
        else:
            self._done(pending)

    def _done(self, pending: UnacknowledgedExport) -> None:
        pending.is_done = True
        self._acknowledge_done()

    def _acknowledge_done(self) -> None:
        queue = self._queue
        while queue and queue[0].is_done:
            pending = queue.popleft()
            if self._pending.get(pending.message.packet_id) is pending:
                if not self._acknowledge(pending.message):
                    queue.clear()
                    return
                del self._pending[pending.message.packet_id]

    def _reason_against(self, received: Received) -> str | None:
        reason = self._reason(received)
        self.counts[reason or "exported"] += 1
        return reason

    def _reason(self, received: Received) -> str | None:
        if not may_leave(received.topic):
            return "not federated"
        if is_marked(received):
            return "echo"
        if received.retain and (
            self.replays is Replays.FLAGGED
            or (self.replays is Replays.AT_FIRST and self.is_settling)
        ):
            return "retained replay"
        if not self._allowed.match(received.topic):
            return "not wanted"
        if self.is_changing and self._is_copy(received):
            return "copy"
        return None

    def _is_copy(self, received: Received) -> bool:
        ids = received.properties.get(pr.SUBSCRIPTION_IDENTIFIER)
        numbers = {one for one in ids if isinstance(one, int)} if isinstance(ids, list) else set()
        if (
            self._last is not None
            and numbers
            and not numbers & self._last_ids
            and _is_same(self._last, received)
        ):
            self._last_ids |= numbers
            return True
        self._last = received
        self._last_ids = numbers
        return False


def _is_same(one: Received, other: Received) -> bool:
    """Equal content, as two copies or a repetition have it."""
    return (
        one.topic == other.topic
        and one.payload == other.payload
        and one.qos == other.qos
        and one.retain == other.retain
        and _journey(one) == _journey(other)
    )


def _journey(received: Received) -> pr.Properties:
    """The properties but those that differ between copies."""
    return {
        name: value
        for name, value in received.properties.items()
        if name not in (pr.SUBSCRIPTION_IDENTIFIER, pr.TOPIC_ALIAS, pr.MESSAGE_EXPIRY_INTERVAL)
    }


def _nothing() -> None:
    pass
