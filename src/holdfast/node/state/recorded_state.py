"""State of a broker that the records of its log define.

A node has two: that of its `NodeState` has the sessions that it owns, and the other is the
replicated state, with the sessions of all nodes. The second one has no connections, no routes and
no promises, so it is of this small type: nothing can be delivered from it by mistake.

Here are the tables and the operations on them. A module over `NodeState` adds what clients and
other nodes notice of a change, for example `delivery.subscriptions` the routing.
"""

import heapq
from collections.abc import Callable
from typing import Final

from holdfast.log.journal.journal import Journal
from holdfast.node.admission.bans import BanTable
from holdfast.node.admission.shares import Shares
from holdfast.node.config import NodeConfig
from holdfast.node.connections.pending_connects import address_of
from holdfast.node.connections.repeats import Repeats
from holdfast.node.effects import Effect, Note
from holdfast.node.groups.queue_keeper import Keeper
from holdfast.node.publish.delayed_table import DelayedTable
from holdfast.node.publish.producers import ProducerTable
from holdfast.node.session.message import Message
from holdfast.node.session.session import (
    FEDERATION,
    FEDERATION_KEY,
    NO_INFLIGHT,
    NO_SUBSCRIPTIONS,
    Group,
    GroupMember,
    Session,
    Subscription,
)
from holdfast.node.state.member_values import MemberValues
from holdfast.node.state.retained_store import RetainedTable
from holdfast.node.stats import Stats
from holdfast.protocol.topics.names import is_shared, split_shared

CANCELLED: Final = 0
KEEP_ALIVE: Final = 1
WILL_DUE: Final = 3
SESSION_EXPIRY: Final = 4
PROGRESS: Final = 5
SYS: Final = 6
WORK: Final = 7
THROTTLE: Final = 8
IDENTITY_ENDS: Final = 9
REPLAY: Final = 10
DELAYED: Final = 11
TOPIC_RIGHTS: Final = 12
WITHHELD: Final = 13
RIGHTS_CHANGED: Final = 14
RELOCATION: Final = 15

LOOK_AGAIN_S: Final = 60.0
"""The longest time in seconds until the clock is compared with the earliest delayed message again.
A wall clock that is set meanwhile delays it no longer than that."""


class Timer:
    """A time at which `kind` of action is due for `subject`. `number`: its place among timers of
    the same time, 0 once it has been removed. It is an entry of the heap itself, because every
    session away may have two."""

    def __init__(self, when: float, number: int, kind: int, subject: object) -> None:
        self.when = when
        self.number = number
        self.kind = kind
        self.subject = subject

    def __lt__(self, other: "Timer") -> bool:
        if self.when != other.when:
            return self.when < other.when
        return self.number < other.number


class RecordedState:
    """The sessions, shared groups, retained messages, producers and bans that records define, with
    the timers of wills and expiries."""

    def __init__(self, config: NodeConfig, journal: Journal) -> None:
        self.config = config
        self.journal = journal
        self.stats = Stats()
        self.repeats = Repeats()
        # Set by the driver before every call: monotonic seconds, wall clock microseconds.
        self.now = 0.0
        self.wall_us = 0

        self.sessions: dict[str, Session] = {}
        self.groups: dict[str, Group] = {}
        # The memory of the filters of all sessions.
        self.filters = Shares()
        # The keepers of queues by key, see `node.groups.queue_keeper`.
        self.queues: dict[str, Keeper] = {}
        self.retained = RetainedTable()
        self.delayed = DelayedTable()
        self.producers = ProducerTable(config.producers_max, config.producer_expiry_s)
        self.bans = BanTable()
        self.member = MemberValues()
        # Per partition, the first offset not yet handed to the tailing readers.
        self.delivered: list[int] = list(journal.high_watermark)
        # Whether the log was put back to an earlier copy since its creation.
        self.was_put_back = False
        # Called with a filter, and True when a client's session subscribes, False when it stops.
        self.watch_interest: Callable[[str, bool], None] | None = None
        # Called with the empty message by which a client removed a retained one.
        self.watch_removal: Callable[[Message], None] | None = None
        # Whether the topic of the last retained message from a federation had none before.
        self.is_first_retained = False

        self.effects: list[Effect] = []
        self.timers: list[Timer] = []
        self.timer_count = 0
        self.timers_cancelled = 0

    def note(self, level: str, event: str, fields: dict[str, object]) -> None:
        """Emits a line for the log of the process."""
        self.effects.append(Note(level, event, fields))

    def pop_effects(self) -> list[Effect]:
        """Removes and returns the effects. Those of the replicated state are its log lines."""
        effects = self.effects
        self.effects = []
        return effects

    # Timers

    def arm(self, when: float, kind: int, subject: object) -> Timer:
        """Starts a timer."""
        self.timer_count += 1
        timer = Timer(when, self.timer_count, kind, subject)
        heapq.heappush(self.timers, timer)
        return timer

    def cancel(self, timer: object) -> None:
        """Cancels a timer (anything but a Timer is ignored) and later remove it from the heap.
        Otherwise clients that come and go would leave their keep alive there for hours."""
        if not isinstance(timer, Timer) or timer.kind == CANCELLED or not timer.number:
            return
        timer.kind = CANCELLED
        timer.subject = None
        self.timers_cancelled += 1
        if self.timers_cancelled > 1000 and self.timers_cancelled * 2 > len(self.timers):
            self.timers = [each for each in self.timers if each.kind != CANCELLED]
            heapq.heapify(self.timers)
            self.timers_cancelled = 0

    def arm_delayed(self) -> None:
        """Starts the timer for the earliest delayed message, unless there is one in time.

        Times of messages are those of the wall clock, in a cluster of the cluster clock, and timers
        use the monotonic clock. So a timer only says when to compare the clock with the earliest
        message. A clock that is set back or forth meanwhile publishes no message at the wrong time.
        """
        table = self.delayed
        due_us = table.earliest_us()
        if due_us is None:
            return
        wait_s = min(max(0.0, (due_us - self.wall_us) / 1_000_000), LOOK_AGAIN_S)
        when = self.now + wait_s
        if not table.armed_at or when < table.armed_at:
            table.armed_at = when
            self.arm(when, DELAYED, table)

    def pop_timers(self, now: float, count_max: int) -> list[Timer]:
        """Removes and returns the due timers, the earliest first, at most so many."""
        due: list[Timer] = []
        while self.timers and self.timers[0].when <= now and len(due) < count_max:
            timer = heapq.heappop(self.timers)
            timer.number = 0
            if timer.kind == CANCELLED:
                self.timers_cancelled -= 1
            else:
                due.append(timer)
        return due

    def pop_due(self, now: float, count_max: int) -> list[tuple[int, object]]:
        """Removes due timers, at most so many, and returns (kind, subject) of each, in their
        order."""
        return [(timer.kind, timer.subject) for timer in self.pop_timers(now, count_max)]

    # Sessions and groups

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two records."""
        for client_id, session in self.sessions.items():
            assert session.client_id == client_id, "a session under another name"
            session.check()
        for key, group in self.groups.items():
            assert group.key == key, "a group under another name"
            assert group.members, "a group without members"
            group.check()
        cancelled = sum(timer.kind == CANCELLED for timer in self.timers)
        assert self.timers_cancelled == cancelled, "the number of cancelled timers"
        self.retained.check()
        self.filters.check()
        self.delayed.check()
        self.producers.check()

    def client_sessions(self) -> int:
        """The number of sessions of clients, connected or not."""
        return len(self.sessions) - (FEDERATION in self.sessions) - len(self.queues)

    def set_subscription(self, subscription: Subscription) -> None:
        """Adds a subscription, or replaces the one with the same filter. [MQTT-3.8.4-3]"""
        session = subscription.session
        filter = subscription.filter
        old = session.subscriptions.get(filter)
        if old is None:
            if not session.is_internal:
                session.filter_owner = filter_owner(session)
                self.filters.change(session.filter_owner, filter_memory(filter))
                if self.watch_interest is not None:
                    self.watch_interest(filter, True)
            session.filter_bytes += filter_bytes(filter)
        if session.subscriptions is NO_SUBSCRIPTIONS:
            session.subscriptions = {}
        session.subscriptions[filter] = subscription
        if subscription.start is not None:
            session.has_starts = True
        if subscription.drains:
            session.has_drains = True
        if not is_shared(filter):
            return
        assert isinstance(subscription, GroupMember)
        group = self.groups.get(filter)
        if group is None:
            name, inner = split_shared(filter)
            group = Group(name, inner)
            group.start = list(self.delivered)
            self.groups[filter] = group
        elif old is not None:
            detach_member(group, group.members[session])
        if session not in group.members:
            group.changes += 1
        group.members[session] = subscription
        subscription.group = group
        if session.groups is None:
            session.groups = {}
        session.groups[group] = subscription
        if session.connection is not None:
            group.attach(subscription)

    def pop_subscription(self, session: Session, filter: str) -> Subscription | None:
        """Removes a subscription and returns it, or None if there is none. Its group ends with its
        last member."""
        subscription = session.subscriptions.pop(filter, None)
        if subscription is None:
            return None
        if not session.is_internal:
            self.filters.change(session.filter_owner, -filter_memory(filter))
            if self.watch_interest is not None:
                self.watch_interest(filter, False)
        session.filter_bytes -= filter_bytes(filter)
        session.forget_owed(filter)
        group = subscription.group
        if group is None:
            return subscription
        detach_member(group, group.members[session])
        del group.members[session]
        group.changes += 1
        assert session.groups is not None
        del session.groups[group]
        if not session.groups:
            session.groups = None
        if not group.members:
            del self.groups[group.key]
        return subscription

    def pop_session(self, session: Session) -> None:
        """Removes a session without a connection. Its subscriptions remain for the caller to
        remove."""
        if self.sessions.get(session.client_id) is session:
            del self.sessions[session.client_id]
        if self.queues.get(session.client_id) is session:
            del self.queues[session.client_id]
        self.cancel(session.rare.expiry_timer)
        self.cancel(session.rare.will_timer)
        session.inflight = NO_INFLIGHT
        session.outbox = None
        session.retained_scans = None
        session.inbound = None
        if session.rare.doubtful is not None:
            session.rare.doubtful = None
        session.changes = None
        # A progress record after the end would have no effect, and is not written.
        session.expiry_s = 0

    # Retained messages

    def set_retained(self, topic: str, message: Message) -> None:
        """Replaces the retained message of a topic [MQTT-3.3.1-5], or removes it if the new one is
        empty. [MQTT-3.3.1-6] [MQTT-3.3.1-7]

        The limits do not count here: every node and every recovery must keep the same. The node
        that appends the record checks them, and appends the removal (`completion.removal`).
        """
        if message.publisher == FEDERATION_KEY:
            self.is_first_retained = bool(message.payload) and self.retained.get(topic) is None
        elif not message.payload and self.watch_removal is not None:
            self.watch_removal(message)
        if not message.payload:
            self.retained.remove(topic)
        elif message.qos == 0:
            # A QoS 0 message is in no outbox, so its delivery is over.
            message.drop_frames()
            self.retained.set(topic, message)
        else:
            self.retained.set(topic, message.without_frames())

    def note_retained_limit(self, topic: str) -> None:
        """Counts a message that found no room in the retained store."""
        self.stats.refused_quota += 1
        if self.repeats.count("retained_limit", self.now):
            self.note(
                "warning",
                "retained_limit",
                {
                    "topic": topic[:200],
                    "retained_max": self.config.retained_max,
                    "retained_bytes": self.config.retained_bytes_max,
                },
            )


def detach_member(group: Group, member: GroupMember) -> None:
    """Takes a member out of the order of its group, and of the members that block its session."""
    group.detach(member)
    if member.session.blocked is not None:
        member.session.blocked.pop(member, None)


FILTER_OVERHEAD_BYTES: Final = 500
"""The memory in bytes of a filter beside its text, approximately."""
GROUP_OVERHEAD_BYTES: Final = 2500
"""That of a shared filter. Each member counts as the only one of its group."""


def filter_bytes(filter: str) -> int:
    """The length of a filter in UTF-8."""
    return len(filter) if filter.isascii() else len(filter.encode())


def filter_memory(filter: str) -> int:
    """The memory of a filter in bytes, as it counts."""
    overhead_bytes = GROUP_OVERHEAD_BYTES if is_shared(filter) else FILTER_OVERHEAD_BYTES
    return overhead_bytes + filter_bytes(filter)


def filter_owner(session: Session) -> str:
    """The user whose share of the filters a session needs, or the address of an anonymous one. It
    is the same while the session has filters, from wherever its client connects. After a restart
    the address is not known, and such sessions are one owner."""
    if session.subscriptions:
        return session.filter_owner
    if session.username is not None or session.connection is None:
        return session.username or ""
    # No user name of MQTT contains U+0000. [MQTT-1.5.4-2]
    return "\0" + address_of(session.connection.remote)
