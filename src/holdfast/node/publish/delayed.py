"""Accepts delayed messages, and publishes them when they are due.

The leader of its partition publishes a message that is due. A leader may take over while
the record of the previous one is under way, so both may append one. The admission at the leader
stores the first of them only: it knows the uncommitted records of the partition, and the table
knows the committed ones (`Admission`). Therefore a leader may also try again, and no leader has to
know what another one has begun.

The first record that ends a message decides whether it is published, and no other one is appended.
Counter-example: a cancellation is on its way to the disk when the message is due. If the
publication followed, the operator would be told that the message is cancelled, and the receivers
would have it.

Their rights are checked twice, like those of wills: against the real topic when the client
publishes, and when the message is due, because rules may have changed meanwhile.
"""

from collections.abc import Callable
from typing import Final

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.admission.limits import CLIENT, USER
from holdfast.node.admission.meters import names_of
from holdfast.node.delivery.delivery import deliver
from holdfast.node.features import DELAYED_MESSAGES
from holdfast.node.node_state import NodeState, Promise, Route
from holdfast.node.publish.completion import name_user, retaining_user
from holdfast.node.publish.delayed_table import (
    ACTS_FOR,
    Delayed,
    Place,
    split_delayed,
    split_publisher,
    with_publisher,
)
from holdfast.node.refusal import Rejection
from holdfast.node.rights import acting_for, has_passing_rules, may_publish_later, proves_names
from holdfast.node.routing.routing import find_route, look_up
from holdfast.node.session.connection import Connection
from holdfast.node.session.message import Message, stored_message
from holdfast.node.session.session import Session
from holdfast.node.state.recorded_state import DELAYED
from holdfast.protocol.mqtt.publish import Publish
from holdfast.protocol.topics.names import InvalidTopic

PER_TURN: Final = 200
"""The most delayed messages that are published in one turn."""
RECHECK_S: Final = 0.1
"""The time in seconds after which a node looks again that could publish nothing of what is due: its
disk is full."""
RETRY_S: Final = 5.0
"""The time in seconds after which the leader of a partition publishes a delayed message again whose
record it has not applied. The leader's admission stores it once."""


def delayed_route(state: NodeState, publish: Publish) -> Route:
    """The route of the real topic of a delayed message. Raises `InvalidDelay` or `InvalidTopic`."""
    _, topic = split_delayed(publish.topic, state.config.delay_s_max)
    return look_up(state, topic)


def delayed_record(
    state: NodeState, connection: Connection, session: Session, publish: Publish, route: Route
) -> Record:
    """The first record of a delayed message. `route` is that of its real topic. Raises
    `InvalidDelay`."""
    username = session.username
    acts_for = acting_for(connection)
    if acts_for is not None:
        username = f"{acts_for[0] or ''}{ACTS_FOR}{acts_for[1]}"
    return Record(
        route.partition,
        log_record.MESSAGE,
        flags=publish.qos
        | log_record.FLAG_DELAYED
        | (log_record.FLAG_RETAIN if publish.retain else 0),
        timestamp_us=state.wall_us,
        topic=publish.topic,
        client_id=session.key,
        properties=with_publisher(publish.properties, username, has_passing_rules(connection)),
        payload=publish.payload,
    )


def delayed_refusal(state: NodeState, record: Record) -> Rejection | None:
    """The reason why no further delayed message is accepted now. What waits for the log does not
    count."""
    config = state.config
    table = state.delayed
    older = state.cluster.older_nodes(DELAYED_MESSAGES)
    if older:
        return Rejection(older)
    if len(table) >= config.delayed_messages_max:
        return Rejection(f"{config.delayed_messages_max} delayed messages wait, which is the limit")
    if table.count_of(record.client_id) >= config.delayed_messages_per_client:
        most = config.delayed_messages_per_client
        return Rejection(f"{most} delayed messages of this client wait, which is the limit")
    message = Delayed(record)
    if message.size_bytes > config.delayed_bytes_max - table.bytes.total:
        return Rejection(f"the delayed messages need more than {config.delayed_bytes_max} bytes")
    if proves_names(state) and not (
        table.messages.has_room(message.owner, 1, config.delayed_messages_max)
        and table.bytes.has_room(message.owner, message.size_bytes, config.delayed_bytes_max)
    ):
        return Rejection("this user has as many delayed messages as there is room for all others")
    return None


def publish_due(state: NodeState, is_ours: Callable[[int], bool]) -> None:
    """Publishes the delayed messages that are due in the partitions that are this node's to
    publish, and starts the timer again."""
    recorded = state.recorded
    table = recorded.delayed
    if table.armed_at > state.now:
        return
    table.armed_at = 0.0
    count = 0
    if not state.disk_full:
        for message in table.take_due(state.wall_us, is_ours, PER_TURN, int(RETRY_S * 1e6)):
            _publish(state, message)
            count += 1
    due_us = table.earliest_us()
    if due_us is None:
        return
    if state.disk_full or due_us <= state.wall_us:
        # The rest in the next turn. Other nodes publish theirs meanwhile.
        table.armed_at = recorded.now + (0.001 if count == PER_TURN else RECHECK_S)
        recorded.arm(table.armed_at, DELAYED, table)
        return
    recorded.arm_delayed()


def _publish(state: NodeState, message: Delayed) -> None:
    """Publishes a delayed message, and records in the same record that it is over."""
    if state.cluster.ends_delayed(message.place):
        return
    waiting = message.record
    username, is_given, properties = split_publisher(waiting.properties)
    try:
        route = find_route(state, message.topic)
    except InvalidTopic:
        end_delayed(state, message.place)
        return
    client_id = waiting.client_id.decode("utf-8", "replace")
    if username is not None and ACTS_FOR in username:
        name, _, client_id = username.partition(ACTS_FOR)
        username = name or None
    is_banned = _is_banned(state, client_id, username)
    if is_banned or (
        not is_given and not may_publish_later(state, username, client_id, route.topic)
    ):
        # The rules have changed since the client published, or it is banned now.
        state.stats.delayed_denied += 1
        fields: dict[str, object] = {
            "client": client_id,
            "user": username or "",
            "topic": route.topic,
        }
        state.note("warning", "delayed_denied", fields)
        end_delayed(state, message.place)
        return
    state.stats.delayed_published += 1
    record = Record(
        waiting.partition,
        log_record.MESSAGE,
        flags=waiting.flags
        & (log_record.FLAG_QOS_MASK | log_record.FLAG_RETAIN | log_record.FLAG_DELAYED),
        timestamp_us=state.wall_us,
        topic=message.topic,
        client_id=waiting.client_id,
        sequence=waiting.offset,
        properties=properties,
        payload=waiting.payload,
    )
    retains = record.flags & log_record.FLAG_RETAIN != 0
    name_user(record, retaining_user(state, retains, username))
    if record.flags & log_record.FLAG_QOS_MASK == 0:
        _publish_qos0(state, record, route, message)
    else:
        # The message is delivered when it comes back committed, on every node.
        state.append(record)


def _is_banned(state: NodeState, client_id: str, username: str | None) -> bool:
    """Whether a client that has left a delayed message is banned. Its address is not known any
    more."""
    names = names_of(client_id, username, "", "")
    return any(
        state.bans.find(scope, names[scope], state.wall_us) is not None for scope in (CLIENT, USER)
    )


def _publish_qos0(state: NodeState, record: Record, route: Route, waiting: Delayed) -> None:
    """Publishes a message of QoS 0 at once. The record follows; after a crash before it, or at
    another leader, the message is published again. While its own record is not committed, this node
    only tries the record again."""
    if not waiting.is_delivered:
        waiting.is_delivered = True
        message: Message = stored_message(record, 0, record.timestamp_us)
        message.partition = record.partition
        deliver(state, route, message)
        state.cluster.spread(message, route.topic, 0)
    state.append(record)


def end_delayed(state: NodeState, place: Place, promise: Promise | None = None) -> None:
    """Ends a delayed message without publishing it. The promise is refused if it is over already,
    or its publication is on its way to the log."""
    partition, offset = place
    record = Record(partition, log_record.DELAYED, timestamp_us=state.wall_us, sequence=offset)
    if promise is None:
        state.append(record)
    else:
        state.publish(record, promise)
