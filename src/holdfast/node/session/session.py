"""A session: the state that the broker keeps for a client, connected or not.

Invariants
- `inflight` holds every PUBLISH QoS > 0 sent and not finished, in the order sent; a packet id is in
  use exactly while it is a key of it. [MQTT-2.2.1-3]
- `inbound` holds the packet ids of QoS 2 messages received and not yet released by PUBREL; a
  PUBLISH with one of them is a repetition, whatever its DUP flag. [MQTT-4.3.3-10]
- `doubtful` holds those of them that a put-back log has. The client may have released such an id
  since, and used it again. A PUBLISH with DUP 1 to the same partition is a repetition. Any other
  one says that the id was released. [MQTT-3.3.1-1] [MQTT-3.3.1-2] Counter-example without it: the
  copy has id 1, which the client has released since. Its next message with id 1 would be
  acknowledged and not stored. If such ids were forgotten, a client that has not released one would
  have its message stored twice.
- A durable session's state can be rebuilt from the log: `changes` are the inflight changes that no
  record contains yet.
"""

from collections import OrderedDict, deque
from operator import le
from typing import TYPE_CHECKING, Final, TypeVar
from zlib import crc32

from holdfast.node.session.additions import DRAINS, LOG_READER, additions_of
from holdfast.node.session.connection import Connection
from holdfast.node.session.cursor import Cursor
from holdfast.node.session.message import Message, queued_size
from holdfast.node.session.rare_fields import RareState
from holdfast.protocol.topics.names import is_shared

if TYPE_CHECKING:
    from mypy_extensions import i32


class Will:
    """A message that the broker publishes if the connection ends without DISCONNECT."""

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


class Replay:
    """The way of a subscription from its start in the past to the live tail.

    A record counts from `floors` on, if its topic has one there: the subscription began with the
    last records of each topic. `seam` is the end of the log at SUBSCRIBE: records below it are of
    the past. `again` are the offsets in `Session.done` that were finished for other subscriptions,
    before this one began.
    """

    def __init__(
        self, seam: list[int], floors: dict[bytes, int], again: set[tuple[int, int]] | None = None
    ) -> None:
        self.seam = seam
        self.floors = floors
        self.again = again


K = TypeVar("K")
V = TypeVar("V")


class NoEntries(dict[K, V]):
    """A table that stays empty. An idle client has neither subscriptions nor messages, and each
    table of its own would cost it 64 bytes.

    All clients share this table, so writing to it raises `TypeError`.
    """

    def __setitem__(self, key: K, value: V) -> None:
        raise TypeError(f"{key!r} for the table of all sessions without entries")


NEVER_EXPIRES: Final = 0xFFFFFFFF
FEDERATION: Final = "$federation"
"""The client id of the broker's own session, see broker.federation_session."""
FEDERATION_KEY: Final = FEDERATION.encode()

SENT: Final = 1
RECEIVED: Final = 2
"""The state after the client's PUBREC: PUBREL is sent (or due), and the broker waits for
PUBCOMP."""


TAG_MIN: Final = 2
"""The lowest tag of a shared group. 1 marks a retained message in the log, 0 neither."""
TAGS: Final = 254


class Inflight:
    """An unfinished outbound message of QoS 1 or 2. The log has its payload, at its offset."""

    def __init__(self, partition: int, offset: int, qos: int, is_retained: bool) -> None:
        self.partition = partition
        self.offset = offset
        self.qos = qos
        self.is_retained = is_retained
        self.state = SENT
        self.logged = False
        # It overtook a replay, see LiveLane.
        self.is_ahead = False
        # The tag of the shared group that gave the record, or 0: see session.state.tag_of.
        self.group_tag = 0
        # The shared group that gave the record.
        self.group: Group | None = None
        # The topic of a retained message, which may outlive its record.
        self.topic = b""
        # The message, from its fetch until it is sent again.
        self.message: Message | None = None


FREED: Final = Inflight(0, 0, 0, False)
"""A change of a packet id that is free, and may be so in the log before the session's positions.

It was that of a retained message of QoS 1, or of one whose offset is in `Session.done_changes`.
Counter-example of one that waits for the positions: a later message of the topic is finished, and
in `done`. After a crash the earlier one is sent again, and the later one is not."""
FREED.state = 0


class ChangedIds:
    """The packet ids of a durable session that changed since its log was written: those in use, and
    those that are free again. The free ones wait for the positions, so they are many."""

    def __init__(self) -> None:
        self.used: dict[int, Inflight] = {}
        self.freed: dict[int, None] = {}


class Subscription:
    """One filter of a session, with its options. `start` is the offset per partition from which it
    applies; None: from the cursor's position. With `reads_log` it began in the past, and the log
    brings everything that it has, in its order: also live QoS 0 messages, at their commit.

    With `drains` it has QoS 0 and replaced one of QoS 1 or 2. It reads the log until the session
    has caught up, because messages that wait must not be lost. [MQTT-3.8.4-4]"""

    def __init__(
        self,
        session: "Session",
        filter: str,
        qos: int,
        no_local: bool,
        retain_as_published: bool,
        retain_handling: int,
        additions_code: int,
    ) -> None:
        self.session = session
        self.filter = filter
        self.qos = qos
        self.no_local = no_local
        self.retain_as_published = retain_as_published
        self.retain_handling = retain_handling
        self.additions = additions_of(additions_code)
        self.reads_log = additions_code & LOG_READER != 0
        self.drains = additions_code & DRAINS != 0
        self.start: list[int] | None = None
        # Set from a SUBSCRIBE with a start in the past until the session has caught up.
        self.replay: Replay | None = None
        # The shared group of a GroupMember.
        self.group: Group | None = None

    def is_begun(self, positions: list[int]) -> bool:
        """Whether a session at these positions is past the start, which says nothing then. Those of
        replays and of shared groups are kept."""
        if self.start is None or self.replay is not None or self.group is not None:
            return False
        return all(map(le, self.start, positions))


class GroupMember(Subscription):
    """A subscription as a member of a shared group. `slot` is its index in `Group.connected`, or
    -1."""

    slot: int = -1


def new_subscription(
    session: "Session",
    filter: str,
    qos: int,
    no_local: bool,
    retain_as_published: bool,
    retain_handling: int,
    additions_code: int,
) -> Subscription:
    """A GroupMember if the filter is a shared one, else a Subscription."""
    kind = GroupMember if is_shared(filter) else Subscription
    return kind(
        session, filter, qos, no_local, retain_as_published, retain_handling, additions_code
    )


class Session(RareState):
    """The state of one client at the broker. The module's docstring has its invariants."""

    def __init__(self, client_id: str) -> None:
        super().__init__()
        # The flags and the small numbers are side by side: see Connection.
        self.is_internal = client_id == FEDERATION
        # The client has proved the user name, so no other user gets the session.
        self.is_owned = False
        # The log has this session: it outlives its connection, or has a will.
        self.recorded = False
        # A subscription may have a `start`.
        self.has_starts = False
        # A subscription may drain.
        self.has_drains = False
        self.resuming = False
        # After a crash the logged positions may be below offsets that are inflight. Such an offset
        # must not be read again when it is finished: `done` has it until the positions pass it.
        self.replaying = False
        self.progress_due = False

        self.inflight_max: i32 = 0
        self.next_packet_id: i32 = 1
        # Outbound PUBLISH packets that wait for the log; later ones wait behind them.
        self.promised_sends: i32 = 0
        # SUBSCRIBE and UNSUBSCRIBE packets on their way to the log: all, and those with a start in
        # the past. Until these are there the session reads nothing: it would pass records that they
        # begin with.
        self.subscribes_awaited: i32 = 0
        self.replays_awaited: i32 = 0
        # In a cluster: the epochs since the one of `life`; -1: that is not known.
        self._life_epochs: i32 = -1

        self.client_id = client_id
        self._key: bytes | None = None
        self.username: str | None = None
        # broker.rights.Rights; None: all is allowed, or no client has connected since the start.
        self.rights: object | None = None
        self.connection: Connection | None = None
        self.expiry_s = 0
        # In a cluster, by the log: the node that the client is connected to; "": none.
        self.owner = ""
        # Grows with every connection that opens the session; orders will records.
        self.epoch = 0
        self.subscriptions: dict[str, Subscription] = NO_SUBSCRIPTIONS
        self.filter_bytes = 0
        # The user or address whose share the filters are in, while there are some.
        self.filter_owner = ""
        # By packet id, 1 to 65,535, in the order sent.
        self.inflight: dict[int, Inflight] = NO_INFLIGHT
        # Resumed packet ids that are inflight but not sent on this connection yet.
        self.unsent: deque[int] | None = None
        self.inbound: dict[int, int] | None = None
        self.changes: ChangedIds | None = None
        self.done: set[tuple[int, int]] | None = None
        self.done_changes: list[tuple[int, int]] | None = None
        self.logged_positions: list[int] | None = None
        self.will: Will | None = None
        # Retained messages still to be sent after SUBSCRIBE: broker.delivery.retained.SessionScans.
        self.retained_scans: object | None = None
        # The shared groups. `blocked`: the memberships whose group found no room, in that order.
        self.groups: dict[Group, GroupMember] | None = None
        self.blocked: OrderedDict[GroupMember, None] | None = None
        self.dropped = 0

    def hold_inbound(self, packet_id: int, partition: int) -> None:
        """Notes the packet id of a QoS 2 message in `partition` until its PUBREL."""
        if self.inbound is None:
            self.inbound = {}
        self.inbound[packet_id] = partition
        if self.rare.doubtful is not None:
            self.rare.doubtful.discard(packet_id)

    def is_doubtful(self, packet_id: int) -> bool:
        """Whether only a log that was put back says that the packet id is in use."""
        return self.rare.doubtful is not None and packet_id in self.rare.doubtful

    @property
    def life(self) -> int:
        """In a cluster: the epoch in which the session was new and empty; 0: it is not known."""
        return 0 if self._life_epochs < 0 else self.epoch - self._life_epochs

    @life.setter
    def life(self, value: int) -> None:
        epochs = self.epoch - value
        # A record that no node has written may name any life; that is one that is not known.
        self._life_epochs = epochs if value and 0 <= epochs < 1 << 31 else -1

    def renew(self, epoch: int) -> None:
        """Gives the session a later epoch. Its life stays: otherwise a QoS 2 message of an epoch
        between would count as one of an earlier session, and be stored again."""
        life = self.life
        self.epoch = epoch
        self.life = life

    @property
    def key(self) -> bytes:
        """The client id in UTF-8, made when the client's first message or record needs it."""
        key = self._key
        if key is None:
            key = self._key = self.client_id.encode()
        return key

    @key.setter
    def key(self, value: bytes) -> None:
        self._key = value

    def add_inflight(self, packet_id: int, entry: Inflight) -> None:
        """Tracks a message until it is finished."""
        if self.inflight is NO_INFLIGHT:
            self.inflight = {}
        self.inflight[packet_id] = entry

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two turns."""
        super().check()
        for packet_id in self.inflight:
            assert 1 <= packet_id <= 65535, "a packet id out of range"
        if self.unsent is not None:
            assert len(set(self.unsent)) == len(self.unsent), "a packet id is to be sent twice"
            assert self.inflight.keys() >= set(self.unsent), "a free packet id is to be sent"
        for place, packet_id in (self.rare.inflight_ahead or {}).items():
            entry = self.inflight[packet_id]
            assert (entry.partition, entry.offset) == place, "another's place ahead of the cursor"
            assert entry.state == SENT, "a received message is to be sent"
        assert self.filter_bytes == sum(len(each.encode()) for each in self.subscriptions)
        connection = self.connection
        assert connection is None or connection.session is self, "another's connection"
        for group, member in (self.groups or {}).items():
            assert group.members.get(self) is member, "a group without its member"
        for filter, subscription in self.subscriptions.items():
            assert subscription.filter == filter, "a subscription under another filter"

    def is_durable(self) -> bool:
        """Whether the session outlives its connection."""
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
        unsent = 0 if self.unsent is None else len(self.unsent)
        ahead = self.rare.inflight_ahead
        if ahead is not None:
            unsent += len(ahead)
        return len(self.inflight) - unsent < self.inflight_max

    def note_done(self, partition: int, offset: int) -> None:
        """Records that an offset at or above the logged position is finished."""
        self.add_done([(partition, offset)])
        if self.expiry_s > 0:
            if self.done_changes is None:
                self.done_changes = []
            self.done_changes.append((partition, offset))

    def add_done(self, places: list[tuple[int, int]]) -> None:
        """The places (partition, offset) are finished, also for subscriptions that began in the
        past."""
        if self.done is None:
            self.done = set()
        self.done.update(places)
        if not self.has_starts:
            return
        for subscription in self.subscriptions.values():
            replay = subscription.replay
            if replay is not None and replay.again is not None:
                replay.again.difference_update(places)

    def note_change(self, packet_id: int, entry: Inflight | None) -> None:
        """Remembers a change of an inflight packet id for the next progress record. Only for
        durable sessions."""
        changes = self.changes
        if changes is None:
            changes = self.changes = ChangedIds()
        if entry is None:
            changes.used.pop(packet_id, None)
            changes.freed[packet_id] = None
        else:
            changes.freed.pop(packet_id, None)
            changes.used[packet_id] = entry


NO_SUBSCRIPTIONS: Final[dict[str, Subscription]] = NoEntries()
NO_INFLIGHT: Final[dict[int, Inflight]] = NoEntries()


def tag_of(group: str) -> int:
    """The tag of a shared group, by its key. It distinguishes the groups of one session, with rare
    collisions: after a failure, two groups with equal tags and matching topics may confuse their
    records."""
    return TAG_MIN + crc32(group.encode()) % TAGS


class Group(Cursor):
    """A shared subscription `$share/name/filter`: one cursor for all its members.

    Invariant: a record is in exactly one of: the outbox or the log (not sent yet), `returned` (a
    member left before acknowledging it), `deferred`, one member's inflight. Only a record that no
    member may read, connected or not, is finished without being sent.
    """

    def __init__(self, name: str, filter: str) -> None:
        super().__init__()
        self.name = name
        self.filter = filter
        self.key = f"$share/{name}/{filter}"
        self.tag = tag_of(self.key)
        self.members: dict[Session, GroupMember] = {}
        # The members with a connection. The first `ready` of them may have room for a message; the
        # others have this group in their `blocked`. A member found without room is not checked
        # again before it has some, so the search costs the same with ten members and with 10,000.
        # Invariant: 0 <= ready <= len(connected), and connected[member.slot] is the member.
        self.connected: list[GroupMember] = []
        self.ready = 0
        self.turn = 0
        # Per partition, the offset from which it has records; None: it is older than this run.
        self.start: list[int] | None = None
        # An Inflight is that of the member; its record is to be fetched from the log.
        self.returned: deque[Message | Inflight] = deque()
        self.fetching = False
        # By topic: records that wait for a member that may read them, while other records pass.
        self.deferred: dict[bytes, deque[Message]] = {}
        self.deferred_count = 0
        self.deferred_bytes = 0
        # Grows when a member joins, leaves or connects: rights in the group may have changed.
        self.changes = 0
        # By topic, as of `readable_at` changes: whether any member may read it, connected or not.
        self.readable: dict[bytes, bool] = {}
        self.readable_at = 0
        # In a cluster, if this is the coordinator's cursor for the members of all nodes: its
        # shared_groups.group_state.Coordination. A node's own group never tails or reads.
        self.coordination: object | None = None

    def defer_message(self, message: Message) -> None:
        """Keeps a message until a member that may read it is ready."""
        self.deferred.setdefault(message.topic, deque()).append(message)
        self.deferred_count += 1
        self.deferred_bytes += queued_size(message)

    def pop_deferred(self, topic: bytes) -> Message:
        """Removes and returns the oldest message of a topic."""
        messages = self.deferred[topic]
        message = messages.popleft()
        self.deferred_count -= 1
        self.deferred_bytes -= queued_size(message)
        assert self.deferred_bytes >= 0, "fewer bytes aside than none"
        if not messages:
            del self.deferred[topic]
        return message

    def attach(self, member: GroupMember) -> None:
        """Adds a member that has a connection to `connected`."""
        if member.slot < 0:
            member.slot = len(self.connected)
            self.connected.append(member)
            self.unblock(member)

    def detach(self, member: GroupMember) -> None:
        """Removes a member that leaves, or lost its connection, from `connected`."""
        if member.slot < 0:
            return
        if len(self.connected) == 1:
            self.connected.clear()
            self.ready = 0
            member.slot = -1
            return
        self.block(member)
        last = self.connected.pop()
        if last is not member:
            self.connected[member.slot] = last
            last.slot = member.slot
        member.slot = -1

    def block(self, member: GroupMember) -> None:
        """Moves a member without room behind the first `ready`."""
        assert self.connected[member.slot] is member, "the slot of another member"
        if member.slot < self.ready:
            self.ready -= 1
            self._swap(member, self.connected[self.ready])

    def unblock(self, member: GroupMember) -> None:
        """Moves a member that has room among the first `ready`."""
        if member.slot >= self.ready:
            self._swap(member, self.connected[self.ready])
            self.ready += 1

    def _swap(self, one: GroupMember, other: GroupMember) -> None:
        slot = one.slot
        self.connected[other.slot] = one
        self.connected[slot] = other
        one.slot = other.slot
        other.slot = slot

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold."""
        super().check()
        assert 0 <= self.ready <= len(self.connected), "more members are ready than connected"
        for slot, member in enumerate(self.connected):
            assert member.slot == slot, "the slot of another member"
            assert self.members.get(member.session) is member, "a member that has left"
        aside = [message for messages in self.deferred.values() for message in messages]
        assert self.deferred_count == len(aside), "the number of messages aside"
        assert self.deferred_bytes == sum(map(queued_size, aside)), "the bytes aside"
