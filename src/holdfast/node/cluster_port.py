"""The port through which the broker's core reaches the log, and the other nodes if there are any.

`ClusterPort` is the interface. `SingleNode` implements it for a node without a cluster, whose log
is its own journal; `node.broker_port.BrokerPort` for a node of a cluster.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.log.record import Record
from holdfast.node.promise import PROMISE_BYTES, Promise
from holdfast.node.session.connection import Connection
from holdfast.node.session.message import Message
from holdfast.node.session.session import Group, Inflight, Session, Subscription
from holdfast.node.state.recorded_state import RecordedState

if TYPE_CHECKING:
    from holdfast.node.connections.session_open import AcceptedConnect
    from holdfast.node.node_state import NodeState
    from holdfast.node.session.session import Group


class GroupPort:
    """The shared groups of a node as the broker's core reports on them.

    On a single node a group's cursor is here. In a cluster it is with the group's coordinator,
    which assigns records to nodes.
    """

    def changed(self, group: Group) -> None:
        """The group's members here, or their capacity, may have changed."""
        raise NotImplementedError

    def moved(self, group: Group) -> None:
        """The group's cursor has moved. A single node logs it within `progress_interval_s`, in a
        cluster the coordinator does."""
        raise NotImplementedError

    def sent(self, group: Group, message: Message) -> None:
        """The record is about to be sent to a member here, so the group's cursor has moved."""
        self.moved(group)

    def finished(self, group: Group, partition: int, offset: int) -> None:
        """A member here has the record, or no member can receive it."""
        raise NotImplementedError

    def received(self, group: Group, entry: Inflight) -> None:
        """A member here has the QoS 2 record, and keeps its packet id."""
        raise NotImplementedError

    def denied(self, group: Group, partition: int, offset: int) -> None:
        """No member here may read the record."""
        raise NotImplementedError

    def move_record(self, group: Group, session: Session, entry: Inflight) -> None:
        """The member disconnected, but its session keeps this QoS 2 record. In a cluster the record
        belongs to the session and not to the group once that is appended."""
        raise NotImplementedError

    def await_finish(self, promise: Promise, session: Session, entry: Inflight) -> None:
        """Let a promise that is not given yet wait until the log says that the group of the entry's
        record has finished with it."""
        raise NotImplementedError

    def joining(self, connection: Connection, session: Session, filter: str) -> None:
        """A durable session is about to subscribe to a shared filter. In a cluster its member
        record is appended here, and the SUBACK waits for it."""
        raise NotImplementedError

    def left(self, session: Session, filter: str) -> None:
        """A session has unsubscribed from a shared filter, as the log says."""
        raise NotImplementedError

    def record(self, group: Group, message: Message) -> None:
        """A QoS > 0 message was committed for a group that this node coordinates."""
        raise NotImplementedError

    def handle_read(
        self, group: Group, records: list[Record], positions: list[int], done: bool
    ) -> None:
        """The result of a ReadLog for a group that this node coordinates."""
        raise NotImplementedError


class MemberPort:
    """The cluster as the broker's member of a federation sees it. This one has no other node."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id

    def node(self, now: float) -> str:
        """The node that runs the member: the leader of the member's home. This one does so only
        once it has applied what earlier leaders have appended, and as long as it reaches a
        majority. "": none."""
        return self._node_id

    def has_other_nodes(self) -> bool:
        """Whether the cluster has other nodes, connected or not."""
        return False

    def others_with_table(self) -> list[str] | None:
        """The other data nodes that are configured as members. None: that of one is not known."""
        return []

    def watch_filters(self, watch: Callable[[str, bool], None] | None) -> list[str]:
        """The filters that other nodes have announced, once for each node. Each that begins (True)
        or ends is reported from now on."""
        return []


BANS: Final = "bans"
DELAYED_MESSAGES: Final = "delayed-messages"
QUEUES: Final = "queues"
GROUP_MEMBERS: Final = "group-members"
MEMBER_VALUES: Final = "federation-records"
MEMBER_TABLE: Final = "ft"
"""The feature of a node whose configuration has [federation]."""
RECORD_FEATURES: Final = (BANS, DELAYED_MESSAGES, QUEUES, GROUP_MEMBERS, MEMBER_VALUES)
"""The features whose records older versions do not apply, as nodes announce them in the handshake
(`PeerIdentity.features`)."""
WILL_OFFSETS: Final = "will-offsets"
"""The feature of entries that older versions do not accept from another node."""
AGREED_USERS: Final = "agreed-users"
AGREED_ACCESS: Final = "agreed-access"
AGREED_GENERATION: Final = "agreed-generation"
GIVES_UP_RECORDS: Final = "gives-up-records"
AGREED_REPLICATION: Final = "resize"
"""The features whose entries of the metadata older versions do not know, witnesses included."""


class ClusterPort:
    """The log and the other nodes as the broker's core uses them.

    In a cluster records go to the leaders of their partitions, so their offsets are unknown until
    they come back committed. `is_single`: there is no cluster.
    """

    is_single: bool = False
    groups: "GroupPort"
    member: "MemberPort"

    def append(self, record: Record) -> int:
        """Append a record, in a cluster at the leader of its partition. Returns its offset, or -1
        in a cluster."""
        raise NotImplementedError

    def publish(self, record: Record, promise: Promise) -> None:
        """Append a record. Release the promise when the record is committed, or refuse it; both
        after earlier promises, in a cluster after those to its connection."""
        raise NotImplementedError

    def promise(self, promise: Promise) -> None:
        """Release a promise without a record after earlier promises, in a cluster after those to
        its connection. A single node releases it after the commit of all records so far."""
        raise NotImplementedError

    def promise_interest(self, promise: Promise) -> None:
        """`promise`, but not before all nodes have the announced filters. No record is awaited."""
        raise NotImplementedError

    def refusal(self, connection: Connection, record: Record) -> str:
        """The reason why a client's QoS > 0 message is refused now with QUOTA_EXCEEDED, or "". The
        refusal is counted."""
        raise NotImplementedError

    def older_nodes(self, feature: str) -> str:
        """The reason why records of a feature (`RECORD_FEATURES`) may not be made: the nodes whose
        version lacks it. "" if there is none."""
        raise NotImplementedError

    def ends_delayed(self, place: tuple[int, int]) -> bool:
        """Whether a record that ends the delayed message of this partition and offset is appended
        at this node, the leader of the partition, and not applied yet."""
        raise NotImplementedError

    def is_congested(self, part: int) -> bool:
        """Whether more than `1 / part` of the allowed bytes wait for the leaders or the disk."""
        raise NotImplementedError

    def spread(self, message: Message, topic: str, behind: int) -> None:
        """Send a QoS 0 message to the other nodes with receivers for it. They deliver it behind the
        records of the topic's partition below the offset `behind`."""
        raise NotImplementedError

    def has_groups(self) -> bool:
        """Whether the routes have each group that is in the log and coordinated here."""
        return True

    def has_room(self, client_id: str) -> bool:
        """Whether the client may open one more session. In a cluster every node counts the sessions
        that outlive their connections, and its own of the others."""
        raise NotImplementedError

    def away(self) -> tuple[int, int, int]:
        """The numbers of what the log has beside the tables of `NodeState`: sessions that are
        connected nowhere, their subscriptions, and shared groups without a member here."""
        raise NotImplementedError

    def recorded_session(self, client_id: str) -> Session | None:
        """The session of a client as far as its records are applied here, with an owner anywhere.
        None: there is none, or the node's own table has it."""
        raise NotImplementedError

    def recorded(self) -> RecordedState:
        """The state that the committed records define, as far as they are applied here. On a single
        node it is the node's own. In a cluster anonymous sessions are one owner of filters."""
        raise NotImplementedError

    def request_retained(self, subscriptions: list[Subscription]) -> None:
        """Clients have subscribed and need the retained messages of other nodes."""
        raise NotImplementedError

    def is_retained_behind(self, topic: str, subscription: Subscription) -> bool:
        """Whether the clients here have received a QoS 0 update of the retained message that the
        store does not have yet. The subscription then receives it once the store has it."""
        raise NotImplementedError

    def open_session(
        self, connection: Connection, client_id: str, opening: "AcceptedConnect"
    ) -> None:
        """In a cluster: become the owner of the session, then call `session_open.finish_open`. The
        input of the connection is paused until then."""
        raise NotImplementedError

    def session_detached(self, session: Session) -> None:
        """In a cluster: the session's connection is closed, and all records about that are
        appended."""
        raise NotImplementedError

    def subscribed(self, filter: str) -> None:
        """One more session here has this filter."""
        raise NotImplementedError

    def unsubscribed(self, filter: str) -> None:
        """One session fewer here has this filter."""
        raise NotImplementedError


class SingleNode(ClusterPort):
    """The port of a node without a cluster: records go into its own journal."""

    def __init__(self, state: "NodeState") -> None:
        self._state = state
        self.is_single = True
        self.groups = SingleNodeGroups(state)
        self.member = MemberPort(state.config.node_id)

    def append(self, record: Record) -> int:
        return self._state.journal.append(record)

    def publish(self, record: Record, promise: Promise) -> None:
        state = self._state
        journal = state.journal
        journal.append(record)
        # The record is pending, so the promise waits: `promise` without its question.
        promise.after = journal.sequence
        state.promises.append(promise)

    def promise(self, promise: Promise) -> None:
        state = self._state
        promise.after = state.journal.sequence
        if not state.promises and promise.after <= state.journal.committed_sequence:
            promise.release(state)
        else:
            state.promises.append(promise)

    def promise_interest(self, promise: Promise) -> None:
        promise.release(self._state)

    def refusal(self, connection: Connection, record: Record) -> str:
        if not self._state.disk_full:
            return ""
        self._state.stats.refused_disk_full += 1
        return "the broker's disk is full"

    def older_nodes(self, feature: str) -> str:
        """There is no other node."""
        return ""

    def ends_delayed(self, place: tuple[int, int]) -> bool:
        """Always False: `Delayed.is_ending` says it."""
        return False

    def is_congested(self, part: int) -> bool:
        state = self._state
        promised = len(state.promises) * PROMISE_BYTES + state.promise_bytes
        return (state.journal.pending_bytes + promised) * part > state.config.pending_bytes_max

    def spread(self, message: Message, topic: str, behind: int) -> None:
        """There is no other node."""

    def has_room(self, client_id: str) -> bool:
        return self._state.client_sessions() < self._state.config.sessions_max

    def away(self) -> tuple[int, int, int]:
        return 0, 0, 0

    def recorded_session(self, client_id: str) -> Session | None:
        return None

    def recorded(self) -> RecordedState:
        return self._state

    def request_retained(self, subscriptions: list[Subscription]) -> None:
        """There is no other node."""

    def is_retained_behind(self, topic: str, subscription: Subscription) -> bool:
        """Always False: the store changes in one step with the delivery."""
        return False

    def subscribed(self, filter: str) -> None:
        """There is no other node."""

    def unsubscribed(self, filter: str) -> None:
        """There is no other node."""


class SingleNodeGroups(GroupPort):
    """The shared groups of a node without a cluster. It coordinates none."""

    def __init__(self, state: "NodeState") -> None:
        self._state = state

    def changed(self, group: Group) -> None:
        """The group has no coordinator."""

    def moved(self, group: Group) -> None:
        if not group.progress_due:
            group.progress_due = True
            self._state.groups_in_progress.append(group)
            self._state.arm_progress(self._state.config.progress_interval_s)

    def finished(self, group: Group, partition: int, offset: int) -> None:
        self.moved(group)

    def received(self, group: Group, entry: Inflight) -> None:
        group.note_assigned(entry.partition, entry.offset)
        self.moved(group)

    def denied(self, group: Group, partition: int, offset: int) -> None:
        self._state.stats.dropped_unreadable += 1

    def move_record(self, group: Group, session: Session, entry: Inflight) -> None:
        """The group's cursor waits until the session has finished the record."""

    def await_finish(self, promise: Promise, session: Session, entry: Inflight) -> None:
        """The group's position is in one write group with its members' packet ids."""

    def joining(self, connection: Connection, session: Session, filter: str) -> None:
        """The record of the session says it."""

    def left(self, session: Session, filter: str) -> None:
        """The record of the session has said it."""
