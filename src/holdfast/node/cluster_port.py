"""The port through which the broker's core reaches the log, and the other nodes if there are any.

`ClusterPort` is the interface, and `node.broker_port.BrokerPort` implements it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.log.record import Record
from holdfast.node.promise import Promise
from holdfast.node.session.connection import Connection
from holdfast.node.session.message import Message
from holdfast.node.session.session import Group, Inflight, Session, Subscription
from holdfast.node.state.recorded_state import RecordedState

if TYPE_CHECKING:
    from holdfast.node.connections.session_open import AcceptedConnect
    from holdfast.node.session.session import Group


class GroupPort:
    """The shared groups of a node as the broker's core reports on them. A group's cursor is with
    its coordinator, which assigns records to nodes."""

    def changed(self, group: Group) -> None:
        """The group's members here, or their capacity, may have changed."""
        raise NotImplementedError

    def moved(self, group: Group) -> None:
        """The group's cursor has moved. The coordinator logs it within `progress_interval_s`."""
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
        """The member disconnected, but its session keeps this QoS 2 record. The record belongs to
        the session and not to the group once that is appended."""
        raise NotImplementedError

    def await_finish(self, promise: Promise, session: Session, entry: Inflight) -> None:
        """Lets a promise that is not given yet wait until the log says that the group of the
        entry's record has finished with it."""
        raise NotImplementedError

    def joining(self, connection: Connection, session: Session, filter: str) -> None:
        """A durable session is about to subscribe to a shared filter. Its member record is appended
        here, and the SUBACK waits for it."""
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
    """The log and the other nodes as the broker's core uses them. Records go to the leaders of
    their partitions, so their offsets are unknown until they come back committed."""

    groups: "GroupPort"
    member: "MemberPort"

    def append(self, record: Record) -> None:
        """Appends a record at the leader of its partition."""
        raise NotImplementedError

    def publish(self, record: Record, promise: Promise) -> None:
        """Appends a record. Release the promise when the record is committed, or refuse it; both
        after the earlier promises to its connection."""
        raise NotImplementedError

    def promise(self, promise: Promise) -> None:
        """Releases a promise without a record after the earlier promises to its connection."""
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

    def waiting(self) -> int:
        """The number of records and promises that wait for the log."""
        raise NotImplementedError

    def spread(self, message: Message, topic: str, behind: int) -> None:
        """Sends a QoS 0 message to the other nodes with receivers for it. They deliver it behind
        the records of the topic's partition below the offset `behind`."""
        raise NotImplementedError

    def has_groups(self) -> bool:
        """Whether the routes have each group that is in the log and coordinated here."""
        raise NotImplementedError

    def has_room(self, client_id: str) -> bool:
        """Whether the client may open one more session. Every node counts the sessions that outlive
        their connections, and its own of the others."""
        raise NotImplementedError

    def away(self) -> tuple[int, int, int]:
        """The numbers of what the log has beside the tables of `NodeState`: sessions that are
        connected nowhere, their subscriptions, and shared groups without a member here."""
        raise NotImplementedError

    def recorded(self) -> RecordedState:
        """The state that the committed records define, as far as they are applied here: the
        sessions of all nodes. Anonymous ones are one owner of filters in it."""
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
        """Becomes the owner of the session, then calls `session_open.finish_open`. The input of the
        connection is paused until then."""
        raise NotImplementedError

    def session_detached(self, session: Session) -> None:
        """The session's connection is closed, and all records about that are appended."""
        raise NotImplementedError

    def subscribed(self, filter: str) -> None:
        """One more session here has this filter."""
        raise NotImplementedError

    def unsubscribed(self, filter: str) -> None:
        """One session fewer here has this filter."""
        raise NotImplementedError
