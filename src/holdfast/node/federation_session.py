"""The broker's own session, through which a federation takes part in it.

Outbound: a durable session like any client's. It has No Local, so a message that came from the
federation never goes back. It has a cursor in the log, so a message that the broker has
acknowledged to its publisher reaches the federation after any crash. It does not count as a client,
access control does not apply to it, and no client may use its client id.

Inbound: a record by a producer of its own. Its position in the producer table makes a message that
the federation delivers again after a crash be stored once, at QoS 2 as well. The record contains
the message's audience, so every reader, now or after a restart, leaves out the groups that clients
of another member serve.
"""

from collections.abc import Callable

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.connections.close import handle_connection_lost, log_end
from holdfast.node.connections.session_open import open_session
from holdfast.node.delivery.delivery import deliver
from holdfast.node.delivery.retained import send_late_retained
from holdfast.node.delivery.subscribe import handle_subscribe
from holdfast.node.delivery.unsubscribe import handle_unsubscribe
from holdfast.node.node_state import NodeState, Promise
from holdfast.node.publish.inbound import log_qos0
from holdfast.node.refusal import Rejection
from holdfast.node.routing.routing import find_route
from holdfast.node.session.connection import OPEN, Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.session.message import Message
from holdfast.node.session.session import FEDERATION
from holdfast.node.state.member_values import member_home
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import Connect, Subscribe, SubscriptionRequest, Unsubscribe

REMOTE = "federation"


def connect(state: NodeState, transport: object) -> Connection:
    """Opens or resumes the federation's session, as MQTT 5. CONNACK comes as to a client."""
    connection = Connection(state.config.packet_bytes_max, REMOTE, ListenerRules(REMOTE))
    connection.is_internal = True
    connection.transport = transport
    connection.version = 5
    connection.last_received = state.now
    connection.connect = Connect(5, False, 0, FEDERATION)
    open_session(state, connection)
    return connection


def disconnect(state: NodeState, connection: Connection) -> None:
    """Ends the connection. The session stays, with the messages that it has not acknowledged."""
    handle_connection_lost(state, connection)


def has_session(state: NodeState) -> bool:
    """Whether the log has the session, of this run or an earlier one."""
    return FEDERATION in state.recorded.sessions


def end(state: NodeState) -> None:
    """Forgets the session of an earlier run, because no federation will read on."""
    log_end(state, state.recorded.sessions[FEDERATION])


def subscribe(state: NodeState, connection: Connection, filters: list[str]) -> None:
    """Subscribes at QoS 2, with No Local and without the messages that are retained already."""
    session = connection.session
    assert session is not None
    assert connection.state == OPEN
    requests = [SubscriptionRequest(filter, 2, True, True, 2) for filter in filters]
    handle_subscribe(state, connection, session, Subscribe(1, requests))


def unsubscribe(state: NodeState, connection: Connection, filters: list[str]) -> None:
    """Removes the session's subscriptions to these filters."""
    session = connection.session
    assert session is not None
    assert connection.state == OPEN
    handle_unsubscribe(state, connection, session, Unsubscribe(1, filters))


def group_starts(state: NodeState, topic: bytes) -> dict[str, list[int]]:
    """The offsets at which the shared groups begin that want a topic, by key, as far as this node
    knows them. A coordinator at this node knows the start of a group, which is older than its
    members' connections. Counter-example: a member comes back, and with it the group of the members
    here begins. A message from before that is the group's, too."""
    return {
        group.key: group.start or [0] * state.config.partitions
        for group in find_route(state, topic).groups
        if group.coordination is not None
    }


def publish(
    state: NodeState,
    message: Message,
    producer: bytes,
    epoch: int,
    sequence: int,
    done: Callable[[bool], None],
) -> bool:
    """Publishes a message from the federation, unless its producer has stored it already.

    The message counts as stored if the topic's partition has (`epoch`, `sequence`) of the producer,
    or a later one. QoS 0 ignores both. `done` is called with True when the message is committed,
    or, at QoS 0, delivered; with False when it is refused later, so the caller publishes it again.
    Those refused later come in the order in which they were published. False: there is no room now,
    so the caller tries again. An invalid topic name raises `InvalidTopic`.
    """
    route = find_route(state, message.topic)
    if route.reserved:
        return _refuse_reserved(state, done)
    if message.retain and not state.config.retain_available:
        message.retain = False
    message.qos = min(message.qos, state.config.qos_max)
    if message.qos == 0:
        deliver(state, route, message)
        state.cluster.spread(message, route.topic, route.behind)
        if (route.logged or message.retain) and not state.disk_full:
            log_qos0(state, message, route)
        done(True)
        return True
    if state.disk_full or state.is_congested():
        return False
    flags = message.qos | log_record.FLAG_PRODUCER
    if message.retain:
        flags |= log_record.FLAG_RETAIN
    audience = message.audience_field()
    if audience:
        flags |= log_record.FLAG_AUDIENCE
    record = Record(
        route.partition,
        log_record.MESSAGE,
        flags,
        message.timestamp_us,
        message.topic,
        message.publisher,
        message.properties,
        message.payload,
        producer=producer,
        producer_epoch=epoch,
        sequence=sequence,
        audience=audience,
    )
    # The leader recognises a repetition, also of a record that is not committed, and delivers.
    state.publish(record, DonePromise(done))
    return True


def retain(state: NodeState, message: Message, done: Callable[[bool], None]) -> bool:
    """Replaces the retained message of a topic, or removes it if the payload is empty.

    This is not a publication. Only clients that subscribed when the topic had no retained message
    receive it, as retained. `done` and the result are as with `publish`. An invalid topic name
    raises `InvalidTopic`.
    """
    route = find_route(state, message.topic)
    if route.reserved:
        return _refuse_reserved(state, done)
    if not state.config.retain_available:
        done(True)
        return True
    message.retain = True
    message.qos = min(message.qos, state.config.qos_max)
    if _is_settled(state, route.partition) and _is_same(state.retained.get(route.topic), message):
        state.promise(DonePromise(done))
        return True
    if state.disk_full or state.is_congested():
        return False
    record = Record(
        route.partition,
        log_record.RETAINED,
        message.qos | log_record.FLAG_RETAIN,
        message.timestamp_us,
        message.topic,
        message.publisher,
        message.properties,
        message.payload,
    )
    state.publish(record, FederatedRetainedPromise(route.topic, done))
    return True


def store_values(
    state: NodeState, start: int, values: list[tuple[bytes, bytes]], done: Callable[[bool], None]
) -> None:
    """Changes values of the member (`node.state.member_values`), in order; empty: removed. `done`
    is called with True once all are committed and applied here. They count if `start` was in
    force."""
    home = member_home(state.config.partitions)
    promise = DonePromise(done)
    for number, (key, value) in enumerate(values, 1):
        record = Record(
            home,
            log_record.FEDERATION,
            timestamp_us=state.wall_us,
            client_id=key,
            sequence=start,
            payload=value,
        )
        if number < len(values):
            state.append(record)
        else:
            state.publish(record, promise)


def _refuse_reserved(state: NodeState, done: Callable[[bool], None]) -> bool:
    """Drops a message under $SYS: only this broker publishes there, never another member."""
    state.stats.authorizations_denied += 1
    done(True)
    return True


def _is_settled(state: NodeState, partition: int) -> bool:
    """Whether the retained messages of a partition are those of all its records. Counter-example
    without it: a topic has A, and the record of B is appended and not committed. A comes again as
    the newest version, and is taken for the one that is there. The topic is left with B."""
    return state.delivered[partition] == state.journal.next_offset[partition]


def _is_same(before: Message | None, message: Message) -> bool:
    if before is None:
        return not message.payload
    if before.expiry_s >= 0 or message.expiry_s >= 0:
        # The remaining expiry may differ, so the message is stored again.
        return False
    return (before.payload, before.qos, before.properties) == (
        message.payload,
        message.qos,
        message.properties,
    )


class DonePromise(Promise):
    """The promise of a call to `done`: with True once the message is stored."""

    def __init__(self, done: Callable[[bool], None]) -> None:
        super().__init__()
        self.done = done

    def release(self, state: NodeState) -> None:
        self.done(True)

    def refuse(self, state: NodeState, refusal: Rejection) -> None:
        # A lower epoch of the producer: the federation has stored later messages of the stream.
        self.done(refusal.reason == reasons.IMPLEMENTATION_SPECIFIC_ERROR)


class FederatedRetainedPromise(DonePromise):
    """The promise for a retained update from the federation, which is applied."""

    def __init__(self, topic: str, done: Callable[[bool], None]) -> None:
        super().__init__(done)
        self.topic = topic

    def release(self, state: NodeState) -> None:
        kept = state.retained.get(self.topic)
        if kept is not None and state.recorded.is_first_retained:
            send_late_retained(state, self.topic, kept)
        self.done(True)
