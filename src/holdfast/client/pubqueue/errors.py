"""What can go wrong in a publish queue; `errors.QueueFull` is the one that callers expect."""

from holdfast.client.errors import ClientError


class QueueClosed(ClientError):
    """The queue takes no messages: it is not open yet, or closed."""


class ProducerFenced(ClientError):
    """The broker refuses not a message but its producer: it knows a newer epoch (a second writer
    uses the identity, or the queue's file is an old copy), or the producer belongs to another
    user. The queue has stopped and keeps its messages."""


class MessageExpired(ClientError):
    """A message was not sent within its `expiry_s`."""


class MessagesLeft(ClientError):
    """A queue in memory was closed with unconfirmed messages; `count` of them are gone."""

    def __init__(self, count: int) -> None:
        super().__init__(
            f"{count} messages were not confirmed: close with more time, or use a SqliteStore, "
            "which keeps them"
        )
        self.count = count


class StoreError(ClientError):
    """The queue's file cannot be used. The text says why and what to do."""


class StoreFull(StoreError):
    """The file's disk is full; nothing was stored, and later attempts may succeed."""
