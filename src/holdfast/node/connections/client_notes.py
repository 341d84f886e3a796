"""Logs each client's connect, refusal, disconnect, takeover and denial in one line.

All lines have the fields `client`, `user` and `remote` (address and port), and `listener` where the
line concerns the door. `user` is the name that the client has proved. In `connection_refused` it is
the claimed name, because an operator must see whose password was wrong. docs/logs.md lists the
lines.
"""

from typing import Final

from holdfast.node.node_state import NodeState
from holdfast.node.refusal import Rejection
from holdfast.node.rights import write_denial
from holdfast.node.session.connection import Connection
from holdfast.node.session.session import Session
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import Connect

DISCONNECTED: Final = "disconnected"
TAKEN_OVER: Final = "session_taken_over"
PROTOCOL_ERROR: Final = "protocol_error"

NOT_LET_IN: Final = (
    reasons.BAD_USER_NAME_OR_PASSWORD,
    reasons.NOT_AUTHORIZED,
    reasons.BAD_AUTHENTICATION_METHOD,
)
"""The reasons of a refusal that an operator should see: somebody may be trying passwords."""

LOST: Final = "Connection lost"
NORMAL: Final = "Normal disconnection"

TOPIC_SHOWN_MAX: Final = 200
"""The most characters of a topic in a line."""


def reason_name(reason: int) -> str:
    """The name of a reason code in the MQTT specification."""
    return reasons.NAMES.get(reason, hex(reason))


def note_connected(state: NodeState, connection: Connection, session: Session) -> None:
    """Notes that a client's session is open."""
    if connection.is_internal:
        return
    if state.admission.observer is not None:
        state.admission.observer.connected(connection)
    state.note(
        "info",
        "connected",
        {
            "client": connection.client_id,
            "user": connection.username or "",
            "remote": connection.remote,
            "listener": connection.listener.name,
            "version": connection.version,
            "keep_alive_s": connection.keep_alive_s,
            "session_expiry_s": session.expiry_s,
        },
    )


def note_refused(
    state: NodeState, connection: Connection, refusal: Rejection, claimed: str
) -> None:
    """Notes that a client's CONNECT is refused, with the client id and user name that it sent.
    `claimed`: the name in its authentication data; "": that of CONNECT."""
    client_id, username = connection.client_id, claimed or connection.username
    packet = connection.connect
    if isinstance(packet, Connect):
        client_id = client_id or packet.client_id
        username = username or packet.username
    state.note(
        "warning" if refusal.reason in NOT_LET_IN else "info",
        "connection_refused",
        {
            "remote": connection.remote,
            "client": client_id,
            "user": username or "",
            "listener": connection.listener.name,
            "reason": reason_name(refusal.reason),
            "error": refusal.text,
        },
    )


def note_no_room(
    state: NodeState, event: str, remote: str, listener: str, connections_max: int
) -> None:
    """Notes that a socket is closed unread, because a limit on connections is reached."""
    fields: dict[str, object] = {
        "remote": remote,
        "listener": listener,
        "max_connections": connections_max,
    }
    state.note("warning", event, fields)


def note_unopened(state: NodeState, connection: Connection, event: str) -> None:
    """Notes that the broker closes a connection whose CONNECT it has not answered."""
    packet = connection.connect
    fields: dict[str, object] = {
        "remote": connection.remote,
        "client": packet.client_id if isinstance(packet, Connect) else connection.client_id,
        "listener": connection.listener.name,
    }
    state.note("info", event, fields)


def note_closed(
    state: NodeState, connection: Connection, event: str, reason: str, text: str
) -> None:
    """Notes that a connection ends, whichever side ended it."""
    if connection.is_internal:
        return
    if state.admission.observer is not None:
        state.admission.observer.disconnected(connection, reason)
    fields: dict[str, object] = {
        "client": connection.client_id,
        "user": connection.username or "",
        "remote": connection.remote,
        "reason": reason,
    }
    if text:
        fields["error"] = text
    state.note("info", event, fields)


def note_publish_denied(
    state: NodeState, connection: Connection, raw_topic: bytes, text: str
) -> None:
    """Notes that a client may not publish to a topic. `count`: how often since the last line."""
    topic = raw_topic.decode()
    key = f"{connection.client_id} {topic}"
    count = state.repeats.count(key, state.now)
    if count:
        fields: dict[str, object] = {
            "client": connection.client_id,
            "user": connection.username or "",
            "remote": connection.remote,
            "topic": topic[:TOPIC_SHOWN_MAX],
            "reason": text or write_denial(connection, topic)[:TOPIC_SHOWN_MAX],
            "count": count,
        }
        state.note("warning", "publish_denied", fields)


def note_filter_denied(state: NodeState, session: Session, event: str, filter: str) -> None:
    """Notes that a client may not subscribe to a filter, or unsubscribe from it."""
    state.stats.subscriptions_denied += 1
    _note_denied(state, session, "warning", event, f"{event} {filter}", "filter", filter)


def note_read_denied(state: NodeState, session: Session, topic: str) -> None:
    """Notes that a message was not delivered, because its subscriber may not read the topic.

    A subscription to `#` is normal where rules select the topics, so the line is for debugging.
    """
    _note_denied(state, session, "debug", "read_denied", f"< {topic}", "topic", topic)


def _note_denied(
    state: NodeState, session: Session, level: str, event: str, key: str, name: str, text: str
) -> None:
    count = state.repeats.count(f"{session.client_id} {key}", state.now)
    connection = session.connection
    if count:
        fields: dict[str, object] = {
            "client": session.client_id,
            "user": session.username or "",
            "remote": "" if connection is None else connection.remote,
            name: text[:TOPIC_SHOWN_MAX],
            "count": count,
        }
        state.note(level, event, fields)
