"""The node's state. Behaviour lives beside it, in modules of functions over `NodeState`.

`held` is the one gate that keeps promises back: whatever may leave only after a record is
committed (PUBACK, PUBREC, PUBCOMP, SUBACK, CONNACK of a durable session, an outbound QoS 2
PUBLISH, a delivery) waits in it, in append order, until the journal's committed sequence has
passed it.
"""

import heapq
from collections import deque
from collections.abc import Callable
from typing import Final

from holdfast.broker.config import NodeConfig
from holdfast.broker.connections.pending_connects import PendingConnects
from holdfast.broker.effects import Effect, Note, ResumeInput
from holdfast.broker.publish.producers import ProducerTable
from holdfast.broker.session.connection import Connection
from holdfast.broker.session.cursor import Cursor
from holdfast.broker.session.message import Message, retained_size
from holdfast.broker.session.session import FEDERATION, GroupMember, Inflight, Session, Subscription
from holdfast.broker.session.state import tag_of
from holdfast.broker.stats import Stats
from holdfast.protocol.topics.retained import RetainedTrie
from holdfast.protocol.topics.trie import SubscriptionTrie
from holdfast.security.acl import AclFile
from holdfast.security.enhanced_authentication import Factory
from holdfast.storage.journal.journal import Journal
from holdfast.storage.reading.interest import ReadInterest
from holdfast.storage.record import Record

CANCELLED: Final = 0
KEEP_ALIVE: Final = 1
CONNECT_TIMEOUT: Final = 2
WILL_DUE: Final = 3
SESSION_EXPIRY: Final = 4
PROGRESS: Final = 5
SYS: Final = 6
WORK: Final = 7

ENDED_EPOCHS_MAX: Final = 10_000
"""More sessions than end before a write group is on the disk."""
GIVEN_MAX: Final = 10_000
"""Of Group.given: beyond them a crash may deliver a message twice."""
HELD_BYTES: Final = 300
"""Memory of one promise that waits for the log, about."""

STEPS_PER_TURN: Final = 1000
"""Of large jobs (`Work`) in one turn of the event loop. A step takes 2 to 10 µs: a turn is not held
for more than some milliseconds by all of them together."""
STEPS_AT_ONCE: Final = 200
"""Of one job, before the others have their turn."""

ROUTE_CHANGES_MAX: Final = 256
"""Changed filters that are remembered so that routes of other topics need not be resolved again."""


class Timer:
    def __init__(self, when: float, kind: int, subject: object) -> None:
        self.when = when
        self.kind = kind
        self.subject = subject


class Held:
    """A promise that waits for its record, to be kept to `connection` if there is one. `after`: the
    journal sequence that must be committed."""

    def __init__(self, connection: Connection | None = None) -> None:
        self.after = 0
        self.connection = connection

    def release(self, state: "NodeState") -> None:
        raise NotImplementedError

    def refuse(self, state: "NodeState", reason: int, text: str) -> None:
        """The leader of the record's partition does not take the message, or nobody leads it. In a
        cluster only; in place of `release`."""
        raise NotImplementedError


class Work:
    """A job too large for one turn of the event loop. NodeState.work_on does it in slices that are
    cut by the steps taken, whether these find anything or not, in turn with all other jobs."""

    def __init__(self) -> None:
        # In NodeState.work.
        self.is_queued = False
        # Set by `step`: more can be done now.
        self.goes_on = True

    def step(self, state: "NodeState", steps: int) -> int:
        """Do about `steps` steps and return the number done."""
        raise NotImplementedError


class ClusterPort:
    """What a node of a cluster has done elsewhere; a node alone has none of it. Records go to the
    leaders of their partitions, so nobody knows their offsets yet."""

    def append(self, record: Record) -> None:
        raise NotImplementedError

    def hold(self, held: Held) -> None:
        """Release `held` when the last record appended is committed and everything promised to its
        connection before is released, or refuse it."""
        raise NotImplementedError

    def hold_reply(self, held: Held) -> None:
        """Release `held` behind everything promised to its connection before."""
        raise NotImplementedError

    def refusal(self, partition: int) -> int:
        """The reason why a QoS > 0 message is not taken now; 0: it is."""
        raise NotImplementedError

    def is_congested(self, part: int) -> bool:
        """Is more than `1 / part` of what may wait on its way to the leaders, or to the disk?"""
        raise NotImplementedError

    def spread(self, message: object, topic: str) -> None:
        """A QoS 0 message (session.message.Message) goes to the nodes with receivers for it."""
        raise NotImplementedError

    def recorded_sessions(self) -> int:
        """Sessions that the log knows, whichever node has them."""
        raise NotImplementedError

    def has_recorded(self, client_id: str) -> bool:
        raise NotImplementedError

    def retained_wanted(self, subscriptions: list[Subscription]) -> None:
        """Clients have subscribed, and are sent what is retained."""
        raise NotImplementedError

    def open_session(self, connection: Connection, client_id: str, opening: object) -> None:
        """Become the owner of the session, then connecting.finish_open; `opening` is for that."""
        raise NotImplementedError

    def session_detached(self, session: Session) -> None:
        """Its connection is gone, and everything about that is appended."""
        raise NotImplementedError

    def subscribed(self, filter: str) -> None:
        """Somebody more has subscribed here to this filter."""
        raise NotImplementedError

    def unsubscribed(self, filter: str) -> None:
        raise NotImplementedError

    def group_changed(self, group: "Group") -> None:
        """Its members here, or what they can take, may not be what they were."""
        raise NotImplementedError

    def group_record(self, group: "Group", message: object) -> None:
        """A QoS > 0 message (session.message.Message) was committed, for a group with a
        `coordination`."""
        raise NotImplementedError

    def group_read(
        self, group: "Group", records: list[Record], positions: list[int], done: bool
    ) -> None:
        """The result of a ReadLog that the coordination of a group asked for."""
        raise NotImplementedError

    def group_finished(self, group: "Group", partition: int, offset: int) -> None:
        """A member here has the record, or it can be sent to nobody."""
        raise NotImplementedError

    def group_denied(self, group: "Group", partition: int, offset: int) -> None:
        """No member here may read the record."""
        raise NotImplementedError

    def group_kept(self, group: "Group", session: Session, partition: int, offset: int) -> None:
        """A QoS 2 record that stays with a member though this leaves: it is in the session's
        state, as far as that is appended, and no concern of the group any more."""
        raise NotImplementedError

    def hold_for_groups(self, held: Held, session: Session, entry: Inflight) -> None:
        """As `hold`, and not before the log says that the group which gave the record to the
        session has finished with it."""
        raise NotImplementedError

    def hold_for_interest(self, held: Held) -> None:
        """Release `held` once the other nodes know every filter told so far, behind everything
        promised to its connection before."""
        raise NotImplementedError


class Group(Cursor):
    """A shared subscription `$share/name/filter`: one cursor for all its members.

    Invariant: a record is with exactly one of: the outbox or the log (not handed out yet),
    `returned` (a member left before acknowledging it), `aside`, one member's inflight. Only a
    record that no member may read, connected or not, is finished without having been sent.
    """

    def __init__(self, name: str, filter: str) -> None:
        super().__init__()
        self.name = name
        self.filter = filter
        self.key = f"$share/{name}/{filter}"
        self.tag = tag_of(self.key)
        self.members: dict[Session, GroupMember] = {}
        # Those with a connection. The first `ready` of them may have room for a message; the others
        # have this group in their `blocked`. So finding a member costs the same in a group of ten
        # and of ten thousand: whoever was found without room is not looked at before it has some.
        self.connected: list[GroupMember] = []
        self.ready = 0
        self.turn = 0
        # Per partition, the offset from which it has records; None: it is older than this start.
        self.start: list[int] | None = None
        # Each a Message or, to be fetched from the log, the Inflight of the member.
        self.returned: deque[object] = deque()
        self.fetching = False
        # By topic: records for which a member is awaited that may read them, while others go on.
        self.aside: dict[bytes, deque[Message]] = {}
        self.aside_count = 0
        self.aside_bytes = 0
        # Grows when a member joins, leaves or connects: others may read now.
        self.changes = 0
        # By topic, as of `readable_at` changes: may any member read it, connected or not?
        self.readable: dict[bytes, bool] = {}
        self.readable_at = 0
        # (partition, offset) of QoS 2 records that members have, though the group's logged position
        # has not passed them: after a restart no other member may be given them. Then those that
        # the log does not know of.
        self.given: set[tuple[int, int]] | None = None
        self.given_changes: list[tuple[int, int]] = []
        self.logged_positions: list[int] | None = None
        self.progress_due = False
        # In a cluster this is either the cursor for all nodes' members (then whose it is), or a
        # node's own members: those get records assigned, in `returned`, and never tail or read.
        self.coordination: object | None = None

    def put_aside(self, message: Message) -> None:
        self.aside.setdefault(message.topic, deque()).append(message)
        self.aside_count += 1
        self.aside_bytes += len(message.payload) + 200

    def take_aside(self, topic: bytes) -> Message:
        """The oldest of a topic."""
        messages = self.aside[topic]
        message = messages.popleft()
        self.aside_count -= 1
        self.aside_bytes -= len(message.payload) + 200
        if not messages:
            del self.aside[topic]
        return message

    def attach(self, member: GroupMember) -> None:
        """It has a connection."""
        if member.slot < 0:
            member.slot = len(self.connected)
            self.connected.append(member)
            self.unblock(member)

    def detach(self, member: GroupMember) -> None:
        """It leaves, or its connection is gone."""
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
        if member.slot < self.ready:
            self.ready -= 1
            self._swap(member, self.connected[self.ready])

    def unblock(self, member: GroupMember) -> None:
        if member.slot >= self.ready:
            self._swap(member, self.connected[self.ready])
            self.ready += 1

    def _swap(self, one: GroupMember, other: GroupMember) -> None:
        slot = one.slot
        self.connected[other.slot] = one
        self.connected[slot] = other
        one.slot = other.slot
        other.slot = slot

    def note_given(self, partition: int, offset: int) -> None:
        if self.given is None:
            self.given = set()
        if len(self.given) < GIVEN_MAX:
            self.given.add((partition, offset))
            self.given_changes.append((partition, offset))


class Route:
    """Who receives a topic; valid while `version` equals NodeState.route_version."""

    def __init__(self, topic: str, raw: bytes, partition: int) -> None:
        self.topic = topic
        self.raw = raw
        self.partition = partition
        self.version = -1
        # In the memo, see node.routing.
        self.size_bytes = 0
        self.targets: list[Subscription] = []
        self.groups: list[Group] = []
        # Sessions that have subscribed to the topic and may not read it.
        self.denied = 0
        # QoS 0 publishes on this topic go into the log.
        self.logged = False
        # Clients may not publish here ($SYS).
        self.reserved = False


class NodeState:
    def __init__(self, config: NodeConfig, journal: Journal) -> None:
        self.config = config
        self.journal = journal
        self.memory = config.memory_durability
        self.cluster: ClusterPort | None = None
        # Called with a filter, and whether a session of a client has begun or ended to have it.
        self.watch_interest: Callable[[str, bool], None] | None = None
        # Called with the empty message by which a client here removed what was retained.
        self.watch_removal: Callable[[Message], None] | None = None
        # What else goes under $SYS/broker/, by name.
        self.sys_values: Callable[[], dict[str, str]] | None = None
        self.stats = Stats()
        # Set by the driver before every call: monotonic seconds, wall clock microseconds.
        self.now = 0.0
        self.wall_us = 0
        self.started_us = 0

        self.sessions: dict[str, Session] = {}
        self.connections = 0
        # Sockets of clients that are in a TLS handshake.
        self.handshakes = 0
        self.pending_connects = PendingConnects(
            config.pending_connect_bytes, config.pending_connects_per_address
        )
        self.subscriptions = SubscriptionTrie()
        self.subscription_count = 0
        self.groups: dict[str, Group] = {}
        self.retained = RetainedTrie(retained_size)
        # Topics whose retained message is that of a record which is not committed yet, or of none,
        # with that record's offset: an older record that is committed meanwhile is no news. See
        # held_publish.retain_at_once.
        self.retained_ahead: dict[str, int] = {}
        # When the retained store last had no room; 0.0: never.
        self.retained_noted_at = 0.0
        self.producers = ProducerTable(config.producers_max, config.producer_expiry_s)
        # When a producer was last evicted; 0.0: never.
        self.producers_noted_at = 0.0
        self.routes: dict[bytes, Route] = {}
        self.routes_bytes = 0
        self.route_version = 0
        # The filters of the last changes of it.
        self.route_changes: list[str] = []
        # Of sessions that read the log; node.catching_up makes them.
        self.interests: dict[Session, list[ReadInterest]] = {}

        self.held: deque[Held] = deque()
        # Records appended, by whatever way: who makes it grow is paused when too many wait.
        self.appended = 0
        # Memory of held packets beyond HELD_BYTES each: the filters of SUBSCRIBE and UNSUBSCRIBE.
        self.held_bytes = 0
        # Per partition, the first offset not yet handed to the tailing readers.
        self.delivered: list[int] = list(journal.high_watermark)

        self.dirty: list[Connection] = []
        self.effects: list[Effect] = []
        self.timers: list[tuple[float, int, Timer]] = []
        self.timer_count = 0
        self.timers_cancelled = 0
        self.work: deque[Work] = deque()
        self.is_working = False
        # Receivers that were looked up or handed a message since Node._process set it to 0.
        self.spent = 0
        # Sessions that are in no table any more, with subscriptions that still are.
        self.ended: dict[Session, None] = {}
        # What may be done at once in this turn, before it becomes Work.
        self.steps_left = STEPS_PER_TURN
        self.sessions_in_progress: deque[Session] = deque()
        self.groups_in_progress: deque[Group] = deque()
        self.progress_armed = False

        self.acl: AclFile | None = None
        self.checks_passwords = False
        # Enhanced authentication by method name.
        self.authenticators: dict[str, Factory] = {}
        self.disk_full = False
        # Clients whose input waits until the journal has written what is pending.
        self.stalled: list[Connection] = []
        self.closing = False
        # In a cluster: sessions may have other owners by now (see cluster.doubt).
        self.is_unsure = False
        # Clients are sent to these servers, host:port each, separated by blanks; "": they are not.
        self.redirect = ""
        # Random client ids are drawn by the driver: (prefix, counter) keeps the core deterministic.
        self.client_id_prefix = "auto-"
        self.client_id_count = 0
        # Of sessions that have ended, the oldest first: the client's next session goes on with
        # larger epochs, which tell its records from those of the old one in the same write group.
        self.ended_epochs: dict[str, int] = {}

    def note_ended(self, session: Session) -> None:
        ended = self.ended_epochs
        if session.client_id not in ended and len(ended) >= ENDED_EPOCHS_MAX:
            del ended[next(iter(ended))]
        ended[session.client_id] = session.epoch

    def client_sessions(self) -> int:
        """Sessions, connected or not, but for the broker's own."""
        return len(self.sessions) - (FEDERATION in self.sessions)

    def change_routes(self, filter: str = "") -> None:
        """Receivers of the topics that a plain filter matches, or of all, may be other ones now."""
        self.route_version += 1
        changes = self.route_changes
        if not filter:
            changes.clear()
            return
        changes.append(filter)
        if len(changes) > ROUTE_CHANGES_MAX:
            del changes[: ROUTE_CHANGES_MAX // 2]

    def arm(self, when: float, kind: int, subject: object) -> Timer:
        timer = Timer(when, kind, subject)
        self.timer_count += 1
        heapq.heappush(self.timers, (when, self.timer_count, timer))
        return timer

    def cancel(self, timer: object) -> None:
        """Forget a timer (anything but a Timer is ignored) and, in time, its place in the heap:
        otherwise clients that come and go would leave their keep alive behind for hours."""
        if not isinstance(timer, Timer) or timer.kind == CANCELLED:
            return
        timer.kind = CANCELLED
        timer.subject = None
        self.timers_cancelled += 1
        if self.timers_cancelled > 1000 and self.timers_cancelled * 2 > len(self.timers):
            self.timers = [entry for entry in self.timers if entry[2].kind != CANCELLED]
            heapq.heapify(self.timers)
            self.timers_cancelled = 0

    def begin(self, work: Work) -> None:
        """Do the job in slices, from the next pass of the timers on."""
        if not work.is_queued:
            work.is_queued = True
            self.work.append(work)
            if not self.is_working:
                self.is_working = True
                self.arm(self.now, WORK, None)

    def work_on(self) -> None:
        """One slice of the jobs. What is left goes on in the next turn of the event loop."""
        left = STEPS_PER_TURN
        work = self.work
        while work and left > 0:
            each = work.popleft()
            each.is_queued = False
            left -= max(1, each.step(self, min(left, STEPS_AT_ONCE)))
            if each.goes_on and not each.is_queued:
                each.is_queued = True
                work.append(each)
        self.is_working = bool(work)
        if work:
            self.arm(self.now, WORK, None)

    def take_due(self, now: float) -> list[tuple[int, object]]:
        """(kind, subject) of the timers that have fired, in their order."""
        due: list[tuple[int, object]] = []
        while self.timers and self.timers[0][0] <= now:
            timer = heapq.heappop(self.timers)[2]
            if timer.kind == CANCELLED:
                self.timers_cancelled -= 1
            else:
                due.append((timer.kind, timer.subject))
        return due

    def note(self, level: str, event: str, fields: dict[str, object]) -> None:
        self.effects.append(Note(level, event, fields))

    def append(self, record: Record) -> int:
        """See Journal.append. Returns -1 in a cluster."""
        self.appended += 1
        if self.cluster is None:
            return self.journal.append(record)
        self.cluster.append(record)
        return -1

    def hold(self, held: Held) -> None:
        """Release `held` once everything appended so far is committed, in call order. In a cluster:
        see Cluster.hold."""
        if self.cluster is not None:
            self.cluster.hold(held)
            return
        if self.memory:
            held.release(self)
            return
        held.after = self.journal.sequence
        if not self.held and held.after <= self.journal.committed_sequence:
            held.release(self)
        else:
            self.held.append(held)

    def hold_reply(self, held: Held) -> None:
        """The same for a promise without a record of its own."""
        if self.cluster is not None:
            self.cluster.hold_reply(held)
        else:
            self.hold(held)

    def release_committed(self) -> None:
        """Call after the journal's committed sequence has moved."""
        held = self.held
        committed = self.journal.committed_sequence
        while held and held[0].after <= committed:
            held.popleft().release(self)

    def is_congested(self, part: int = 1) -> bool:
        """Is more pending than `1 / part` of what may be?"""
        limit = self.config.pending_bytes_max // part
        if self.cluster is not None:
            return self.held_bytes > limit or self.cluster.is_congested(part)
        promised = len(self.held) * HELD_BYTES + self.held_bytes
        return self.journal.pending_bytes + promised > limit

    def stall(self, connection: Connection) -> None:
        """The journal is behind: read no more from this client for now. Whatever a client sends
        that is appended counts (see Node._process): a logged or retained QoS 0 message, the
        SUBSCRIBE of a durable session and PUBREL as well as a QoS 1 message."""
        if not connection.input_paused:
            connection.input_paused = True
            self.stalled.append(connection)

    def release_stalled(self) -> None:
        """Call after a write group was taken, and when a cluster is less congested."""
        if self.stalled and not self.is_congested(2):
            for connection in self.stalled:
                self.effects.append(ResumeInput(connection))
            self.stalled = []
