"""Opens a session, from authentication to CONNACK: limits, owner, takeover, will."""

from functools import partial
from typing import Final

from holdfast.node.admission.ban_enforcement import expel_if_banned
from holdfast.node.admission.checks import entry_refusal, name_refusal, room_refusal
from holdfast.node.admission.throttle import (
    charge_open,
    give_meter,
    is_in_debt,
    recording_refusal,
)
from holdfast.node.connections.accepted_connect import AcceptedConnect
from holdfast.node.connections.client_notes import note_connected
from holdfast.node.connections.close import is_refused, refuse
from holdfast.node.connections.keep_alive import start_keep_alive
from holdfast.node.delivery.acknowledgements import proceed
from holdfast.node.delivery.log_replay import open_groups, resume
from holdfast.node.delivery.retained import resume_scans
from holdfast.node.effects import AskRights, ResumeInput
from holdfast.node.node_state import NodeState, Promise
from holdfast.node.refusal import Rejection
from holdfast.node.rights import attach, is_bridge_notice, may_leave_now, may_open
from holdfast.node.session.connection import (
    AUTHENTICATING,
    OPEN,
    OPENING,
    AliasesOut,
    Connection,
)
from holdfast.node.session.session import FEDERATION, NEVER_EXPIRES, Session, Will
from holdfast.node.topic_rights.kept_subscriptions import (
    checksum_asked,
    waits_before_takeover,
    waits_for_decisions,
)
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_within
from holdfast.protocol.mqtt.packets import Connack, Connect, Properties
from holdfast.protocol.mqtt.properties import encode_block, number_of
from holdfast.protocol.topics.names import is_shared

SEQUENCES_ASKED: Final = ("hf-seq", "?")
"""The user property of CONNECT that asks whether the broker evaluates producer sequences."""
SEQUENCES_KNOWN: Final = ("hf-seq", "1")
"""The reply in CONNACK. Other brokers send none."""
SEQUENCES_2_ASKED: Final = ("hf-seq", "?2")
"""The property beside it that asks for those of this connection's QoS 2 messages, too."""
SEQUENCES_2_KNOWN: Final = ("hf-seq", "2")
"""The reply to that in CONNACK."""
ROOMY_PACKET_BYTES: Final = 1024
"""The Maximum Packet Size, in bytes, from which a client has room for that reply."""

BRIDGE_INFLIGHT_MAX: Final = 20
"""The most unacknowledged deliveries to a Mosquitto bridge. It stores 20 unfinished QoS 2 messages,
and drops the others with a PUBREC, whose reason MQTT 3.1.1 cannot contain."""

OTHER_USER: Final = Rejection(
    "the client id is in use by another user", reasons.CLIENT_IDENTIFIER_NOT_VALID
)
"""The session of the other user stays as it is."""
IN_DEBT: Final = Rejection(
    "more messages or bytes a second than allowed: try again later",
    reasons.CONNECTION_RATE_EXCEEDED,
)


class ConnackPromise(Promise):
    """The promise of a CONNACK for a session that must be in the log first."""

    def __init__(
        self, connection: Connection, session: Session, data: bytes, earlier_expiry_s: int
    ) -> None:
        """`earlier_expiry_s`: the expiry interval of the session before this CONNECT."""
        super().__init__(connection)
        self.session = session
        self.data = data
        self.earlier_expiry_s = earlier_expiry_s

    def release(self, state: NodeState) -> None:
        connection = self.connection
        session = self.session
        assert connection is not None
        if connection.state != OPENING or session.connection is not connection:
            return
        if (
            connection.proof is not None
            and session.subscriptions
            and waits_for_decisions(state, connection, session, self, self.earlier_expiry_s)
        ):
            return
        connection.state = OPEN
        note_connected(state, connection, session)
        connection.limit_packets(packet_bytes_max(state, connection))
        state.pending_connects.leave(connection)
        connection.forget_remote()
        connection.send(self.data, state.dirty)
        resume(state, session, connection)
        if session.rare.owed:
            resume_scans(state, session)
        proceed(state, session)
        open_groups(state, session, connection)
        if connection.input_paused:
            state.effects.append(ResumeInput(connection))


def admit(state: NodeState, connection: Connection, extra: Properties | None = None) -> None:
    """Opens the session of an authenticated client, after the hooks that give rights."""
    state.pending_connects.note_proof(connection)
    if proved_connections(state) > state.config.connections:
        refuse(state, connection, Rejection("too many connections"))
        return
    if is_refused(state, connection, entry_refusal(state, connection)):
        return
    if state.admission.asks_rights:
        packet = connection.connect
        assert packet is not None
        connection.client_id = packet.client_id
        connection.state = AUTHENTICATING
        connection.input_paused = True
        state.effects.append(AskRights(connection, extra))
    else:
        open_session(state, connection, extra)


def proved_connections(state: NodeState) -> int:
    """The connections that count for `limits.connections`. The others give way to new ones, so they
    may not keep clients out."""
    return state.connections - state.pending_connects.unproved


def open_session(
    state: NodeState,
    connection: Connection,
    extra: Properties | None = None,
) -> None:
    """Finds or makes the session of an authenticated client, and replies with CONNACK.
    [MQTT-3.2.0-1]

    The checks of rights and of CONNACK's size come before the takeover, and so do the questions to
    a service. Otherwise a client that is refused could still close the connection of the session's
    client.
    """
    packet = connection.connect
    assert packet is not None
    answer: Properties = {} if extra is None else dict(extra)
    if is_refused(state, connection, _take_client_id(state, connection, packet, answer)):
        return
    client_id = connection.client_id
    # The packet is not needed any more; its user properties may take 20 times its size in memory.
    connection.connect = None
    if is_refused(state, connection, _will_refusal(state, connection, packet)):
        return
    expiry_s = NEVER_EXPIRES
    if not connection.is_internal:
        expiry_s = _expiry(state, packet, answer)
    _announce(state, connection, packet, answer)
    reply = _connack(connection, False, answer)
    if not reply:
        text = (
            f"CONNACK does not fit into {connection.packet_bytes_max} bytes, the client's maximum"
        )
        refuse(state, connection, Rejection(text, reasons.PACKET_TOO_LARGE))
        return
    session = state.sessions.get(client_id)
    known = session or state.recorded.sessions.get(client_id)
    if is_refused(state, connection, _session_refusal(state, connection, session, known)):
        return
    is_proved = connection.proof is not None
    if (
        known is not None
        and is_proved
        and not packet.clean_start
        and waits_before_takeover(state, connection, known, partial(_reopen, extra))
    ):
        connection.connect = packet
        return
    give_meter(state, connection)
    if expiry_s > 0 or packet.will is not None:
        unpaid = _pay_open(state, connection, packet, known)
        if is_refused(state, connection, unpaid):
            return
    connection.state = OPENING
    opening = AcceptedConnect(packet, expiry_s, answer, reply)
    if is_proved and not packet.clean_start:
        opening.filters = checksum_asked(connection, known)
    state.cluster.open_session(connection, client_id, opening)


def _session_refusal(
    state: NodeState, connection: Connection, session: Session | None, known: Session | None
) -> Rejection | None:
    """The reason why the client may not have the session of its client id: the one in memory, one
    that is known from the log, or a new one."""
    client_id = connection.client_id
    refusal = name_refusal(state, connection, client_id)
    if refusal is not None:
        return refusal
    if session is not None and not may_open(state, session, connection):
        state.stats.sessions_denied += 1
        return OTHER_USER
    if session is None:
        refusal = room_refusal(state, connection, client_id)
    if refusal is None and known is None and len(client_id.encode()) > state.config.client_id_bytes:
        text = f"the client id has more than {state.config.client_id_bytes} bytes"
        return Rejection(text, reasons.CLIENT_IDENTIFIER_NOT_VALID)
    return refusal


def _pay_open(
    state: NodeState, connection: Connection, packet: Connect, known: Session | None
) -> Rejection | None:
    """Charges a session that is recorded. Returns the reason to refuse its client."""
    if connection.is_internal:
        return None
    will = packet.will
    resumes = known is not None and not packet.clean_start and will is None
    refusal = recording_refusal(state, connection, is_known=resumes)
    if refusal is not None:
        return refusal
    if is_in_debt(state, connection):
        state.stats.refused_rate += 1
        return IN_DEBT
    will_bytes = 0
    if will is not None:
        will_bytes = len(will.topic) + len(will.payload) + len(encode_block(will.properties))
    charge_open(state, connection, will_bytes)
    return None


def _reopen(extra: Properties | None, state: object, connection: Connection) -> None:
    assert isinstance(state, NodeState)
    open_session(state, connection, extra)


def _take_client_id(
    state: NodeState, connection: Connection, packet: Connect, answer: Properties
) -> Rejection | None:
    """Gives the connection its client id, or returns the reason to refuse the client."""
    client_id = packet.client_id
    if not client_id:
        if packet.protocol_level < 4 or (packet.protocol_level < 5 and not packet.clean_start):
            # [MQTT3-3.1.3-8]; MQTT 3.1 has no empty client id
            text = "an empty client id needs clean session 1"
            return Rejection(text, reasons.CLIENT_IDENTIFIER_NOT_VALID)
        # [MQTT-3.1.3-6] [MQTT-3.1.3-7] [MQTT-3.2.2-16]
        state.client_id_count += 1
        client_id = f"{state.client_id_prefix}{state.client_id_count}"
        answer[p.ASSIGNED_CLIENT_IDENTIFIER] = client_id
    if client_id == FEDERATION and not connection.is_internal:
        text = f"the client id {FEDERATION} is the broker's own"
        return Rejection(text, reasons.CLIENT_IDENTIFIER_NOT_VALID)
    if is_shared(client_id):
        text = "client ids that begin with $share/ are those of shared groups: use another one"
        return Rejection(text, reasons.CLIENT_IDENTIFIER_NOT_VALID)
    connection.client_id = client_id
    return None


def _will_refusal(state: NodeState, connection: Connection, packet: Connect) -> Rejection | None:
    will = packet.will
    if will is None or may_leave_now(state, connection, will.topic):
        return None
    state.stats.wills_denied += 1
    if is_bridge_notice(will.topic):
        packet.will = None
        return None
    text = "the client may not publish to the topic of its will"
    return Rejection(text, reasons.NOT_AUTHORIZED)


def finish_open(
    state: NodeState,
    connection: Connection,
    session: Session,
    present: bool,
    opening: AcceptedConnect,
) -> None:
    """Completes an open in a cluster: this node owns the session, which is in no table here yet."""
    session.life = session.life or session.epoch
    state.sessions[session.client_id] = session
    earlier_expiry_s = session.expiry_s
    _attach(state, connection, session, opening.will, opening.expiry_s)
    _apply_limits(state, connection, session)
    session.recorded = opening.expiry_s > 0 or session.will is not None
    reply = opening.reply
    if present or not reply:
        reply = _connack(connection, present, opening.reply_properties)
    ConnackPromise(connection, session, reply, earlier_expiry_s).release(state)
    expel_if_banned(state, connection)


def _expiry(state: NodeState, packet: Connect, answer: Properties) -> int:
    """The session expiry interval in seconds, as granted (section 3.1.2.11.2)."""
    maximum = state.config.session_expiry_s_max
    if packet.protocol_level < 5:
        return 0 if packet.clean_start else maximum
    wanted = packet.properties.get(p.SESSION_EXPIRY_INTERVAL, 0)
    assert isinstance(wanted, int)
    if wanted > maximum:
        answer[p.SESSION_EXPIRY_INTERVAL] = maximum
        return maximum
    return wanted


def _attach(
    state: NodeState, connection: Connection, session: Session, will: Will | None, expiry_s: int
) -> None:
    session.connection = connection
    connection.session = session
    session.expiry_s = expiry_s
    state.cancel(session.rare.expiry_timer)
    # A will that was still due is not published once the client is back. [MQTT-3.1.3-9]
    state.cancel(session.rare.will_timer)
    session.will = will
    attach(state, session, connection)
    give_meter(state, connection)
    if session.inbound is not None:
        # A doubtful id counts once the client has used it on this connection.
        connection.unacknowledged = len(session.inbound.keys() - (session.rare.doubtful or ()))
    if session.positions is None and not session.outbox:
        session.tailing = True
    # Routes contain only sessions that may read the topic. A resumed session may have other rights.
    if session.subscriptions:
        state.change_routes()
    if not connection.is_internal:
        state.stats.connections_opened += 1
        state.stats.clients_maximum = max(state.stats.clients_maximum, state.connections)


def packet_bytes_max(state: NodeState, connection: Connection) -> int:
    """The most bytes of a packet that the node accepts on this connection."""
    return connection.listener.packet_bytes_max or state.config.packet_bytes_max


def _connack(connection: Connection, present: bool, answer: Properties) -> bytes:
    """The encoded CONNACK, or b"" if it is larger than the client takes. [MQTT-3.1.2-24]"""
    packet = Connack(present, reasons.SUCCESS, answer)
    return encode_within(packet, connection.version, connection.packet_bytes_max)


def _announce(
    state: NodeState, connection: Connection, packet: Connect, answer: Properties
) -> None:
    """Exchanges limits: keeps those of the client, and puts the broker's into CONNACK."""
    config = state.config
    keep_alive_s = packet.keep_alive_s
    receive_maximum = 65535
    if packet.protocol_level >= 5:
        given = packet.properties
        receive_maximum = number_of(given, p.RECEIVE_MAXIMUM, 65535)
        wanted = number_of(given, p.TOPIC_ALIAS_MAXIMUM, 0)
        connection.alias_out_max = min(wanted, config.outgoing_topic_alias_max)
        if connection.alias_out_max:
            connection.aliases_out = AliasesOut()
        maximum = config.keep_alive_s_max
        if maximum < 65535 and (keep_alive_s == 0 or keep_alive_s > maximum):
            # [MQTT-3.1.2-21] [MQTT-3.2.2-21]
            keep_alive_s = maximum
            answer[p.SERVER_KEEP_ALIVE] = keep_alive_s
        answer[p.RECEIVE_MAXIMUM] = config.receive_maximum
        if config.topic_alias_max:
            answer[p.TOPIC_ALIAS_MAXIMUM] = config.topic_alias_max
        if config.qos_max < 2:
            answer[p.MAXIMUM_QOS] = config.qos_max
        if not config.retain_available:
            answer[p.RETAIN_AVAILABLE] = 0
        answer[p.MAXIMUM_PACKET_SIZE] = packet_bytes_max(state, connection)
        if not config.wildcard_available:
            answer[p.WILDCARD_SUBSCRIPTION_AVAILABLE] = 0
        if not config.shared_available:
            answer[p.SHARED_SUBSCRIPTION_AVAILABLE] = 0
        if number_of(given, p.REQUEST_RESPONSE_INFORMATION, 0) == 1:
            # A topic prefix of the client's own for its response topics (section 4.10.1).
            answer[p.RESPONSE_INFORMATION] = f"responses/{connection.client_id}"
        pairs = given.get(p.USER_PROPERTY)
        is_asked = isinstance(pairs, list) and SEQUENCES_ASKED in pairs
        # [MQTT-3.2.2-20]
        if is_asked and connection.packet_bytes_max >= ROOMY_PACKET_BYTES:
            answer[p.USER_PROPERTY] = [SEQUENCES_KNOWN]
            if isinstance(pairs, list) and SEQUENCES_2_ASKED in pairs:
                connection.numbers_qos2 = True
                answer[p.USER_PROPERTY] = [SEQUENCES_KNOWN, SEQUENCES_2_KNOWN]
    connection.receive_maximum = receive_maximum
    connection.keep_alive_s = keep_alive_s


def _apply_limits(state: NodeState, connection: Connection, session: Session) -> None:
    """Applies the limits that CONNACK announces."""
    session.inflight_max = min(connection.receive_maximum, state.config.inflight_max)
    if connection.is_bridge and connection.version < 5:
        session.inflight_max = min(session.inflight_max, BRIDGE_INFLIGHT_MAX)
    start_keep_alive(state, connection)
