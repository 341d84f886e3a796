"""Takes messages from the broker to the federation, each once and acknowledged in order. Pure.

- Only messages that the federator is done with are acknowledged. A message may become done while
  there is no connection. When the broker repeats it, the message is not exported again, as long as
  the session lasts.
- Copies are exported once. While an old and a new subscription overlap, a broker may send one copy
  for each. Consecutive packets with equal content are copies if each came by another subscription.
  `fence` separates messages published before and after a moment, so that two equal publications are
  not taken for copies.
- A replayed retained message is not a publication.
- While the filters of other members are unknown (`suspend`), nothing is exported.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from holdfast.client.protocol.effects import Message as Received
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.topics.trie import SubscriptionTrie
from holdfast_federation.core.effects import Message
from holdfast_federation.core.routing.interest import may_leave
from holdfast_federation.sidecar.edge_mqtt.loop_marker import is_marked, outbound

HELD_UNACKNOWLEDGED_MAX: Final = 10_000
"""The most messages of QoS 0 that wait while exports are held. Further ones are dropped."""

Publish = Callable[[Message, Callable[[], None]], None]


class Replays(Enum):
    """The way in which a subscription receives messages retained before it."""

    NONE = "none"
    """MQTT 5: not at all, because the subscription asks for that."""
    FLAGGED = "flagged"
    """MQTT 3: with the retain flag, which no other message has."""
    AT_FIRST = "at first"
    """MQTT 3, as a bridge: with the retain flag and before all new messages, which may have it
    too."""


@dataclass(slots=True, eq=False)
class UnacknowledgedExport:
    """A received message of QoS 1 or 2 that is not acknowledged."""

    message: Received
    is_done: bool = False


class Exports:
    """Filters received messages, hands them to the federator, and acknowledges them."""

    def __init__(
        self, publish: Publish, acknowledge: Callable[[Received], bool], replays: Replays
    ) -> None:
        """`acknowledge`: called for the messages of one connection in their order of arrival;
        returns False if that connection has ended."""
        self._publish = publish
        self._acknowledge = acknowledge
        self.replays = replays
        self.counts: Counter[str] = Counter()
        """Messages by result."""
        self.is_changing = False
        """Whether subscriptions may overlap, so that copies are possible."""
        self.is_settling = False
        """Whether replayed retained messages may arrive (`Replays.AT_FIRST`)."""
        self._allowed = SubscriptionTrie()
        # By packet id, across connections; then in order of arrival on the current connection.
        self._pending: dict[int, UnacknowledgedExport] = {}
        self._queue: deque[UnacknowledgedExport] = deque()
        self._connection = 0
        self._last: Received | None = None
        self._last_ids: set[int] = set()
        # Messages not examined yet, or None if exports are not held.
        self._waiting: deque[Received] | None = None

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def held(self) -> int:
        """The number of messages that wait for `resume`."""
        return len(self._waiting or ())

    def allow(self, filters: frozenset[str]) -> None:
        """Replaces the filters that may be exported. The subscriptions may be wider."""
        self._allowed = SubscriptionTrie()
        for filter in filters:
            self._allowed.add(filter, None, True)

    def forget_session(self) -> None:
        """Forgets unacknowledged messages: the broker has lost the session and will not repeat
        them."""
        self._pending.clear()
        self._queue.clear()

    def new_client(self) -> None:
        """Prepares for a new client, which counts its connections from 1 again."""
        self._connection = 0

    def suspend(self) -> None:
        """Exports nothing until `resume`. Meanwhile the broker's window fills up."""
        if self._waiting is None:
            self._waiting = deque()

    def resume(self) -> None:
        """Exports the held messages in their order of arrival."""
        held, self._waiting = self._waiting, None
        for received in held or ():
            self.handle(received)

    def fence(self) -> None:
        """Separates earlier from later messages: a later one is no copy of an earlier one."""
        self._last = None

    def handle(self, received: Received) -> None:
        """Processes a received message. A repetition on a new connection is not exported."""
        if received.connection != self._connection:
            self._connection = received.connection
            self._queue.clear()
            self._last = None
            if self._waiting is not None:
                # The broker repeats these on the new connection.
                self._waiting = deque(one for one in self._waiting if not one.qos)
        if self._waiting is not None:
            if received.qos or len(self._waiting) < HELD_UNACKNOWLEDGED_MAX:
                self._waiting.append(received)
            else:
                self.counts["no room"] += 1
            return
        if not received.qos:
            if self._reason_against(received) is None:
                self._publish(outbound(received), _do_nothing)
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
        """Acknowledges finished messages in their order of arrival (MQTT 5, section 4.6)."""
        queue = self._queue
        while queue and queue[0].is_done:
            pending = queue.popleft()
            if self._pending.get(pending.message.packet_id) is pending:
                # Otherwise a newer message has the packet id, and its acknowledgement is not due.
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
        """Returns whether the message is a further copy of the last one.

        The subscription identifiers must differ: two equal messages through the same subscription
        are two publications.
        """
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
    """Returns whether two messages have equal content, as copies and repetitions do."""
    return (
        one.topic == other.topic
        and one.payload == other.payload
        and one.qos == other.qos
        and one.retain == other.retain
        and _journey(one) == _journey(other)
    )


def _journey(received: Received) -> pr.Properties:
    """Returns the properties without those that differ between copies."""
    return {
        name: value
        for name, value in received.properties.items()
        if name not in (pr.SUBSCRIPTION_IDENTIFIER, pr.TOPIC_ALIAS, pr.MESSAGE_EXPIRY_INTERVAL)
    }


def _do_nothing() -> None:
    pass
