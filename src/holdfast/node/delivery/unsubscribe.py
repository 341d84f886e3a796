"""UNSUBSCRIBE. A durable session's change is in the log before its UNSUBACK."""

from holdfast.node.connections.client_notes import note_filter_denied
from holdfast.node.delivery.live_lane import drop_waiting
from holdfast.node.delivery.outbox import end_drains
from holdfast.node.delivery.replay_start import plain_filter
from holdfast.node.delivery.subscribe import send_reply, size_of
from holdfast.node.delivery.subscriptions import leave_groups, remove_subscription
from holdfast.node.node_state import NodeState, Promise
from holdfast.node.rights import may_unsubscribe
from holdfast.node.session.connection import OPEN, Connection
from holdfast.node.session.session import Group, GroupMember, Session
from holdfast.node.state.recorded_state import detach_member
from holdfast.node.state.session_records import UnsubscribeRecord
from holdfast.node.state.state_records import append_change
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import Unsuback, Unsubscribe
from holdfast.protocol.topics.names import is_shared


class UnsubscribePromise(Promise):
    """The promise of an UNSUBACK: once it is in the log, the subscriptions leave the routing."""

    def __init__(self, connection: Connection, session: Session, packet: Unsubscribe) -> None:
        super().__init__(connection)
        self.session = session
        self.packet = packet
        # In NodeState.promise_bytes while it waits.
        self.size_bytes = 0
        # The filters from which the client may not unsubscribe.
        self.refused: set[str] = set()

    def release(self, state: NodeState) -> None:
        state.promise_bytes -= self.size_bytes
        assert state.promise_bytes >= 0, "a promise is kept twice"
        if self.size_bytes:
            self.session.subscribes_awaited -= 1
        codes: list[int] = []
        session = self.session
        left: dict[Group, None] = {}
        for filter in self.packet.filters:
            if filter in self.refused:
                continue
            subscription = session.subscriptions.get(filter)
            if subscription is not None and subscription.group is not None:
                left[subscription.group] = None
        leave_groups(state, session, left)
        for filter in self.packet.filters:
            if filter in self.refused:
                codes.append(reasons.NOT_AUTHORIZED)
                continue
            removed = remove_subscription(state, session, filter)
            if is_shared(filter) and session.is_durable():
                state.cluster.groups.left(session, filter)
            codes.append(reasons.SUCCESS if removed else reasons.NO_SUBSCRIPTION_EXISTED)
        drop_waiting(state, session)
        end_drains(state, session)
        connection = self.connection
        assert connection is not None
        if connection.state == OPEN:
            # [MQTT-3.10.4-4] [MQTT-3.10.4-5] [MQTT-3.11.3-1]
            send_reply(state, connection, Unsuback(self.packet.packet_id, codes, {}))


def handle_unsubscribe(
    state: NodeState, connection: Connection, session: Session, packet: Unsubscribe
) -> None:
    """Logs an UNSUBSCRIBE; UnsubscribePromise does the rest."""
    packet.filters = [plain_filter(filter) for filter in packet.filters]
    promise = UnsubscribePromise(connection, session, packet)
    allowed: list[str] = []
    for filter in packet.filters:
        if may_unsubscribe(session, filter):
            allowed.append(filter)
        elif filter not in promise.refused:
            promise.refused.add(filter)
            note_filter_denied(state, session, "unsubscribe_denied", filter)
    # An UNSUBSCRIBE that changes nothing appends nothing, or it could fill the disk.
    changes = session.subscribes_awaited or any(map(session.subscriptions.__contains__, allowed))
    if not changes or not session.is_durable():
        promise.release(state)
        return
    for filter in allowed:
        subscription = session.subscriptions.get(filter)
        if isinstance(subscription, GroupMember) and subscription.group is not None:
            # No record of the group is given to the session behind its record in the log. A
            # coordinator that has applied that one does not expect any.
            detach_member(subscription.group, subscription)
            state.cluster.groups.changed(subscription.group)
    promise.size_bytes = size_of(packet.filters)
    session.subscribes_awaited += 1
    state.promise_bytes += promise.size_bytes
    change = UnsubscribeRecord(session.client_id, allowed)
    append_change(state, session.key, change, session.epoch, promise)
