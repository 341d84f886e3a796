"""What the federation brings, on its way to the broker: in order, each message once.

While a connection is away, what was sent and not acknowledged stays with the client, which sends
it again to the session it belongs to. The host gives it to us again, too: that is recognised by its
id, and waits for the acknowledgement of the first.

Pure, but for what the caller does with `next`.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.client.errors import ClientError, PublishRefused
from holdfast.federation.core.effects import Message
from holdfast.federation.core.identity import MessageId
from holdfast.protocol.mqtt import reasons

WAITING_MAX: Final = 100_000
"""Messages that wait for the client's window. The origins' windows keep far below it; QoS 0
beyond it is dropped."""
TRANSIENT: Final = frozenset(
    {
        reasons.UNSPECIFIED_ERROR,
        reasons.SERVER_BUSY,
        reasons.PACKET_IDENTIFIER_IN_USE,
        reasons.QUOTA_EXCEEDED,
    }
)
"""Refusals of a message that may not last; after any other it is dropped."""

Done = Callable[[], None]


@dataclass(slots=True, eq=False)
class Import:
    id: MessageId
    message: Message
    place: int
    expires_at: float | None
    done: Done | None
    """None: given up by the host, which will give it to us again."""
    is_setting: bool = False
    """What the broker is to retain, delivered under this id before or never."""
    is_sent: bool = False
    is_accepted: bool = False
    """By the broker, while the host had given it up."""

    @property
    def key(self) -> tuple[MessageId, bool]:
        return self.id, self.is_setting


class Imports:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Messages, by what became of them."""
        self._queue: deque[Import] = deque()
        # With QoS 1 and 2.
        self._known: dict[tuple[MessageId, bool], Import] = {}

    def __len__(self) -> int:
        """Messages that the broker has not acknowledged."""
        return len(self._known)

    def deliver(
        self,
        id: MessageId,
        message: Message,
        place: int,
        done: Done,
        now: float,
        is_setting: bool = False,
    ) -> Done | None:
        """What is to be called now."""
        known = self._known.get((id, is_setting))
        if known is not None:
            if known.is_accepted:
                del self._known[known.key]
                return done
            known.done = done
            return None
        if not message.qos and len(self._queue) >= WAITING_MAX:
            self.counts["no room"] += 1
            return done
        expires_at = None if message.expiry_s is None else now + message.expiry_s
        entry = Import(id, message, place, expires_at, done, is_setting)
        if message.qos:
            self._known[entry.key] = entry
        self._queue.append(entry)
        return None

    def first(self) -> Import | None:
        """What `next` would be."""
        return self._queue[0] if self._queue else None

    def next(self) -> Import | None:
        """The next to send, in order."""
        if not self._queue:
            return None
        entry = self._queue.popleft()
        entry.is_sent = True
        return entry

    def finished(self, entry: Import, reason: str) -> Done | None:
        """The broker has it, or nothing can be done; what is to be called now."""
        self.counts[reason] += 1
        if entry.done is not None:
            self.failed(entry)
            return entry.done
        entry.is_accepted = True
        return None

    def failed(self, entry: Import) -> None:
        """It is no longer on its way; if it did not get to the broker, the host will give it to us
        again."""
        if self._known.get(entry.key) is entry:
            del self._known[entry.key]

    def down(self) -> None:
        """The host gives everything again that is not done."""
        self._queue.clear()
        for key, entry in list(self._known.items()):
            # What was accepted and not asked for since is no longer on its way.
            if not entry.is_sent or entry.is_accepted:
                del self._known[key]
            else:
                entry.done = None

    def forget(self) -> None:
        """The client is another one: nothing of before is on its way."""
        self._queue.clear()
        self._known.clear()


def is_transient(error: ClientError) -> bool:
    return isinstance(error, PublishRefused) and error.reason in TRANSIENT
