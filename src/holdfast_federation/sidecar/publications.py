"""Queues the broker's messages on their way into custody.

- `done` of a message is called once: when it is stored durably, has no destination, or was given
  up.
- The member receives messages of QoS 1 and 2 in the order in which they were published.
- With `waits`, a message for a destination whose queue is full waits, and so do all messages behind
  it. Without `waits`, the member drops the oldest messages of that queue and counts them.
- While the disk is full and `FULL_BYTES_MAX` wait for it, messages of QoS 1 and 2 wait in any case.

The edge bounds the queue, because its broker waits for `done`.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

from holdfast_federation.core.effects import Message
from holdfast_federation.core.frames import PROPERTIES_BYTES_MAX
from holdfast_federation.core.identity import MessageId
from holdfast_federation.core.member import FederationMember
from holdfast_federation.sidecar.store.store import MemberStore

Publish = Callable[[Message], MessageId | None]
"""Publishes at the member: returns the message's id, or None if no member wants it."""


class Publications:
    """Hands messages to the member, in order, and confirms them to the edge."""

    def __init__(
        self,
        publish: Publish,
        waits: bool,
        refuse: Callable[[str, str], None],
        has_failed: Callable[[], bool],
    ) -> None:
        """`refuse`: receives a reason to count and a text to log when a message is discarded.
        `has_failed`: tells that the member has failed, so that nothing is confirmed any more."""
        self.published = 0
        self.unwanted = 0
        self._publish = publish
        self._waits = waits
        self._refuse = refuse
        self._has_failed = has_failed
        self._member: FederationMember | None = None
        self._store: MemberStore | None = None
        # Given to the member and not durable yet; then those not given to it yet.
        self._confirming: dict[MessageId, Callable[[], None]] = {}
        self._waiting: deque[tuple[Message, Callable[[], None]]] = deque()
        self._is_releasing = False

    def connect(self, member: FederationMember, store: MemberStore) -> None:
        """Connects the member and the store. Until then every message waits."""
        self._member = member
        self._store = store

    @property
    def waiting_count(self) -> int:
        """The number of messages that wait for room."""
        return len(self._waiting)

    def accept(self, message: Message, done: Callable[[], None]) -> None:
        """Accepts a message from the edge. A QoS 1 or 2 message waits behind those that wait
        already."""
        size = len(message.properties)
        if size > PROPERTIES_BYTES_MAX:
            # Other members would close the link on a frame with larger properties.
            text = f"{size} bytes of properties, at most {PROPERTIES_BYTES_MAX} travel"
            self._refuse("properties too large", f"a message on {message.topic[:200]!r} has {text}")
            done()
        elif self._member is None or (message.qos and (self._waiting or not self._fits(message))):
            self._waiting.append((message, done))
        else:
            self._publish_now(message, done)

    def release(self) -> None:
        """Hands over waiting messages for which there is room now."""
        # Handing over may make room and call this again. The nested call returns, so that the loop
        # keeps the order.
        if self._is_releasing:
            return
        self._is_releasing = True
        try:
            while self._waiting and self._fits(self._waiting[0][0]):
                self._publish_now(*self._waiting.popleft())
        finally:
            self._is_releasing = False

    def confirm(self, id: MessageId) -> None:
        """Confirms a message that is durable or was given up."""
        done = self._confirming.pop(id, None)
        if done is not None:
            done()

    def _publish_now(self, message: Message, done: Callable[[], None]) -> None:
        id = self._publish(message)
        if self._has_failed():
            return
        if message.is_retained and message.qos:
            assert self._store is not None
            # The retained version is stored even if no member wants the message.
            done = partial(self._store.when_written, done)
        if id is None:
            self.unwanted += 1
            done()
            return
        self.published += 1
        if message.qos:
            self._confirming[id] = done
        else:
            done()

    def _fits(self, message: Message) -> bool:
        if not message.qos:
            return True
        assert self._member is not None
        assert self._store is not None
        if not self._store.has_room():
            return False
        if not self._waits:
            return True
        custody, config = self._member.custody, self._member.config
        return custody.bytes < config.custody_bytes_max and all(
            custody.queued(node) < config.queue_messages_max
            and custody.queued_bytes(node) < config.queue_bytes_max
            for node in self._member.interested(message.topic)
        )
