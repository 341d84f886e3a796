"""A session: what the broker keeps for a client between and during its connections.

Invariants
- `inflight` holds every PUBLISH QoS > 0 sent and not finished, in the order sent; a packet id is
  in use exactly while it is a key of it. [MQTT-2.2.1-3]
- `inbound` holds the packet ids of QoS 2 messages received and not yet released by PUBREL; a
  PUBLISH with one of them is a repetition, whatever its DUP flag. [MQTT-4.3.3-10]
- A durable session's state can be rebuilt from the log: `changes` are the inflight changes that
  no record tells yet.
"""

from collections import OrderedDict, deque
from typing import Final

from holdfast.broker.session.connection import Connection
from holdfast.broker.session.cursor import Cursor
from holdfast.broker.session.message import Message
from holdfast.protocol.topics.names import is_shared

NEVER_EXPIRES: Final = 0xFFFFFFFF
FEDERATION: Final = "$federation"
"""Client id of the broker's own session, see node.federating."""

SENT: Final = 1
RECEIVED: Final = 2
"""The client has sent PUBREC: PUBREL is out (or due), PUBCOMP is awaited."""


class Inflight:
    """An outbound QoS 1 or 2 message that is not finished. It has no payload: a resend, or another
    member of a shared group, reads the log at (partition, offset)."""

    def __init__(self, partition: int, offset: int, qos: int, is_retained: bool) -> None:
        self.partition = partition
        self.offset = offset
        self.qos = qos
        self.is_retained = is_retained
        self.state = SENT
        self.logged = False
        # Of a shared group's record, for as long as it is inflight: see session.state.tag_of.
        self.group_tag = 0
        # For a shared group's record: whose it is.
        self.group: object | None = None
        # Of a retained message, which may outlive its record.
        self.topic = b""
        # Fetched, until it is sent again.
        self.message: Message | None = None


class Will:
    def __init__(
        self,
        topic: bytes,
        payload: bytes,
        qos: int,
        retain: bool,
        properties: bytes,
        expiry_s: int,
        delay_s: int,
    ) -> None:
        self.topic = topic
        self.payload = payload
        self.qos = qos
        self.retain = retain
        self.properties = properties
        self.expiry_s = expiry_s
        self.delay_s = delay_s


class Subscription:
    """`start`: offsets per partition from which it counts; None: wherever the cursor stands."""

    def __init__(
        self,
        session: "Session",
        filter: str,
        qos: int,
        no_local: bool,
        retain_as_published: bool,
        retain_handling: int,
        subscription_id: int,
    ) -> None:
        self.session = session
        self.filter = filter
        self.qos = qos
        self.no_local = no_local
        self.retain_as_published = retain_as_published
        self.retain_handling = retain_handling
        self.subscription_ids: tuple[int, ...] = (subscription_id,) if subscription_id else ()
        self.start: list[int] | None = None
        # The shared group (node.state.Group) this is a membership of.
        self.group: object | None = None


class GroupMember(Subscription):
    """A shared subscription. `slot`: where it is in the `connected` of its group, or -1."""

    def __init__(
        self,
        session: "Session",
        filter: str,
        qos: int,
        no_local: bool,
        retain_as_published: bool,
        retain_handling: int,
        subscription_id: int,
    ) -> None:
        super().__init__(
            session,
            filter,
            qos,
            no_local,
            retain_as_published,
            retain_handling,
            subscription_id,
        )
        self.slot = -1


def new_subscription(
    session: "Session",
    filter: str,
    qos: int,
    no_local: bool,
    retain_as_published: bool,
    retain_handling: int,
    subscription_id: int,
) -> Subscription:
    """A Member if the filter is a shared one."""
    if is_shared(filter):
        return GroupMember(
            session,
            filter,
            qos,
            no_local,
            retain_as_published,
            retain_handling,
            subscription_id,
        )
    return Subscription(
        session,
        filter,
        qos,
        no_local,
        retain_as_published,
        retain_handling,
        subscription_id,
    )


class Session(Cursor):
    def __init__(self, client_id: str, key: bytes) -> None:
        super().__init__()
        self.client_id = client_id
        self.key = key
        self.is_internal = client_id == FEDERATION
        self.username: str | None = None
        # Its client has proved the user name, so nobody else gets the session.
        self.is_owned = False
        # node.rights.Rights; None: everything is allowed, or nothing was asked since the start.
        self.rights: object | None = None
        self.connection: Connection | None = None
        self.expiry_s = 0
        # In a cluster, of what the log knows: the node that the client is connected to; "": none.
        self.owner = ""
        # Recorded: the log knows this session (it outlives its connection, or has a will).
        self.recorded = False
        # Grows with every connection that opens the session; orders will records.
        self.epoch = 0
        self.disconnected_us = 0
        self.subscriptions: dict[str, Subscription] = {}
        self.filter_bytes = 0
        self.inflight: dict[int, Inflight] = {}
        self.inflight_max = 0
        # Resumed packet ids that are inflight but not sent on this connection yet.
        self.unsent: deque[int] | None = None
        self.resuming = False
        self.next_packet_id = 1
        self.inbound: dict[int, int] | None = None
        self.changes: dict[int, Inflight | None] | None = None
        # After a crash the logged positions may lie below offsets that are inflight. Such an offset
        # must not be read again when it is finished: it stays here until the positions pass it.
        self.replaying = False
        self.done: set[tuple[int, int]] | None = None
        self.done_changes: list[tuple[int, int]] | None = None
        # After a crash: per partition, the offset below which messages may have been sent before.
        self.maybe_sent: list[int] | None = None
        # Outbound PUBLISH packets that wait for the log; later ones wait behind them.
        self.held_sends = 0
        self.logged_positions: list[int] | None = None
        self.progress_due = False
        self.will: Will | None = None
        self.will_due_at = 0.0
        self.will_timer: object | None = None
        self.expires_at = 0.0
        self.expiry_timer: object | None = None
        # Retained messages still to be sent after SUBSCRIBE: node.retained.SessionScans.
        self.retained_scans: object | None = None
        # The shared groups (node.state.Group), and those of them that had a message for this member
        # when there was no room for it, first come, first served.
        self.groups: dict[object, GroupMember] | None = None
        self.blocked: OrderedDict[GroupMember, None] | None = None
        self.dropped = 0

    def is_durable(self) -> bool:
        return self.expiry_s > 0

    def allocate_packet_id(self) -> int:
        """A packet id that is not in use. [MQTT-2.2.1-4] The inflight window is below 65,535."""
        packet_id = self.next_packet_id
        inflight = self.inflight
        while packet_id in inflight:
            packet_id = packet_id + 1 if packet_id < 65535 else 1
        self.next_packet_id = packet_id + 1 if packet_id < 65535 else 1
        return packet_id

    def window_is_open(self) -> bool:
        """May another QoS > 0 PUBLISH be sent now? [MQTT-3.3.4-9]"""
        count = len(self.inflight)
        if self.unsent is not None:
            count -= len(self.unsent)
        return count < self.inflight_max

    def note_done(self, partition: int, offset: int) -> None:
        if self.done is None:
            self.done = set()
        self.done.add((partition, offset))
        if self.done_changes is None:
            self.done_changes = []
        self.done_changes.append((partition, offset))

    def note_change(self, packet_id: int, entry: Inflight | None) -> None:
        """Remember for the next progress record. Only for durable sessions."""
        if self.changes is None:
            self.changes = {}
        self.changes[packet_id] = entry
