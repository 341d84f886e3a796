"""Tracks retained updates of QoS 0 that were delivered here before their commit.

A QoS 0 message with RETAIN is delivered at once on every node. It enters the retained store of
every node when its record is committed. A client that subscribes in between would receive neither:
it was not subscribed at the delivery, and the store still has the previous message. So its
subscription is noted, and the message is sent to it as retained once its record is applied.

The retained stores themselves follow only committed records and are equal on all nodes. Everything
here is bounded and best effort, as QoS 0 is. Above the bounds a new subscriber receives the message
that is retained at that time. The same holds when the record does not arrive within UPDATE_S.

Invariant: the retained set of a SUBSCRIBE has each topic. A topic whose update is noted is left out
of the scan (`is_behind`), and sent when the update's record is applied or overdue.
"""

from collections import OrderedDict
from typing import Final
from zlib import crc32

from holdfast.log.record import Record
from holdfast.node.delivery.retained import send_retained
from holdfast.node.node_state import NodeState
from holdfast.node.session.message import Message
from holdfast.node.session.session import Subscription
from holdfast.protocol.topics.retained import RetainedTrie

UPDATE_S: Final = 5.0
"""The longest time in seconds that an update waits for its record."""
UPDATES_MAX: Final = 1000
"""The most topics with an update that waits for its record."""
SUBSCRIPTIONS_MAX: Final = 1000
"""The most subscriptions that wait for one update."""
VISITS_MAX: Final = 1000
"""The most topics that are visited for the filters of one SUBSCRIBE."""
PAGE: Final = 50


def is_in_store(state: NodeState, message: Message, topic: str) -> bool:
    """Whether the store has a QoS 0 message with RETAIN that is delivered now. That is so if it
    followed another record of its topic: its own is applied."""
    found = state.retained.get(topic)
    if found is None:
        return False
    return found.timestamp_us == message.timestamp_us and found.payload == message.payload


class Update:
    """A delivered QoS 0 message with RETAIN whose record is not applied yet."""

    def __init__(self, message: Message, until: float) -> None:
        self.publisher = message.publisher
        self.digest = crc32(message.payload)
        self.until = until
        # Whether each has received nothing for the topic in the place of the update.
        self.subscriptions: dict[Subscription, bool] = {}


class RetainedUpdates:
    """The updates that wait for their records, and the subscriptions that wait for each."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        # By topic, ordered by delivery; the newest is the last.
        self._updates: OrderedDict[str, Update] = OrderedDict()
        self._topics: RetainedTrie[Update] = RetainedTrie()

    def __len__(self) -> int:
        """Returns the number of updates that wait for their records."""
        return len(self._updates)

    def delivered(self, topic: str, message: Message) -> None:
        """Notes an update that was delivered to the clients of this node."""
        self.forget_overdue()
        if topic not in self._updates and len(self._updates) >= UPDATES_MAX:
            return
        # The subscriptions that waited for an earlier update existed when this one was delivered.
        update = Update(message, self._state.now + UPDATE_S)
        self._updates[topic] = update
        self._updates.move_to_end(topic)
        self._topics.set(topic, update)

    def wanted(self, subscriptions: list[Subscription]) -> None:
        """Notes the subscriptions of one SUBSCRIBE, while their retained messages are being
        sent."""
        self.forget_overdue()
        visits = VISITS_MAX
        for subscription in subscriptions:
            if not self._updates or visits <= 0:
                return
            scan = self._topics.scan(subscription.filter)
            while not scan.done and visits > 0:
                for _, update in scan.next(PAGE, visits):
                    visits -= 1
                    if len(update.subscriptions) < SUBSCRIPTIONS_MAX:
                        update.subscriptions.setdefault(subscription, False)
                visits -= 1 + scan.visits

    def is_behind(self, topic: str, subscription: Subscription) -> bool:
        """Notes a subscription to whose scan an update has come; False: there is none."""
        update = self._updates.get(topic)
        if update is None or update.until <= self._state.now:
            return False
        waiting = update.subscriptions
        if subscription not in waiting and len(waiting) >= SUBSCRIPTIONS_MAX:
            return False
        waiting[subscription] = True
        return True

    def applied(self, record: Record) -> None:
        """Sends the update to the noted subscriptions, now that the store has it."""
        if not self._updates:
            return
        topic = record.topic.decode()
        update = self._updates.get(topic)
        if update is None or update.publisher != record.client_id:
            return
        if update.digest != crc32(record.payload):
            # This is an earlier message of the same client; the record of the noted one follows.
            return
        self._forget(topic)
        self._send(topic, list(update.subscriptions))

    def forget_overdue(self) -> None:
        """Forgets the updates whose records have not come within UPDATE_S."""
        updates = self._updates
        while updates:
            topic = next(iter(updates))
            update = updates[topic]
            if update.until > self._state.now:
                return
            self._forget(topic)
            lacking = [each for each, lacks in update.subscriptions.items() if lacks]
            self._send(topic, lacking)

    def _send(self, topic: str, subscriptions: list[Subscription]) -> None:
        message = self._state.retained.get(topic)
        if message is not None:
            for subscription in subscriptions:
                send_retained(self._state, subscription, message)

    def _forget(self, topic: str) -> None:
        del self._updates[topic]
        self._topics.remove(topic)
