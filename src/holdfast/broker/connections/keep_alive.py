"""The keep alive: a client that is silent for one and a half times its own loses its connection."""

from typing import Final

from holdfast.broker.admission.throttle import throttled_until
from holdfast.broker.connections.close import close_connection
from holdfast.broker.recorded_state import KEEP_ALIVE
from holdfast.broker.session.connection import CLOSED, Connection
from holdfast.broker.state import NodeState
from holdfast.protocol.mqtt import reasons

PROGRESS_BYTES_PER_S: Final = 100
"""The bytes per second by which an incomplete packet must grow to count as a sign of life.
[MQTT-3.1.2-22] is about whole packets, and a byte now and then would keep a connection for ever."""


def check_keep_alive(state: NodeState, connection: Connection) -> None:
    """Close the connection if its client was silent for too long, or check again later."""
    if connection.state == CLOSED:
        return
    deadline = connection.last_received + connection.keep_alive_s * 1.5
    waits_until = throttled_until(connection)
    if waits_until > state.now:
        # It is not read, so it cannot show that it lives.
        deadline = waits_until + connection.keep_alive_s * 1.5
    if deadline > state.now:
        connection.timer = state.arm(deadline, KEEP_ALIVE, connection)
        return
    silent_s = state.now - connection.last_received
    if connection.reader.waiting_bytes() >= silent_s * PROGRESS_BYTES_PER_S:
        # A large packet is arriving.
        deadline = state.now + connection.keep_alive_s * 1.5
        connection.timer = state.arm(deadline, KEEP_ALIVE, connection)
        return
    state.stats.keep_alive_timeouts += 1
    close_connection(state, connection, reasons.KEEP_ALIVE_TIMEOUT, "keep alive exceeded")
