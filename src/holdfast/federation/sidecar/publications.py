"""What clients here publish, on its way into custody.

- `done` of a message comes once, when it is in the store durably, or is nobody's, or was given up.
- The member gets messages of QoS 1 and 2 in the order in which they were published.
- With `waits`, a message for a member whose queue is full is held, and so are those behind it;
  otherwise the member makes room in that queue by dropping the oldest, which it counts.

- While the disk is full and enough waits for it, messages of QoS 1 and 2 are held in any case.

What is held is bounded by the edge, whose broker waits for `done`.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

from holdfast.federation.core.effects import Message
from holdfast.federation.core.frames import PROPERTIES_BYTES_MAX
from holdfast.federation.core.identity import MessageId
from holdfast.federation.core.member import FederationMember
from holdfast.federation.sidecar.store.store import MemberStore

Publish = Callable[[Message], MessageId | None]
"""To the member: its id, or None where nobody wants it."""


class Publications:
    def __init__(self, publish: Publish, waits: bool, refuse: Callable[[str, str], None]) -> None:
        """`refuse`: a message goes nowhere; a reason to count, and what to say."""
        self.published = 0
        self.unwanted = 0
        self._publish = publish
        self._waits = waits
        self._refuse = refuse
        self._member: FederationMember | None = None
        self._store: MemberStore | None = None
        # Not durable yet; and not with the member yet.
        self._confirming: dict[MessageId, Callable[[], None]] = {}
        self._held: deque[tuple[Message, Callable[[], None]]] = deque()
        self._is_releasing = False

    def begin(self, member: FederationMember, store: MemberStore) -> None:
        """Until then everything is held."""
        self._member = member
        self._store = store

    @property
    def held(self) -> int:
        return len(self._held)

    def take(self, message: Message, done: Callable[[], None]) -> None:
        size = len(message.properties)
        if size > PROPERTIES_BYTES_MAX:
            # Other members would close the link over it.
            text = f"{size} bytes of properties, at most {PROPERTIES_BYTES_MAX} travel"
            self._refuse("properties too large", f"a message on {message.topic[:200]!r} has {text}")
            done()
        elif self._member is None or (message.qos and (self._held or not self._fits(message))):
            self._held.append((message, done))
        else:
            self._hand_over(message, done)

    def release(self) -> None:
        """Something has changed: there may be room for what is held."""
        if self._is_releasing:
            return
        self._is_releasing = True
        try:
            while self._held and self._fits(self._held[0][0]):
                self._hand_over(*self._held.popleft())
        finally:
            self._is_releasing = False

    def confirm(self, id: MessageId) -> None:
        """It is durable, or given up."""
        done = self._confirming.pop(id, None)
        if done is not None:
            done()

    def _hand_over(self, message: Message, done: Callable[[], None]) -> None:
        id = self._publish(message)
        if message.is_retained and message.qos:
            assert self._store is not None
            # The version, which is stored even where nobody wants the message.
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
