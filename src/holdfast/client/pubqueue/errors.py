"""The errors of a publish queue. `errors.QueueFull` is the one that callers normally handle."""

from holdfast.client.errors import ClientError


class QueueClosed(ClientError):
    """A message for a queue that is not open yet, or closed."""


class ProducerFenced(ClientError):
    """A refusal of the producer, not of a message. The broker has a newer epoch (a second writer
    uses the identity, or the queue's file is an old copy), or the producer belongs to another user.
    The queue has stopped and keeps its messages."""


class MessageExpired(ClientError):
    """A message that was not sent within its `expiry_s`."""


class MessagesLeft(ClientError):
    """The close of a queue in memory with unconfirmed messages; `count` of them are lost."""

    def __init__(self, count: int) -> None:
        super().__init__(
            f"{count} messages were not confirmed: close with more time, or use a SqliteStore, "
            "which keeps them"
        )
        self.count = count


class StoreError(ClientError):
    """A failure of the queue's file. The text has the reason and a remedy."""


class StoreFull(StoreError):
    """A full disk. No message was stored, and later attempts may succeed."""
