"""The keep alive: a client that is silent for one and a half times its own loses its connection."""

from typing import Final

from holdfast.broker.admission.throttle import throttled_until
from holdfast.broker.connections.close import close_connection
from holdfast.broker.recorded_state import CONNECT_TIMEOUT, KEEP_ALIVE, Timer
from holdfast.broker.session.connection import CLOSED, Connection
from holdfast.broker.state import NodeState
from holdfast.protocol.mqtt import reasons

PROGRESS_BYTES_PER_S: Final = 100
"""The bytes per second by which an incomplete packet must grow to count as a sign of life.
[MQTT-3.1.2-22] is about whole packets, and a byte now and then would keep a connection for ever."""


def start_keep_alive(state: NodeState, connection: Connection) -> None:
    """Begin to watch a client whose session opens, and watch its CONNECT no more. [MQTT-3.1.2-22]

    The timer of CONNECT becomes that of the keep alive if it is due before: it is set again then.
    A cancelled one would stay in memory beside it, with every connection that opens and stays.
    """
    timer = connection.timer
    # The check of a password may have taken longer than the keep alive.
    connection.last_received = state.now
    if not connection.keep_alive_s or connection.is_internal:
        state.cancel(timer)
        connection.timer = None
        return
    when = state.now + connection.keep_alive_s * 1.5
    if isinstance(timer, Timer) and timer.kind == CONNECT_TIMEOUT and timer.when <= when:
        timer.kind = KEEP_ALIVE
        return
    state.cancel(timer)
    connection.timer = state.arm(when, KEEP_ALIVE, connection)


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
    reader = connection.reader
    if reader is not None and reader.waiting_bytes() >= silent_s * PROGRESS_BYTES_PER_S:
        # A large packet is arriving.
        deadline = state.now + connection.keep_alive_s * 1.5
        connection.timer = state.arm(deadline, KEEP_ALIVE, connection)
        return
    state.stats.keep_alive_timeouts += 1
    close_connection(state, connection, reasons.KEEP_ALIVE_TIMEOUT, "keep alive exceeded")
