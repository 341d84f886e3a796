"""The port through which the broker's core uses its cluster.

It passes each call to the part of the cluster node that does it; see `ClusterPort`.
"""

from collections.abc import Callable

from holdfast.log.record import Record
from holdfast.node.connections.accepted_connect import AcceptedConnect
from holdfast.node.node_state import PROMISE_BYTES, ClusterPort, Promise
from holdfast.node.parts import Parts
from holdfast.node.publish.forwarding import PENDING_BYTES_MAX
from holdfast.node.publish.producer_dedup import note_refused
from holdfast.node.session.connection import Connection
from holdfast.node.session.message import Message
from holdfast.node.session.session import Session, Subscription
from holdfast.node.state.recorded_state import RecordedState


class BrokerPort(ClusterPort):
    """The cluster side of `ClusterPort`. It has no state of its own."""

    def __init__(self, parts: Parts) -> None:
        self._state = parts.state
        self._context = parts.context
        self._forwarding = parts.forwarding
        self._admission = parts.admission
        self._promises = parts.forwarding.promises
        self._local = parts.local
        self._interest = parts.interest
        self._feeds = parts.feeds
        self._replicated = parts.replicated
        self._retained_updates = parts.retained_updates
        self._acquisition = parts.acquisition
        self.groups = parts.groups
        self._homes = parts.groups.coordinator.homes

    def append(self, record: Record) -> None:
        if self._context.is_alone:
            self._local.append(record)
        else:
            self._forwarding.append(record)

    def publish(self, record: Record, promise: Promise) -> None:
        if self._context.is_alone:
            self._local.publish(record, promise)
        else:
            self._forwarding.publish(record, promise)

    def promise(self, promise: Promise) -> None:
        if self._context.is_alone:
            self._local.promise(promise)
        else:
            self._promises.add(promise)

    def promise_interest(self, promise: Promise) -> None:
        self._interest.promise(promise)

    def older_nodes(self, feature: str) -> str:
        older = self._context.nodes_without(feature)
        if not older:
            return ""
        names = ", ".join(older)
        return f"the version of {names} has no {feature.replace('-', ' ')}: upgrade all nodes first"

    def ends_delayed(self, place: tuple[int, int]) -> bool:
        return self._admission.ends_delayed(place)

    def refusal(self, connection: Connection, record: Record) -> str:
        now = self._state.now
        if connection.refusals_due:
            # An earlier message was refused and may be sent again. Storing this one first would
            # change the order.
            text = "an earlier message was refused: send that first"
        elif not self._context.is_available(now):
            text = "this node reaches no majority of the cluster"
        else:
            return ""
        self._state.stats.refused_unavailable += 1
        note_refused(self._state, connection, record)
        return text

    def is_congested(self, part: int) -> bool:
        limit = self._state.config.pending_bytes_max // part
        return (
            self._state.promise_bytes + self._local.waiting() * PROMISE_BYTES > limit
            or self._forwarding.pending_bytes > PENDING_BYTES_MAX // part
            or self._context.journal.pending_bytes > limit
        )

    def waiting(self) -> int:
        return self._local.waiting() + len(self._forwarding.pending)

    def has_groups(self) -> bool:
        return not self._homes.opening

    def has_room(self, client_id: str) -> bool:
        recorded = self._replicated.state
        here = self._replicated.open_sessions.counts.get(self._context.node_id, 0)
        count = recorded.client_sessions() + max(0, self._state.client_sessions() - here)
        return client_id in recorded.sessions or count < self._state.config.sessions_max

    def away(self) -> tuple[int, int, int]:
        recorded = self._replicated.state
        counts = self._replicated.open_sessions.counts
        sessions = recorded.client_sessions() - sum(counts.values())
        # Those of an earlier process of this node are open until its end is known.
        own = counts.get(self._context.node_id, 0)
        sessions += max(0, own - self._state.client_sessions())
        groups = len(recorded.groups.keys() - self._state.groups.keys())
        return sessions, self._replicated.subscriptions_away, groups

    def recorded(self) -> RecordedState:
        return self._replicated.state

    def spread(self, message: Message, topic: str, behind: int) -> None:
        if self._context.connected or self._interest.has_groups():
            self._interest.spread(message, topic, behind)
        if message.retain:
            self._retained_updates.delivered(topic, message)

    def request_retained(self, subscriptions: list[Subscription]) -> None:
        self._retained_updates.wanted(subscriptions)

    def is_retained_behind(self, topic: str, subscription: Subscription) -> bool:
        return self._retained_updates.is_behind(topic, subscription)

    def open_session(
        self, connection: Connection, client_id: str, opening: AcceptedConnect
    ) -> None:
        self._acquisition.open_session(connection, client_id, opening)

    def session_detached(self, session: Session) -> None:
        self._acquisition.live.detached(session)

    def hold_filters(
        self, connection: Connection, filters: list[str], then: Callable[[], None]
    ) -> bool:
        return self._feeds.hold_filters(connection, filters, then)

    def count_filter(self, filter: str, more: int) -> None:
        if more > 0:
            self._interest.subscribed(filter)
        else:
            self._interest.unsubscribed(filter)
