"""What the broker's loop needs of a client's socket, whatever the transport."""

from holdfast.broker.session.connection import Connection


class ClientTransport:
    """Base of the transports (TCP and TLS now)."""

    def flush(self, connection: Connection) -> None:
        """Write what the node queued; close the socket after the last bytes if it says so."""
        raise NotImplementedError

    def cut(self) -> None:
        """Close the socket without waiting for anything."""

    def has_left(self) -> bool:
        """True if the peer has closed the connection, which nobody sees while reading is paused."""
        return False

    def pause_reading(self) -> None:
        raise NotImplementedError

    def resume_reading(self) -> None:
        raise NotImplementedError
