"""Interface of hooks that observe clients and their messages."""

from holdfast.node.session.connection import Connection


class ClientObserver:
    """Hears of connections and messages, within a turn. So an implementation only takes notes."""

    def __init__(self) -> None:
        # Whether `published` is called at all: it is on the hot path.
        self.observes_messages = False

    def connected(self, connection: Connection) -> None:
        """A session is open."""
        raise NotImplementedError

    def disconnected(self, connection: Connection, reason: str) -> None:
        """A connection has ended."""
        raise NotImplementedError

    def published(
        self, connection: Connection, topic: str, payload: bytes, qos: int, retain: bool
    ) -> bool:
        """A message was accepted. False: no message of its topic is observed, so this need not be
        called for them."""
        raise NotImplementedError
