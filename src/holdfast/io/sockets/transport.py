"""Interface between the broker's loop and a client's socket."""

from holdfast.node.session.connection import AddressSource, Connection


class ClientTransport(AddressSource):
    """The base class of TCP, TLS and loopback transports."""

    def flush(self, connection: Connection) -> None:
        """Writes what the node queued, and then closes the socket if the node asked for that."""
        raise NotImplementedError

    def cut(self) -> None:
        """Closes the socket at once."""

    def has_left(self) -> bool:
        """Returns True if the peer has closed the connection, unnoticed while reading is paused."""
        return False

    def pause_reading(self) -> None:
        raise NotImplementedError

    def resume_reading(self) -> None:
        raise NotImplementedError
