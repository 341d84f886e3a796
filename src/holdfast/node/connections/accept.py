"""Accepting connections: the room for one more, and the bytes of those without a CONNECT."""

from holdfast.node.admission.checks import is_address_banned
from holdfast.node.connections.client_notes import note_no_room, note_unopened
from holdfast.node.connections.close import handle_connection_lost
from holdfast.node.connections.pending_connects import PendingHandshake
from holdfast.node.effects import Cut
from holdfast.node.node_state import NodeState
from holdfast.node.session.connection import Connection


def has_room(state: NodeState, remote: str, listener: str, sockets_max: int) -> bool:
    """Makes room for a connection if necessary. False: the driver closes its socket."""
    pending = state.pending_connects
    if is_address_banned(state, remote):
        state.stats.refused_banned += 1
        return False
    if pending.is_crowded(remote):
        refuse_connection(state, "address_full", remote, listener, pending.per_address_max)
        return False
    if state.connections + state.handshakes >= sockets_max and not displace_oldest(state):
        refuse_connection(state, "connections_full", remote, listener, sockets_max)
        return False
    return True


def refuse_connection(
    state: NodeState, event: str, remote: str, listener: str, connections_max: int
) -> None:
    """Counts and logs a connection without room. The driver closes its socket without a packet,
    because MQTT has none before CONNECT."""
    state.stats.refuse_connection(event)
    note_no_room(state, event, remote, listener, connections_max)


def displace_oldest(state: NodeState) -> bool:
    """Closes the oldest handshake or connection that has proved nothing. False: there is none."""
    oldest = state.pending_connects.oldest()
    if isinstance(oldest, PendingHandshake):
        # Removed now: the handshake ends later, and the next newcomer must displace another one.
        state.pending_connects.end_handshake(oldest)
        state.stats.connections_displaced += 1
        oldest.cancel()
    elif oldest is not None:
        _displace(state, oldest)
    return oldest is not None


def limit_pending(state: NodeState, connection: Connection, size_bytes: int) -> None:
    """Closes the oldest connection with bytes of a CONNECT while the connections without an
    answered CONNECT buffer more than `pending_connect_bytes`."""
    pending = state.pending_connects
    pending.buffer(connection, size_bytes)
    while pending.bytes > pending.bytes_max and not connection.closing:
        oldest = pending.oldest_holder()
        _displace(state, connection if oldest is None else oldest)


def _displace(state: NodeState, connection: Connection) -> None:
    state.stats.connections_displaced += 1
    note_unopened(state, connection, "connection_displaced")
    state.pending_connects.leave(connection)
    handle_connection_lost(state, connection)
    state.effects.append(Cut(connection))
