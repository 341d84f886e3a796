"""Inbound messages: PUBLISH, PUBREL and the broker's own.

QoS 1 and 2 messages are appended to the log; the rest (see `completion`) happens when their record
is committed.
"""

from typing import Final

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.admission.observer import ClientObserver
from holdfast.node.admission.throttle import charge_publish
from holdfast.node.delivery.delivery import deliver
from holdfast.node.node_state import NodeState, ReplyPromise, Route
from holdfast.node.publish.acceptance import (
    accept,
    refuse,
    release,
)
from holdfast.node.publish.completion import (
    PublishPromise,
    TracedPromise,
    follow_qos0,
    name_user,
    record_of_qos0,
    retaining_user,
)
from holdfast.node.publish.control import COMMAND_TOPIC, take_command
from holdfast.node.publish.delayed import delayed_record, delayed_refusal, delayed_route
from holdfast.node.publish.delayed_table import DELAYED_PREFIX, InvalidDelay, mounted, split_delayed
from holdfast.node.refusal import NOT_PERMITTED, Rejection
from holdfast.node.rights import acting_for, is_reserved, may_write
from holdfast.node.routing.routing import look_up, resolved
from holdfast.node.session.connection import ALIASES_IN_BYTES_MAX, AliasesIn, Connection
from holdfast.node.session.message import Message
from holdfast.node.session.session import Session
from holdfast.node.topic_rights.questions import UNANSWERED, asks_to_publish, is_unanswered
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.mqtt.errors import MalformedPacket, ProtocolViolation
from holdfast.protocol.mqtt.packets import PUBCOMP
from holdfast.protocol.mqtt.publish import Publish, decode_publish
from holdfast.protocol.topics.names import InvalidTopic

NOT_DECIDED: Final = Rejection(UNANSWERED)


def handle_publish(state: NodeState, connection: Connection, session: Session) -> None:
    """Checks a PUBLISH, then appends its record, delivers it at once (QoS 0), or refuses it."""
    reader = connection.reader
    assert reader is not None
    version = connection.version
    publish = decode_publish(reader.buffer, reader.first, reader.start, reader.end, version, True)
    state.stats.publish_received += 1
    route = _checked_route(state, connection, publish)
    if not may_write(connection, route):
        _handle_special(state, connection, session, publish, route)
        return
    if connection.meter is not None and not charge_publish(
        state, connection, reader.end - reader.begin, publish.qos
    ):
        return
    if route.version != state.route_version:
        resolved(state, route)
    qos = publish.qos
    tracer = state.tracer
    if tracer is not None:
        publish.properties = tracer.begin(
            route.topic, publish.properties, session.client_id, qos, len(publish.payload)
        )
    if qos == 0:
        state.stats.publish_qos0_received += 1
        _publish_qos0(state, connection, session, publish, route)
        if tracer is not None and tracer.span is not None:
            tracer.end(tracer.span, -1, -1, "")
        return
    record = Record(
        route.partition,
        log_record.MESSAGE,
        qos | log_record.FLAG_RETAIN if publish.retain else qos,
        state.wall_us,
        publish.topic,
        session.key,
        publish.properties,
        publish.payload,
    )
    if publish.retain:
        name_user(record, retaining_user(state, True, _user_of(connection)))
    if accept(state, connection, session, publish, record, None):
        _store(state, connection, publish, record, route)


def _user_of(connection: Connection) -> str | None:
    """The user in whose name a client publishes."""
    acts_for = acting_for(connection)
    return connection.username if acts_for is None else acts_for[0]


def _handle_special(
    state: NodeState, connection: Connection, session: Session, publish: Publish, route: Route
) -> None:
    """Handles a PUBLISH to a topic that the client may not write, as far as is known. A service may
    have to be asked. A delayed message and a command have such topics. Any other is refused."""
    asked = _topic_in_question(state, publish, route)
    if asked and asks_to_publish(state, connection, asked):
        return
    reader = connection.reader
    assert reader is not None
    if connection.meter is not None and not charge_publish(
        state, connection, reader.end - reader.begin, publish.qos
    ):
        return
    if asked and is_unanswered(connection, asked):
        record = Record(route.partition, log_record.MESSAGE, topic=publish.topic)
        if publish.qos == 0:
            refuse(state, connection, publish, NOT_DECIDED)
        else:
            accept(state, connection, session, publish, record, NOT_DECIDED)
    elif route.reserved and publish.topic.startswith(DELAYED_PREFIX):
        publish_delayed(state, connection, session, publish)
    elif not take_command(state, connection, session, publish, route):
        refuse(state, connection, publish, NOT_PERMITTED)


def _topic_in_question(state: NodeState, publish: Publish, route: Route) -> str:
    """The topic whose right decides about a PUBLISH; "": no right helps."""
    if not route.reserved:
        return route.topic
    if route.topic == COMMAND_TOPIC and state.admission.takes_commands:
        return route.topic
    if publish.topic.startswith(DELAYED_PREFIX):
        try:
            topic = split_delayed(publish.topic)[1].decode()
        except InvalidDelay:
            return ""
        return "" if is_reserved(topic) else topic
    return ""


def _checked_route(state: NodeState, connection: Connection, publish: Publish) -> Route:
    """The route of a PUBLISH, after the checks that need no rights. A violation closes the
    connection."""
    if publish.topic_alias or not publish.topic:
        resolve_alias(state, connection, publish)
    if connection.mount:
        publish.topic = mounted(connection.mount, publish.topic)
    route = state.routes.get(publish.topic)
    if route is None:
        try:
            route = look_up(state, publish.topic)
        except InvalidTopic as error:
            # [MQTT-3.3.2-2] no wildcards, [MQTT-4.7.3-1] not empty
            raise ProtocolViolation(reasons.TOPIC_NAME_INVALID, str(error)) from None
    if publish.qos > state.config.qos_max:
        # [MQTT-3.2.2-11]
        raise ProtocolViolation(
            reasons.QOS_NOT_SUPPORTED,
            f"QoS {publish.qos}, the maximum here is {state.config.qos_max}",
        )
    if publish.retain and not state.config.retain_available:
        # [MQTT-3.2.2-14]
        raise ProtocolViolation(reasons.RETAIN_NOT_SUPPORTED, "retained messages are switched off")
    return route


def _store(
    state: NodeState, connection: Connection, publish: Publish, record: Record, route: Route
) -> None:
    """Appends the record and promises its acknowledgement. The record goes to its leader. Delivery
    and the retained update follow when it comes back committed."""
    is_repeated = publish.qos == 2 and publish.dup
    promise = PublishPromise(record, connection, publish.packet_id, is_repeated)
    tracer = state.tracer
    if tracer is not None and tracer.span is not None:
        promise = TracedPromise(record, connection, publish.packet_id, is_repeated, tracer.span)
    promise.precede(route)
    state.publish(record, promise)
    observer = state.admission.observer
    if observer is not None and route.unobserved_by is not observer:
        _observe(observer, connection, publish, route)


def _observe(
    observer: ClientObserver, connection: Connection, publish: Publish, route: Route
) -> None:
    is_observed = observer.observes_messages and observer.published(
        connection, route.topic, publish.payload, publish.qos, publish.retain
    )
    if not is_observed:
        route.unobserved_by = observer


def _publish_qos0(
    state: NodeState, connection: Connection, session: Session, publish: Publish, route: Route
) -> None:
    """Delivers a QoS 0 message at once, unless a message of its topic waits for its commit. It is
    logged only if the configuration says so, or if it is retained."""
    message = Message(
        publish.topic,
        publish.payload,
        0,
        publish.retain,
        publish.properties,
        publish.expiry_s,
        state.wall_us,
        session.key,
    )
    if publish.retain:
        message.user = retaining_user(state, True, _user_of(connection))
    reader = connection.reader
    assert reader is not None
    is_plain = reader.first == 0x30 and not publish.properties and not publish.topic_alias
    # Receivers of the same version get such a message unchanged, so its bytes are kept for them.
    if is_plain and not connection.mount:
        message.adopt_frame(connection.version, reader.buffer[reader.begin : reader.end])
    if not route.logged:
        state.stats.publish_qos0_unlogged += 1
    newest = route.newest
    is_following = newest is not None and not state.disk_full
    if newest is not None and is_following:
        follow_qos0(state, route, message, newest)
    else:
        deliver(state, route, message)
        state.cluster.spread(message, route.topic, route.behind)
    observer = state.admission.observer
    if observer is not None and route.unobserved_by is not observer:
        _observe(observer, connection, publish, route)
    if not is_following and (route.logged or publish.retain) and not state.disk_full:
        log_qos0(state, message, route)


def log_qos0(state: NodeState, message: Message, route: Route) -> None:
    """Appends a QoS 0 message: as a message if the configuration says so, otherwise only as a
    retained update."""
    message.partition = route.partition
    state.append(record_of_qos0(message, route))


def handle_pubrel(
    state: NodeState, connection: Connection, session: Session, packet_id: int
) -> None:
    """Frees the packet id of a QoS 2 message that the publisher has released. The log must contain
    that before PUBCOMP is sent. [MQTT-4.3.3-11] [MQTT-4.3.3-12]"""
    is_known = session.inbound is not None and packet_id in session.inbound
    reason = reasons.SUCCESS
    if not is_known and connection.version >= 5:
        reason = reasons.PACKET_IDENTIFIER_NOT_FOUND
    reply = encode_ack(PUBCOMP, packet_id, reason, connection.version)
    is_counted = is_known and not session.is_doubtful(packet_id)
    release(state, session, packet_id, ReplyPromise(connection, reply, is_counted))


def resolve_alias(state: NodeState, connection: Connection, publish: Publish) -> None:
    """Replaces a topic alias by its topic, or sets it. An alias lasts as long as its connection."""
    alias = publish.topic_alias
    if not alias:
        if connection.version >= 5:
            # [MQTT-3.3.2-8] a topic or an alias
            raise ProtocolViolation(reasons.PROTOCOL_ERROR, "empty topic name without topic alias")
        raise MalformedPacket("empty topic name")
    # [MQTT-3.3.2-8] [MQTT-3.3.2-9] [MQTT-3.2.2-17]
    if alias > state.config.topic_alias_max:
        raise ProtocolViolation(
            reasons.TOPIC_ALIAS_INVALID,
            f"topic alias {alias}, the maximum here is {state.config.topic_alias_max}",
        )
    aliases = connection.aliases_in
    if aliases is None:
        aliases = AliasesIn()
        connection.aliases_in = aliases
    if publish.topic:
        if not aliases.set(alias, publish.topic):
            raise ProtocolViolation(
                reasons.QUOTA_EXCEEDED,
                f"topic aliases for more than {ALIASES_IN_BYTES_MAX} bytes of topics",
            )
        return
    topic = aliases.topics.get(alias)
    if topic is None:
        raise ProtocolViolation(
            reasons.PROTOCOL_ERROR, f"topic alias {alias} was not set on this connection"
        )
    publish.topic = topic


def publish_delayed(
    state: NodeState, connection: Connection, session: Session, publish: Publish
) -> None:
    """Stores a message to `$delayed/SECONDS/TOPIC`, or refuses it. PUBACK follows when it is
    durable, not when it is due.

    The client's packet id, or its number as a producer, is in the record as in that of any message.
    So a repetition is recognised in the same way, across restarts and nodes, before and after the
    message is due.
    """
    try:
        route = delayed_route(state, publish)
        record = delayed_record(state, connection, session, publish, route)
    except (InvalidDelay, InvalidTopic) as error:
        refuse(state, connection, publish, Rejection(str(error), reasons.TOPIC_NAME_INVALID))
        return
    if not may_write(connection, route):
        refuse(state, connection, publish, NOT_PERMITTED)
        return
    refusal = delayed_refusal(state, record)
    is_dropped = publish.qos == 0 and state.disk_full
    if refusal is not None or is_dropped:
        state.stats.refused_quota += 1
    if publish.qos == 0:
        state.stats.publish_qos0_received += 1
        if refusal is None and not is_dropped:
            state.append(record)
    elif accept(state, connection, session, publish, record, refusal):
        is_repeated = publish.qos == 2 and publish.dup
        state.publish(record, PublishPromise(record, connection, publish.packet_id, is_repeated))
