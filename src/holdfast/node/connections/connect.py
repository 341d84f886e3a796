"""CONNECT: its checks, and the authentication of its client."""

from typing import Final

from holdfast.addresses import server_reference
from holdfast.node.admission.checks import connect_refusal, note_failure
from holdfast.node.admission.control import Proof
from holdfast.node.connections.close import close_connection, is_refused, refuse
from holdfast.node.connections.exchange import offered_methods, start_exchange
from holdfast.node.connections.session_open import admit, open_session, proved_connections
from holdfast.node.effects import AskSources, CheckPassword, ResumeInput
from holdfast.node.node_state import NodeState
from holdfast.node.refusal import Rejection
from holdfast.node.rights import may_be_anonymous
from holdfast.node.session.connection import (
    AUTHENTICATING,
    CLOSED,
    OPEN,
    Connection,
)
from holdfast.node.session.listener_rules import PASSWORD
from holdfast.node.state.recorded_state import IDENTITY_ENDS
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.framing import PACKET_BYTES_MAX
from holdfast.protocol.mqtt.packets import Connect, Properties
from holdfast.protocol.mqtt.properties import number_of
from holdfast.protocol.topics.names import InvalidTopic, decode_topic
from holdfast.security.acl import ClientRules
from holdfast.security.identity.identity import Answer, ClientIdentity, LoginRefusal

API_PREFIX: Final = "$api-"
"""The beginning of the client ids of requests to the admin port."""
OPERATOR_PREFIX: Final = "admin:"
"""The beginning of the names under which the log has messages of callers of the admin port. A
client with such an id would publish under the name of an operator."""

ANONYMOUS: Final = Rejection("anonymous clients are not allowed", reasons.NOT_AUTHORIZED)
NOT_PROVED: Final = Rejection("the user name is not proved", reasons.NOT_AUTHORIZED)
WRONG_PASSWORD: Final = Rejection("wrong user name or password", reasons.BAD_USER_NAME_OR_PASSWORD)


def handle_connect(state: NodeState, connection: Connection, packet: Connect) -> None:
    """Checks a CONNECT and authenticates its client, then opens its session."""
    connection.version = packet.protocol_level
    connection.is_bridge = packet.is_bridge
    connection.connect = packet
    if packet.protocol_level >= 5:
        wanted = number_of(packet.properties, p.MAXIMUM_PACKET_SIZE, PACKET_BYTES_MAX)
        connection.packet_bytes_max = min(wanted, PACKET_BYTES_MAX)
        connection.problem_information = (
            number_of(packet.properties, p.REQUEST_PROBLEM_INFORMATION, 1) == 1
        )
    if is_refused(state, connection, _refusal(state, connection, packet)):
        return
    method = packet.properties.get(p.AUTHENTICATION_METHOD)
    if isinstance(method, str):
        start_exchange(state, connection, packet, method)
        return
    if state.admission.asks_sources:
        connection.state = AUTHENTICATING
        connection.input_paused = True
        state.effects.append(AskSources(connection, packet))
        return
    _authenticate(state, connection, packet)


def _refusal(state: NodeState, connection: Connection, packet: Connect) -> Rejection | None:
    """The reason to refuse a CONNECT, whoever its client is."""
    if state.closing:
        return Rejection("the server is shutting down", reasons.SERVER_UNAVAILABLE)
    if state.redirect:
        servers = server_reference(state.redirect, connection.listener.kind)
        return Rejection("this node takes no clients", reasons.USE_ANOTHER_SERVER, servers)
    # Before its password costs anything; `admit` checks again.
    if proved_connections(state) >= state.config.connections:
        return Rejection("too many connections")
    refusal = connect_refusal(state, connection, packet.client_id, packet.username)
    if refusal is not None:
        return refusal
    if packet.client_id.startswith((API_PREFIX, OPERATOR_PREFIX)):
        text = f"client ids that begin with {API_PREFIX} or {OPERATOR_PREFIX} are the admin port's"
        return Rejection(text, reasons.CLIENT_IDENTIFIER_NOT_VALID)
    # The will is checked now, because the client could not be told when it is published.
    will = packet.will
    if will is None:
        return None
    if will.qos > state.config.qos_max:
        # [MQTT-3.2.2-12]
        return Rejection(f"will QoS {will.qos}", reasons.QOS_NOT_SUPPORTED)
    if will.retain and not state.config.retain_available:
        # [MQTT-3.2.2-13]
        return Rejection("will retain", reasons.RETAIN_NOT_SUPPORTED)
    try:
        decode_topic(will.topic.encode())
        if connection.mount:
            will.topic = decode_topic(connection.mount + will.topic.encode())
    except InvalidTopic as error:
        return Rejection(f"will topic: {error}", reasons.TOPIC_NAME_INVALID)
    return None


def _authenticate(state: NodeState, connection: Connection, packet: Connect) -> None:
    """Authenticates a client by certificate or password, or accepts it as anonymous."""
    listener = connection.listener
    certified = connection.certificate_name
    if not listener.certifies(certified):
        certified = ""
    if packet.username is None or (certified and listener.is_certificate_only()):
        # A TLS client certificate may stand for a user name.
        if certified:
            connection.username = certified
        elif not may_be_anonymous(state, connection):
            note_failure(state, connection)
            refuse(state, connection, ANONYMOUS)
            return
        admit(state, connection)
        return
    checks_passwords = state.admission.checks_passwords or listener.passwords is not None
    if not (checks_passwords and listener.takes(PASSWORD)):
        if packet.username == certified:
            connection.username = packet.username
        elif (
            certified or _takes_proofs(state, connection) or not may_be_anonymous(state, connection)
        ):
            note_failure(state, connection)
            refuse(state, connection, NOT_PROVED)
            return
        # No client can prove a name here, so the name is ignored: the client is anonymous.
        admit(state, connection)
        return
    # A thread computes the hash, which takes long. Packets behind CONNECT wait in the socket.
    connection.state = AUTHENTICATING
    connection.input_paused = True
    state.effects.append(CheckPassword(connection, packet.username, packet.password or b""))


def _takes_proofs(state: NodeState, connection: Connection) -> bool:
    """Whether a client can prove a user name at this listener, other than by password. What other
    listeners take does not matter here, as in Mosquitto."""
    return bool(
        connection.listener.authentication
        or state.admission.asks_sources
        or offered_methods(state, connection)
    )


def handle_answer(state: NodeState, connection: Connection, answer: Answer) -> None:
    """Opens the session of a client that a source of identity has accepted, refuses one that it has
    refused, and authenticates all others without a source.

    The client may have gone while the source was asked. Then the state is another one, and the
    answer is dropped.
    """
    if connection.state != AUTHENTICATING:
        return
    packet = connection.connect
    assert packet is not None
    if answer is None:
        _authenticate(state, connection, packet)
    elif isinstance(answer, LoginRefusal):
        if answer.reason in (reasons.SERVER_BUSY, reasons.SERVER_UNAVAILABLE):
            state.stats.authentications_shed += 1
        else:
            note_failure(state, connection)
        refuse(state, connection, Rejection(answer.text, answer.reason))
    else:
        connection.username = answer.username
        timer: object | None = None
        if answer.expires_s:
            left_s = answer.expires_s - state.wall_us / 1_000_000
            timer = state.arm(state.now + max(0.0, left_s), IDENTITY_ENDS, connection)
        connection.proof = Proof(answer, timer)
        admit(state, connection)
    _resume_if_open(state, connection)


def handle_rights(
    state: NodeState, connection: Connection, extra: Properties | None, rules: ClientRules | None
) -> None:
    """Opens the session of a client whose rights the hooks have given, or left as they are."""
    if connection.state != AUTHENTICATING:
        return
    if rules is not None:
        proof = connection.proof
        before = proof if isinstance(proof, Proof) else None
        identity = ClientIdentity(connection.username, "hook", rules)
        timer = None if before is None else before.timer
        connection.proof = Proof(identity, timer, proves_name=before is not None)
    open_session(state, connection, extra)
    _resume_if_open(state, connection)


def handle_identity_end(state: NodeState, connection: Connection) -> None:
    """Closes the connection of a client whose proof has expired."""
    text = "the proof of identity has expired: connect again with a new one"
    if connection.state == OPEN:
        close_connection(state, connection, reasons.MAXIMUM_CONNECT_TIME, text)
    elif connection.state != CLOSED:
        refuse(state, connection, Rejection(text, reasons.NOT_AUTHORIZED))


def _resume_if_open(state: NodeState, connection: Connection) -> None:
    """Reads on, unless the session waits for the log: ConnackPromise reads on then. Packets that
    the client has sent behind CONNECT would otherwise come before CONNACK."""
    if connection.state == OPEN:
        state.effects.append(ResumeInput(connection))


def handle_password_checked(state: NodeState, connection: Connection, valid: bool) -> None:
    """Opens the session, or refuses the client if its password is wrong."""
    if connection.state != AUTHENTICATING:
        return
    if not valid:
        note_failure(state, connection)
        refuse(state, connection, WRONG_PASSWORD)
        return
    packet = connection.connect
    assert packet is not None
    connection.username = packet.username
    admit(state, connection)
    _resume_if_open(state, connection)
