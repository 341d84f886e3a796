"""Transport of a client inside the broker's process, without a socket."""

from collections.abc import Callable

from holdfast.io.sockets.transport import ClientTransport
from holdfast.node.session.connection import Connection


class InProcessTransport(ClientTransport):
    """Passes the node's bytes to callbacks.

    Both callbacks run within a turn of the broker, so they may only queue work.
    """

    def __init__(self, on_data: Callable[[bytes], None], on_closed: Callable[[], None]) -> None:
        self.on_data = on_data
        self.on_closed = on_closed
        self.is_closed = False

    def flush(self, connection: Connection) -> None:
        out = connection.out
        if out is not None:
            data = out[0] if len(out) == 1 else b"".join(out)
            connection.out = None
            connection.out_bytes = 0
            self.on_data(data)
        if connection.closing:
            self.cut()

    def cut(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.on_closed()

    def pause_reading(self) -> None:
        """Does nothing: the client calls the node directly, so there is no input to pause."""

    def resume_reading(self) -> None:
        pass
