"""Queues messages from the federation to the broker, in order and each once.

While the connection is down, the client keeps messages that it sent without acknowledgement, and
sends them again in their session. The host delivers the same messages again after `edge_up`. They
are recognised by their id, and wait for the acknowledgement of the first transmission.

Pure, except for the caller's use of `next`.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.client.errors import ClientError, PublishRefused
from holdfast.protocol.mqtt import reasons
from holdfast_federation.core.effects import Message
from holdfast_federation.core.identity import MessageId

WAITING_MAX: Final = 100_000
"""The most messages that wait for the client's window.

The origins' windows keep messages of QoS 1 and 2 far below it. QoS 0 beyond it is dropped.
"""
TRANSIENT: Final = frozenset(
    {
        reasons.UNSPECIFIED_ERROR,
        reasons.SERVER_BUSY,
        reasons.PACKET_IDENTIFIER_IN_USE,
        reasons.QUOTA_EXCEEDED,
    }
)
"""The reasons of temporary refusals. After any other refusal the message is dropped."""

Done = Callable[[], None]


@dataclass(slots=True, eq=False)
class Import:
    """One message on its way to the broker."""

    id: MessageId
    message: Message
    place: int
    expires_at: float | None
    done: Done | None
    """The host's callback, or None after `edge_down`: the host will deliver the message again."""
    is_setting: bool = False
    """Whether the broker only has to retain it. The same id may also be delivered normally."""
    is_sent: bool = False
    is_accepted: bool = False
    """Whether the broker acknowledged it after the host had given it up."""

    @property
    def key(self) -> tuple[MessageId, bool]:
        return self.id, self.is_setting


class Imports:
    """The queue, and the messages of QoS 1 and 2 without acknowledgement, by id.

    A message is in the index until it is finished or failed, so a repetition by the host is not
    sent twice on one session.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Messages by result."""
        self._queue: deque[Import] = deque()
        # Messages of QoS 1 and 2.
        self._imports: dict[tuple[MessageId, bool], Import] = {}

    def __len__(self) -> int:
        """The number of messages that the broker has not acknowledged."""
        return len(self._imports)

    def deliver(
        self,
        id: MessageId,
        message: Message,
        place: int,
        done: Done,
        now: float,
        is_setting: bool = False,
    ) -> Done | None:
        """Queues a message unless it is on its way; returns a callback to call now, or None."""
        known = self._imports.get((id, is_setting))
        if known is not None:
            if known.is_accepted:
                del self._imports[known.key]
                return done
            known.done = done
            return None
        if not message.qos and len(self._queue) >= WAITING_MAX:
            self.counts["no room"] += 1
            return done
        expires_at = None if message.expiry_s is None else now + message.expiry_s
        entry = Import(id, message, place, expires_at, done, is_setting)
        if message.qos:
            self._imports[entry.key] = entry
        self._queue.append(entry)
        return None

    def first(self) -> Import | None:
        """Returns the message that `next` would return."""
        return self._queue[0] if self._queue else None

    def next(self) -> Import | None:
        """Takes the next message to send, in order."""
        if not self._queue:
            return None
        entry = self._queue.popleft()
        entry.is_sent = True
        return entry

    def finished(self, entry: Import, reason: str) -> Done | None:
        """Finishes a message that was acknowledged or dropped; returns a callback to call now."""
        self.counts[reason] += 1
        if entry.done is not None:
            self.failed(entry)
            return entry.done
        entry.is_accepted = True
        return None

    def failed(self, entry: Import) -> None:
        """Forgets a message that is no longer on its way. The host delivers it again if needed."""
        if self._imports.get(entry.key) is entry:
            del self._imports[entry.key]

    def down(self) -> None:
        """Drops waiting messages, because the host delivers all unfinished ones again."""
        self._queue.clear()
        for key, entry in list(self._imports.items()):
            # An accepted message that the host has not delivered again is no longer on its way.
            if not entry.is_sent or entry.is_accepted:
                del self._imports[key]
            else:
                entry.done = None

    def forget(self) -> None:
        """Forgets all messages: a new client has none of them in flight."""
        self._queue.clear()
        self._imports.clear()


def is_transient(error: ClientError) -> bool:
    return isinstance(error, PublishRefused) and error.reason in TRANSIENT
