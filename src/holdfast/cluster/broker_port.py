"""The port through which the broker's core uses its cluster.

It passes each call to the part of the cluster node that does it; see `broker.state.ClusterPort`.
"""

from typing import Final

from holdfast.broker.promise import Promise
from holdfast.broker.session.connection import Connection
from holdfast.broker.session.message import Message
from holdfast.broker.session.session import Inflight, Session, Subscription
from holdfast.broker.state import ClusterPort, Group
from holdfast.cluster.parts import Parts
from holdfast.cluster.publish.forwarding import PENDING_BYTES_MAX
from holdfast.protocol.mqtt import reasons
from holdfast.storage.record import Record

UNAVAILABLE_S: Final = 2.0
"""The time in seconds without a majority after which a node refuses messages of QoS 1 and 2."""


class BrokerPort(ClusterPort):
    """The cluster side of `broker.state.ClusterPort`. It has no state of its own."""

    def __init__(self, parts: Parts) -> None:
        self._state = parts.state
        self._fabric = parts.fabric
        self._forwarding = parts.forwarding
        self._promises = parts.forwarding.promises
        self._interest = parts.interest
        self._images = parts.images
        self._retained_updates = parts.retained_updates
        self._opener = parts.opener
        self._shares = parts.groups.shares
        self._coordinator = parts.groups.coordinator

    def append(self, record: Record) -> None:
        self._forwarding.append(record)

    def publish(self, record: Record, promise: Promise) -> None:
        self._forwarding.publish(record, promise)

    def promise(self, promise: Promise) -> None:
        self._promises.add(promise)

    def await_groups(self, promise: Promise, session: Session, entry: Inflight) -> None:
        self._shares.wait(session, entry, promise)

    def promise_interest(self, promise: Promise) -> None:
        self._interest.promise(promise)

    def refusal(self, partition: int) -> int:
        now = self._state.now
        if now > self._fabric.majority_at + UNAVAILABLE_S and not self._fabric.has_majority(now):
            return reasons.QUOTA_EXCEEDED
        return 0

    def is_congested(self, part: int) -> bool:
        return (
            self._forwarding.pending_bytes > PENDING_BYTES_MAX // part
            or self._fabric.journal.pending_bytes > self._state.config.pending_bytes_max // part
        )

    def recorded_sessions(self) -> int:
        return len(self._images.state.sessions)

    def has_recorded(self, client_id: str) -> bool:
        return client_id in self._images.state.sessions

    def spread(self, message: object, topic: str) -> None:
        assert isinstance(message, Message)
        self._interest.spread(message, topic)
        if message.retain:
            self._retained_updates.delivered(topic, message)

    def request_retained(self, subscriptions: list[Subscription]) -> None:
        self._retained_updates.wanted(subscriptions)

    def open_session(self, connection: Connection, client_id: str, opening: object) -> None:
        self._opener.open_session(connection, client_id, opening)

    def session_detached(self, session: Session) -> None:
        self._opener.detached(session)

    def subscribed(self, filter: str) -> None:
        self._interest.subscribed(filter)

    def unsubscribed(self, filter: str) -> None:
        self._interest.unsubscribed(filter)

    def group_changed(self, group: Group) -> None:
        self._shares.changed(group)

    def group_record(self, group: Group, message: object) -> None:
        assert isinstance(message, Message)
        self._coordinator.record(group, message)

    def group_read(
        self, group: Group, records: list[Record], positions: list[int], done: bool
    ) -> None:
        self._coordinator.handle_read(group, records, positions, done)

    def group_finished(self, group: Group, partition: int, offset: int) -> None:
        self._shares.finished(group.key, (partition, offset))

    def group_denied(self, group: Group, partition: int, offset: int) -> None:
        self._shares.denied(group.key, (partition, offset))

    def move_record(self, group: Group, session: Session, partition: int, offset: int) -> None:
        self._shares.kept(group.key, session, (partition, offset))
