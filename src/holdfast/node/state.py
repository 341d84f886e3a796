"""The node's state. Behaviour lives beside it, in modules of functions over `NodeState`.

`held` is the one gate that keeps promises back: whatever may leave only after a record is
committed (PUBACK, PUBREC, PUBCOMP, SUBACK, CONNACK of a durable session, an outbound QoS 2
PUBLISH, a delivery) waits in it, in append order, until the journal's committed sequence has
passed it.
"""

import heapq
from collections import deque
from typing import Final

from holdfast.log.journal import Journal
from holdfast.node.config import NodeConfig
from holdfast.node.effects import Effect, Note, ResumeInput
from holdfast.node.producers import ProducerTable
from holdfast.node.stats import Stats
from holdfast.security.acl import AclFile
from holdfast.security.enhanced import Factory
from holdfast.session.connection import Connection
from holdfast.session.cursor import Cursor
from holdfast.session.session import Session, Subscription
from holdfast.topics.retained import RetainedTrie
from holdfast.topics.trie import SubscriptionTrie

CANCELLED: Final = 0
KEEP_ALIVE: Final = 1
CONNECT_TIMEOUT: Final = 2
WILL_DUE: Final = 3
SESSION_EXPIRY: Final = 4
PROGRESS: Final = 5
SYS: Final = 6
SCAN: Final = 7


class Timer:
    def __init__(self, when: float, kind: int, subject: object) -> None:
        self.when = when
        self.kind = kind
        self.subject = subject


class Held:
    """A promise that waits for its record. `after`: the journal sequence that must be committed."""

    def __init__(self) -> None:
        self.after = 0

    def release(self, state: "NodeState") -> None:
        raise NotImplementedError


class Group(Cursor):
    """A shared subscription `$share/name/filter`: one cursor for all its members.

    Invariant: a record is with exactly one of: the outbox or the log (not handed out yet),
    `returned` (a member left before acknowledging it), one member's inflight.
    """

    def __init__(self, name: str, filter: str) -> None:
        super().__init__()
        self.name = name
        self.filter = filter
        self.key = f"$share/{name}/{filter}"
        self.members: dict[Session, Subscription] = {}
        self.turn = 0
        self.returned: deque[object] = deque()
        self.logged_positions: list[int] | None = None
        self.progress_due = False


class Route:
    """Who receives a topic; valid while `version` equals NodeState.route_version."""

    def __init__(self, topic: str, raw: bytes, partition: int) -> None:
        self.topic = topic
        self.raw = raw
        self.partition = partition
        self.version = -1
        self.targets: list[Subscription] = []
        self.groups: list[Group] = []
        # QoS 0 publishes on this topic go into the log.
        self.logged = False
        # Clients may not publish here ($SYS).
        self.reserved = False


class NodeState:
    def __init__(self, config: NodeConfig, journal: Journal) -> None:
        self.config = config
        self.journal = journal
        self.memory = config.memory_durability
        self.stats = Stats()
        # Set by the driver before every call: monotonic seconds, wall clock microseconds.
        self.now = 0.0
        self.wall_us = 0
        self.started_us = 0

        self.sessions: dict[str, Session] = {}
        self.connections = 0
        self.subscriptions = SubscriptionTrie()
        self.subscription_count = 0
        self.groups: dict[str, Group] = {}
        self.retained = RetainedTrie()
        self.producers = ProducerTable(config.producers_max, config.producer_expiry_s)
        # When a producer was last evicted; 0.0: never.
        self.producers_noted_at = 0.0
        self.routes: dict[bytes, Route] = {}
        self.route_version = 0

        self.held: deque[Held] = deque()
        # Per partition, the first offset not yet handed to the tailing readers.
        self.delivered: list[int] = list(journal.high_watermark)

        self.dirty: list[Connection] = []
        self.effects: list[Effect] = []
        self.timers: list[tuple[float, int, Timer]] = []
        self.timer_count = 0
        self.timers_cancelled = 0
        self.sessions_in_progress: list[Session] = []
        self.groups_in_progress: list[Group] = []
        self.progress_armed = False

        self.acl: AclFile | None = None
        self.checks_passwords = False
        # Enhanced authentication by method name.
        self.authenticators: dict[str, Factory] = {}
        self.disk_full = False
        # Publishers whose input waits until the journal has written what is pending.
        self.stalled: list[Connection] = []
        self.closing = False
        # Random client ids are drawn by the driver: (prefix, counter) keeps the core deterministic.
        self.client_id_prefix = "auto-"
        self.client_id_count = 0

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

    def note(self, level: str, event: str, fields: dict[str, object]) -> None:
        self.effects.append(Note(level, event, fields))

    def hold(self, held: Held) -> None:
        """Release `held` once everything appended so far is committed, in call order."""
        if self.memory:
            held.release(self)
            return
        held.after = self.journal.sequence
        if not self.held and held.after <= self.journal.committed_sequence:
            held.release(self)
        else:
            self.held.append(held)

    def release_committed(self) -> None:
        """Call after the journal's committed sequence has moved."""
        held = self.held
        committed = self.journal.committed_sequence
        while held and held[0].after <= committed:
            held.popleft().release(self)

    def stall(self, connection: Connection) -> None:
        """The journal is behind: read no more from this publisher for now."""
        if not connection.input_paused:
            connection.input_paused = True
            self.stalled.append(connection)

    def release_stalled(self) -> None:
        """Call after a write group was taken."""
        if self.stalled and self.journal.pending_bytes <= self.config.pending_bytes_max // 2:
            for connection in self.stalled:
                self.effects.append(ResumeInput(connection))
            self.stalled = []
