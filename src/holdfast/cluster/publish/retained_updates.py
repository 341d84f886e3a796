"""Retained updates of QoS 0 that were delivered here and that the log does not have yet.

A QoS 0 message with RETAIN is delivered at once on every node, and retained on every node when its
record is committed. A client that subscribes in between would get neither: it was no subscriber
yet, and the store has the message before it. So what such a client has subscribed to is noted, and
the message is sent to it as retained once its record is applied.

The stores themselves stay what the committed records say, the same on all nodes. Everything here is
bounded and best effort, like QoS 0: above the bounds, and for a record that does not come within
UPDATE_S, a new subscriber gets what is retained by then.
"""

from collections import OrderedDict
from typing import Final
from zlib import crc32

from holdfast.broker.delivery.retained import send_retained
from holdfast.broker.session.message import Message
from holdfast.broker.session.session import Subscription
from holdfast.broker.state import NodeState
from holdfast.protocol.topics.retained import RetainedTrie
from holdfast.storage.record import Record

UPDATE_S: Final = 5.0
"""How long the record of an update is awaited."""
UPDATES_MAX: Final = 1000
"""Topics with an update whose record is awaited."""
SUBSCRIPTIONS_MAX: Final = 1000
"""Subscriptions that wait for one update."""
VISITS_MAX: Final = 1000
"""Topics that are looked at for the filters of one SUBSCRIBE."""
PAGE: Final = 50


class Update:
    def __init__(self, message: Message, until: float) -> None:
        self.publisher = message.publisher
        self.digest = crc32(message.payload)
        self.until = until
        self.subscriptions: dict[Subscription, None] = {}


class RetainedUpdates:
    def __init__(self, state: NodeState) -> None:
        self._state = state
        # By topic, the one that was delivered last at the end.
        self._updates: OrderedDict[str, Update] = OrderedDict()
        self._topics = RetainedTrie()

    def __len__(self) -> int:
        return len(self._updates)

    def delivered(self, topic: str, message: Message) -> None:
        """To the clients of this node."""
        self._forget_overdue()
        if topic not in self._updates and len(self._updates) >= UPDATES_MAX:
            return
        # Those that waited for an earlier one were subscribers by now.
        update = Update(message, self._state.now + UPDATE_S)
        self._updates[topic] = update
        self._updates.move_to_end(topic)
        self._topics.set(topic, update)

    def wanted(self, subscriptions: list[Subscription]) -> None:
        """Of one SUBSCRIBE; what is retained is being sent."""
        self._forget_overdue()
        visits = VISITS_MAX
        for subscription in subscriptions:
            if not self._updates or visits <= 0:
                return
            scan = self._topics.scan(subscription.filter)
            while not scan.done and visits > 0:
                for _, update in scan.next(PAGE, visits):
                    visits -= 1
                    assert isinstance(update, Update)
                    if len(update.subscriptions) < SUBSCRIPTIONS_MAX:
                        update.subscriptions[subscription] = None
                visits -= 1 + scan.visits

    def applied(self, record: Record) -> None:
        """A record with RETAIN: the store has it."""
        if not self._updates:
            return
        topic = record.topic.decode()
        update = self._updates.get(topic)
        if update is None or update.publisher != record.client_id:
            return
        if update.digest != crc32(record.payload):
            # An earlier one of the same client; its later one is still to come.
            return
        self._forget(topic)
        message = self._state.retained.get(topic)
        if isinstance(message, Message):
            for subscription in update.subscriptions:
                send_retained(self._state, subscription, message)

    def _forget_overdue(self) -> None:
        updates = self._updates
        while updates:
            topic = next(iter(updates))
            if updates[topic].until > self._state.now:
                return
            self._forget(topic)

    def _forget(self, topic: str) -> None:
        del self._updates[topic]
        self._topics.remove(topic)
