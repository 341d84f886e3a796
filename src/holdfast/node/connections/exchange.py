"""Enhanced authentication of MQTT 5: AUTH packets until the client is accepted or refused.

Invariants
- Until the exchange has succeeded the connection is EXCHANGING, and any packet but AUTH and
  DISCONNECT is a violation. So nothing of the client takes effect before it is known.
- Re-authentication cannot change the user. Counter-example without that: a session that was opened
  with the rights of one user would go on with those of another, in the middle of a delivery.
- Each refusal of a CONNECT counts as a failed login (`note_failure`), also that of an unknown
  method. Otherwise names of methods could be tried without limit.
"""

from holdfast.node.admission.checks import note_failure
from holdfast.node.connections.close import refuse
from holdfast.node.connections.session_open import admit
from holdfast.node.node_state import NodeState
from holdfast.node.refusal import Rejection
from holdfast.node.session.connection import (
    EXCHANGING,
    OPEN,
    Connection,
)
from holdfast.node.session.listener_rules import SCRAM
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_within
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.packets import Auth, Connect, Properties
from holdfast.security.enhanced_authentication import Continue, Factory, Failure, Success


def start_exchange(state: NodeState, connection: Connection, packet: Connect, method: str) -> None:
    """Begins enhanced authentication. [MQTT-4.12.0-1]"""
    offered = offered_methods(state, connection)
    factory = offered.get(method)
    if factory is None:
        note_failure(state, connection)
        text = f"authentication method {method!r}, known: {sorted(offered)}"
        refuse(state, connection, Rejection(text, reasons.BAD_AUTHENTICATION_METHOD))
        return
    authenticator = factory()
    connection.authentication = authenticator
    connection.state = EXCHANGING
    data = packet.properties.get(p.AUTHENTICATION_DATA)
    step = authenticator.start(packet.client_id, data if isinstance(data, bytes) else None)
    _take_step(state, connection, step, method)


def offered_methods(state: NodeState, connection: Connection) -> dict[str, Factory]:
    """The methods that the client's listener offers."""
    return state.admission.authenticators if connection.listener.takes(SCRAM) else {}


def handle_auth(state: NodeState, connection: Connection, packet: Auth) -> None:
    """Handles a step of the exchange, or re-authenticates a connection. [MQTT-4.12.0-6]"""
    authentication = connection.authentication
    if (
        authentication is None
        or packet.properties.get(p.AUTHENTICATION_METHOD) != authentication.method
    ):
        # [MQTT-4.12.0-7] [MQTT-4.12.1-1]
        raise ProtocolViolation(
            reasons.PROTOCOL_ERROR, "AUTH with another method than CONNECT, or without one"
        )
    method: str = authentication.method
    data = packet.properties.get(p.AUTHENTICATION_DATA)
    payload = data if isinstance(data, bytes) else None
    if packet.reason == reasons.REAUTHENTICATE:
        if connection.state != OPEN:
            raise ProtocolViolation(reasons.PROTOCOL_ERROR, "re-authentication before CONNACK")
        factory = offered_methods(state, connection).get(method)
        if factory is None:
            text = f"authentication method {method!r} is not offered any more"
            raise ProtocolViolation(reasons.NOT_AUTHORIZED, text)
        again = factory()
        connection.authentication = again
        step = again.start(connection.client_id, payload)
    elif packet.reason == reasons.CONTINUE_AUTHENTICATION:
        step = authentication.step(payload)
    else:
        raise ProtocolViolation(reasons.PROTOCOL_ERROR, f"AUTH with reason 0x{packet.reason:02x}")
    _take_step(state, connection, step, method)


def _take_step(state: NodeState, connection: Connection, step: object, method: str) -> None:
    """Acts on a step of the authenticator: sends AUTH, opens the session, or refuses.

    On an open connection a failure ends it: the client has shown that it is not who it was.
    """
    fields: Properties = {p.AUTHENTICATION_METHOD: method}
    if isinstance(step, Continue):
        fields[p.AUTHENTICATION_DATA] = step.data
        _send_auth(state, connection, Auth(reasons.CONTINUE_AUTHENTICATION, fields))
    elif isinstance(step, Success):
        if step.data:
            fields[p.AUTHENTICATION_DATA] = step.data
        if connection.state == OPEN:
            if step.username != connection.username:
                raise ProtocolViolation(reasons.NOT_AUTHORIZED, "re-authentication as another user")
            _send_auth(state, connection, Auth(reasons.SUCCESS, fields))
            return
        connection.username = step.username
        admit(state, connection, fields)
    else:
        assert isinstance(step, Failure)
        note_failure(state, connection, step.username)
        if connection.state == OPEN:
            raise ProtocolViolation(reasons.NOT_AUTHORIZED, step.reason_text)
        refusal = Rejection(step.reason_text, reasons.NOT_AUTHORIZED)
        refuse(state, connection, refusal, step.username)


def _send_auth(state: NodeState, connection: Connection, packet: Auth) -> None:
    """Sends AUTH. It cannot be shortened like other packets, because its data is the exchange."""
    data = encode_within(packet, connection.version, connection.packet_bytes_max)
    if not data:
        raise ProtocolViolation(
            reasons.PACKET_TOO_LARGE,
            f"AUTH does not fit into {connection.packet_bytes_max} bytes, the client's maximum",
        )
    connection.send(data, state.dirty)
