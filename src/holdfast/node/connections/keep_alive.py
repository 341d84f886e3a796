"""Sets deadlines of connections: for a complete CONNECT, then for the keep alive.

A client that is silent for one and a half times its keep alive loses its connection. Deadlines are
rounded up to whole seconds, so that the connections of a second share one timer.
"""

from math import ceil
from typing import Final

from holdfast.node.admission.throttle import throttled_until
from holdfast.node.connections.client_notes import note_unopened
from holdfast.node.connections.close import close_connection, handle_connection_lost
from holdfast.node.node_state import NodeState
from holdfast.node.session.connection import CLOSED, Connection, Deadline
from holdfast.node.state.recorded_state import KEEP_ALIVE
from holdfast.protocol.mqtt import reasons

PROGRESS_BYTES_PER_S: Final = 100
"""The bytes per second by which an incomplete packet must grow to count as a sign of life.
[MQTT-3.1.2-22] is about whole packets, and a byte now and then would keep a connection for ever."""


def set_deadline(state: NodeState, connection: Connection, when: float) -> None:
    """Checks the connection at this time, in place of an earlier one."""
    clear_deadline(state, connection)
    second = ceil(when)
    deadline = state.deadlines.get(second)
    if deadline is None:
        deadline = state.deadlines[second] = Deadline(second)
        deadline.timer = state.arm(float(second), KEEP_ALIVE, deadline)
    deadline.add(connection)


def clear_deadline(state: NodeState, connection: Connection) -> None:
    """Checks the connection no more."""
    deadline = connection.deadline
    if deadline is not None:
        deadline.remove(connection)
        if not deadline.connections:
            _forget(state, deadline)


def _forget(state: NodeState, deadline: Deadline) -> None:
    state.cancel(deadline.timer)
    state.deadlines.pop(deadline.second, None)


def check_deadline(state: NodeState, deadline: Deadline) -> None:
    """Checks the connections of a second that has begun, at most so many as the turn has steps. The
    others follow in the next turn."""
    deadline.timer = None
    connections = deadline.connections
    steps = min(len(connections), max(1, state.steps_left))
    state.steps_left -= steps
    # Those that are checked again have a later second.
    for connection in connections[-steps:]:
        if connection.deadline is deadline:
            deadline.remove(connection)
            _check(state, connection)
    if connections:
        deadline.timer = state.arm(state.now, KEEP_ALIVE, deadline)
    else:
        _forget(state, deadline)


def _check(state: NodeState, connection: Connection) -> None:
    if connection.state == CLOSED:
        return
    if connection.session is not None:
        _check_keep_alive(state, connection)
        return
    # [MQTT-3.1.4-1] a reasonable time for CONNECT
    note_unopened(state, connection, "connect_timeout")
    handle_connection_lost(state, connection)


def start_keep_alive(state: NodeState, connection: Connection) -> None:
    """Watches a client whose session opens, and its CONNECT no more. [MQTT-3.1.2-22]

    The deadline of CONNECT becomes that of the keep alive if it is earlier: it is set again then.
    """
    # The check of a password may have taken longer than the keep alive.
    connection.last_received = state.now
    if not connection.keep_alive_s or connection.is_internal:
        clear_deadline(state, connection)
        return
    when = state.now + _allowed_s(connection)
    deadline = connection.deadline
    if deadline is None or deadline.second > when:
        set_deadline(state, connection, when)


def _check_keep_alive(state: NodeState, connection: Connection) -> None:
    """Closes the connection if its client was silent for too long, or checks again later."""
    deadline = connection.last_received + _allowed_s(connection)
    waits_until = throttled_until(connection)
    if waits_until > state.now:
        # It is not read, so it cannot show that it lives.
        deadline = waits_until + _allowed_s(connection)
    if deadline > state.now:
        set_deadline(state, connection, deadline)
        return
    silent_s = state.now - connection.last_received
    reader = connection.reader
    if reader is not None and reader.waiting_bytes() >= silent_s * PROGRESS_BYTES_PER_S:
        # A large packet is arriving.
        deadline = state.now + _allowed_s(connection)
        set_deadline(state, connection, deadline)
        return
    state.stats.keep_alive_timeouts += 1
    close_connection(state, connection, reasons.KEEP_ALIVE_TIMEOUT, "keep alive exceeded")


def _allowed_s(connection: Connection) -> float:
    """The time in seconds for which the client may be silent. [MQTT-3.1.2-22]"""
    keep_alive_s: int = connection.keep_alive_s
    return keep_alive_s * 1.5
