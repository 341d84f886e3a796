"""The broker's own session, through which a federation takes part in it.

What goes out is a durable session like any client's: with No Local, so that what came in never
goes out again, and with a cursor in the log, so that a message that was acknowledged to its
publisher is handed over after any crash. It counts for no client, access control does not apply to
it, and nobody else gets its client id.

What comes in is a record by a producer of its own. Its place in the producer table is what makes a
message that is brought again after a crash be stored once, at QoS 2 as well. The record has the
message's audience: whoever reads it, now or after a restart, finds in it that another member's
clients have it.
"""

from collections.abc import Callable

from holdfast.broker.connections.close import end_session, handle_connection_lost
from holdfast.broker.connections.connect import open_session
from holdfast.broker.delivery.delivery import deliver
from holdfast.broker.delivery.retained import send_late
from holdfast.broker.delivery.subscriptions import handle_subscribe, handle_unsubscribe
from holdfast.broker.publish.completion import HeldPublish, HeldRetained
from holdfast.broker.publish.inbound import log_qos0
from holdfast.broker.publish.producer_dedup import note_evicted
from holdfast.broker.routing import find_route
from holdfast.broker.session.audience import encode_audience
from holdfast.broker.session.connection import OPEN, Connection
from holdfast.broker.session.message import Message
from holdfast.broker.session.session import FEDERATION, Session
from holdfast.broker.state import Held, NodeState, Route
from holdfast.protocol.mqtt.packets import Connect, Subscribe, SubscriptionRequest, Unsubscribe
from holdfast.storage import record as log_record
from holdfast.storage.record import Record

REMOTE = "federation"


def connect(state: NodeState, transport: object) -> Connection:
    """Open the session, or go on with it; CONNACK comes as to a client. MQTT 5."""
    connection = Connection(state.config.packet_bytes_max, REMOTE, REMOTE)
    connection.is_internal = True
    connection.transport = transport
    connection.version = 5
    connection.last_received = state.now
    connection.connect = Connect(5, False, 0, FEDERATION)
    open_session(state, connection)
    return connection


def disconnect(state: NodeState, connection: Connection) -> None:
    """The session stays, and with it what it has not acknowledged."""
    handle_connection_lost(state, connection)


def end(state: NodeState) -> bool:
    """Forget the session of an earlier run: nobody will read on. False if there is none."""
    session = state.sessions.get(FEDERATION)
    if session is None:
        return False
    end_session(state, session)
    return True


def subscribe(state: NodeState, connection: Connection, filters: list[str]) -> None:
    """At QoS 2, without its own messages, without what is retained already."""
    session = connection.session
    assert isinstance(session, Session)
    assert connection.state == OPEN
    requests = [SubscriptionRequest(filter, 2, True, True, 2) for filter in filters]
    handle_subscribe(state, connection, session, Subscribe(1, requests))


def unsubscribe(state: NodeState, connection: Connection, filters: list[str]) -> None:
    session = connection.session
    assert isinstance(session, Session)
    assert connection.state == OPEN
    handle_unsubscribe(state, connection, session, Unsubscribe(1, filters))


def groups_for(state: NodeState, topic: bytes) -> list[str]:
    """Keys of the shared groups here that want a topic. Raises InvalidTopic."""
    return [group.key for group in find_route(state, topic).groups]


def groups_without(state: NodeState, topic: bytes, partition: int, offset: int) -> list[str]:
    """Keys of the shared groups here that want a topic and have begun after that record of it."""
    return [
        group.key
        for group in find_route(state, topic).groups
        if group.start is not None and offset < group.start[partition]
    ]


def publish(
    state: NodeState,
    message: Message,
    producer: bytes,
    epoch: int,
    sequence: int,
    done: Callable[[], None],
) -> bool:
    """Publish what came in, unless the producer has stored (`epoch`, `sequence`) or a later one in
    the topic's partition already; at QoS 0 these say nothing. `done`: it is committed, now or
    before, or, at QoS 0, handed out. False: there is no room for now, try again. Raises
    InvalidTopic.
    """
    route = find_route(state, message.topic)
    if route.reserved:
        return _refuse_reserved(state, done)
    if message.retain and not state.config.retain_available:
        message.retain = False
    message.qos = min(message.qos, state.config.qos_max)
    if message.qos == 0:
        deliver(state, route, message)
        if (route.logged or message.retain) and not state.disk_full:
            log_qos0(state, message, route)
        done()
        return True
    if is_stored(state, producer, route.partition, epoch, sequence):
        state.stats.producer_duplicates += 1
        # What stored it may still be on its way to the disk.
        state.hold(HeldDone(done))
        return True
    if state.disk_full or state.is_congested():
        return False
    flags = message.qos | log_record.FLAG_PRODUCER
    if message.retain:
        flags |= log_record.FLAG_RETAIN
    audience = b""
    if message.audience is not None:
        flags |= log_record.FLAG_AUDIENCE
        audience = encode_audience(message.audience)
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
    evicted = state.producers.store(producer, route.partition, epoch, sequence, state.wall_us)
    if evicted:
        note_evicted(state, evicted)
    state.append(record)
    state.hold(HeldArrival(record, route, done))
    return True


def retain(state: NodeState, message: Message, done: Callable[[], None]) -> bool:
    """What is retained under the topic becomes this, with an empty payload nothing: no publication,
    but clients that subscribed when there was nothing get it as retained. `done`: it is committed.
    False: there is no room for now. Raises InvalidTopic.
    """
    route = find_route(state, message.topic)
    if route.reserved:
        return _refuse_reserved(state, done)
    if not state.config.retain_available:
        done()
        return True
    message.retain = True
    message.qos = min(message.qos, state.config.qos_max)
    before = state.retained.get(route.topic)
    assert before is None or isinstance(before, Message)
    if _is_same(before, message):
        state.hold(HeldDone(done))
        return True
    if state.disk_full or state.is_congested():
        return False
    message.partition = route.partition
    message.offset = state.append(
        Record(
            route.partition,
            log_record.RETAINED,
            message.qos | log_record.FLAG_RETAIN,
            message.timestamp_us,
            message.topic,
            message.publisher,
            message.properties,
            message.payload,
        )
    )
    state.hold(HeldFederatedRetained(message, route.topic, done))
    return True


def _refuse_reserved(state: NodeState, done: Callable[[], None]) -> bool:
    """What this broker alone says under $SYS no other member says in its place."""
    state.stats.authorizations_denied += 1
    done()
    return True


def _is_same(before: Message | None, message: Message) -> bool:
    if before is None:
        return not message.payload
    if before.expiry_s >= 0 or message.expiry_s >= 0:
        # What is left of it is told anew.
        return False
    return (before.payload, before.qos, before.properties) == (
        message.payload,
        message.qos,
        message.properties,
    )


def is_stored(
    state: NodeState, producer_id: bytes, partition: int, epoch: int, sequence: int
) -> bool:
    table = state.producers
    producer = table.find(producer_id, state.wall_us)
    place = None if producer is None else producer.place(partition)
    if place is None or place.stored_us < state.wall_us - table.expiry_us:
        return False
    return epoch < place.epoch or (epoch == place.epoch and sequence <= place.sequence)


class HeldArrival(HeldPublish):
    """A message that came in, appended and not yet committed."""

    def __init__(self, record: Record, route: Route, done: Callable[[], None]) -> None:
        super().__init__(record, route, None, 0)
        self.done = done

    def release(self, state: NodeState) -> None:
        super().release(state)
        self.done()


class HeldFederatedRetained(HeldRetained):
    def __init__(self, message: Message, topic: str, done: Callable[[], None]) -> None:
        super().__init__(message, topic)
        self.done = done

    def release(self, state: NodeState) -> None:
        is_new = state.retained.get(self.topic) is None
        super().release(state)
        if is_new and state.retained.get(self.topic) is not None:
            send_late(state, self.topic, self.message)
        self.done()


class HeldDone(Held):
    def __init__(self, done: Callable[[], None]) -> None:
        super().__init__()
        self.done = done

    def release(self, state: NodeState) -> None:
        self.done()
