"""The node's state. Behaviour is in modules of functions over `NodeState`.

`publish` is the one gate for records with a promise: it appends the record and ties the promise to
it. A promise is everything that may leave only after a record is committed: PUBACK, PUBREC,
PUBCOMP, SUBACK, CONNACK of a durable session, an outbound QoS 2 PUBLISH, a delivery.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.log.journal.journal import Journal
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.record import Record
from holdfast.node.admission.control import AdmissionControl
from holdfast.node.cluster_port import ClusterPort
from holdfast.node.config import NodeConfig
from holdfast.node.connections.pending_connects import PendingConnects
from holdfast.node.effects import Cut, ResumeInput
from holdfast.node.promise import Promise
from holdfast.node.publish.trace_context import PublishTracer
from holdfast.node.session.connection import Connection, Deadline
from holdfast.node.session.session import Group, Session, Subscription
from holdfast.node.state.recorded_state import PROGRESS, WORK, RecordedState
from holdfast.protocol.topics.trie import SubscriptionTrie
from holdfast.security.acl import RuleSource

if TYPE_CHECKING:
    from holdfast.node.delivery.replay_pace import ReplayPace

STEPS_PER_TURN: Final = 1000
"""The most steps of large jobs (`Work`) in one turn of the event loop, all jobs together. A step
takes 2 to 10 µs, so they delay a turn by at most some milliseconds."""
STEPS_AT_ONCE: Final = 200
"""The most steps of one job before the others have their turn."""

STOPPED_MAX: Final = 100
"""The most parts that `NodeState.stopped` names."""

ROUTE_CHANGES_MAX: Final = 256
"""The most changed filters that are remembered, so that routes of other topics stay valid."""


class Work:
    """A job too large for one turn of the event loop. NodeState.run_work runs it in slices, in turn
    with the other jobs. A slice is bounded by steps, whether or not they find anything."""

    def __init__(self) -> None:
        # True while it is in NodeState.work.
        self.is_queued = False
        # Set by `step`: whether there is more to do now.
        self.has_more = True

    def step(self, state: "NodeState", steps: int) -> int:
        """Does about `steps` steps and returns the number done."""
        raise NotImplementedError


class Route:
    """The receivers of a topic. They are valid while `version` equals NodeState.route_version."""

    def __init__(self, topic: str, raw: bytes, partition: int) -> None:
        self.topic = topic
        self.raw = raw
        self.partition = partition
        self.version = -1
        # The memory that it counts for, see broker.routing.
        self.size_bytes = 0
        self.targets: list[Subscription] = []
        self.groups: list[Group] = []
        # Sessions that are subscribed to the topic and may not read it.
        self.denied = 0
        # QoS 0 publishes on this topic go into the log.
        self.logged = False
        # One of the targets reads the log.
        self.reads_log = False
        # Clients may not publish here ($SYS).
        self.reserved = False
        # The promise of the newest message whose record is not committed, which messages of QoS 0
        # follow: see broker.publish.completion.PrecedingPromise.
        self.newest: Promise | None = None
        # In a cluster: the offset behind the last one that is committed. Other nodes deliver the
        # topic's messages of QoS 0 when they have applied the records below it.
        self.behind = 0
        # The ClientObserver that observes no messages of this topic.
        self.unobserved_by: object | None = None


class NodeState(RecordedState):
    """The whole state of a node: what its log records, with connections, routes, jobs and
    promises."""

    replay_pace: "ReplayPace | None" = None
    """The rate of replays; None: it was never limited."""
    steps_per_turn: int = STEPS_PER_TURN
    steps_at_once: int = STEPS_AT_ONCE
    """The limits of this node. The simulator makes slices of single steps."""
    has_stopped_partition: bool = False
    """True once a partition is in `stopped`. The state may then have a part of a record. A restart
    rebuilds it from the log."""
    tracer: PublishTracer | None = None
    """Traces publishes; None: nothing is traced."""

    def __init__(self, config: NodeConfig, journal: Journal) -> None:
        super().__init__(config, journal)
        # `ClusterNode` sets the one that it implements.
        self.cluster: ClusterPort = ClusterPort()
        # Further values under $SYS/broker/, by name.
        self.sys_values: list[Callable[[], dict[str, str]]] = []
        self.started_us = 0

        self.connections = 0
        self.deadlines: dict[int, Deadline] = {}  # by second
        self.handshakes = 0  # sockets of clients in a TLS handshake
        self.pending_connects = PendingConnects(
            config.pending_connect_bytes, config.pending_connects_per_address
        )
        self.subscriptions = SubscriptionTrie()
        self.subscription_count = 0
        self.routes: dict[bytes, Route] = {}
        self.routes_bytes = 0
        self.route_version = 0
        # The filters of the newest versions, one for each.
        self.route_changes: list[str] = []
        # The interests of sessions that read the log; broker.delivery.log_replay makes them.
        self.interests: dict[Session, list[ReadInterest]] = {}

        # The number of records appended. A client that makes it grow is paused under congestion.
        self.appended = 0
        # Memory of promises beyond PROMISE_BYTES each: the filters of SUBSCRIBE and UNSUBSCRIBE.
        self.promise_bytes = 0

        self.dirty: list[Connection] = []
        self.work: deque[Work] = deque()
        self.is_working = False
        # Receivers looked up or served since Node._process set it to 0.
        self.spent = 0
        # Ended sessions that are out of `sessions` and still have subscriptions in the routing.
        self.ended: dict[Session, None] = {}
        # Steps left in this turn; further ones become Work.
        self.steps_left = self.steps_per_turn
        self.sessions_in_progress: deque[Session] = deque()
        self.groups_in_progress: deque[Group] = deque()
        self.progress_armed = False

        self.acl: RuleSource | None = None
        self.admission = AdmissionControl(config.admission)
        self.disk_full = False
        self.is_reserve_low = False  # less than half of the reserve is left
        # Clients whose input waits until the journal has written the pending records.
        self.paused_inputs: list[Connection] = []
        self.closing = False
        # In a cluster: sessions may have other owners by now (see sessions.ownership_lease).
        self.is_ownership_expired = False
        # Clients are sent to these nodes: see holdfast.addresses; "": they are not.
        self.redirect = ""
        # Random client ids are drawn by the driver: (prefix, counter) keeps the core deterministic.
        self.client_id_prefix = "auto-"
        self.client_id_count = 0
        # "partition 3" or "session x" -> the invariant that does not hold there.
        self.stopped: dict[str, str] = {}

    def note_stopped(self, part: str, error: str) -> None:
        """Reports a part of the node that goes on no more, because an invariant of it does not
        hold. The other parts go on."""
        self.stats.invariants_broken += 1
        if part not in self.stopped and len(self.stopped) < STOPPED_MAX:
            self.stopped[part] = error
            self.note("critical", "invariant_broken", {"part": part, "error": error})

    def stop_partition(self, partition: int, error: str) -> None:
        """Reports a partition that this node neither follows, leads nor applies any more."""
        self.has_stopped_partition = True
        self.note_stopped(f"partition {partition}", error)

    def stop_session(self, session: Session, error: AssertionError) -> None:
        """Cuts off the client of a session whose state is wrong. It may come back, and then the
        session continues from its cursor."""
        self.note_stopped(f"session {session.client_id}", str(error))
        if session.connection is not None:
            self.effects.append(Cut(session.connection))

    def change_routes(self, filter: str = "") -> None:
        """Invalidates the routes of the topics that a plain filter matches, or of all topics."""
        self.route_version += 1
        changes = self.route_changes
        if not filter:
            changes.clear()
            return
        changes.append(filter)
        if len(changes) > ROUTE_CHANGES_MAX:
            del changes[: ROUTE_CHANGES_MAX // 2]

    def arm_progress(self, wait_s: float) -> None:
        """Logs the cursors that moved after `wait_s` seconds, unless that is scheduled already."""
        if not self.progress_armed:
            self.progress_armed = True
            self.arm(self.now + wait_s, PROGRESS, None)

    def start_work(self, work: Work) -> None:
        """Queues the job. It runs in slices from the next pass of the timers on."""
        if not work.is_queued:
            work.is_queued = True
            self.work.append(work)
            if not self.is_working:
                self.is_working = True
                self.arm(self.now, WORK, None)

    def run_work(self) -> None:
        """Runs one slice of the jobs. The rest follows in the next turn of the event loop."""
        left = self.steps_per_turn
        work = self.work
        while work and left > 0:
            each = work.popleft()
            each.is_queued = False
            left -= max(1, each.step(self, min(left, self.steps_at_once)))
            if each.has_more and not each.is_queued:
                each.is_queued = True
                work.append(each)
        self.is_working = bool(work)
        if work:
            self.arm(self.now, WORK, None)

    def append(self, record: Record) -> None:
        """Appends a record."""
        self.appended += 1
        self.cluster.append(record)

    def publish(self, record: Record, promise: Promise) -> None:
        """Appends a record, and releases the promise once it is committed. The promises of one
        connection are released in call order."""
        self.appended += 1
        self.cluster.publish(record, promise)

    def promise(self, promise: Promise) -> None:
        """Releases a promise that has no record of its own, behind the earlier ones."""
        self.cluster.promise(promise)

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two turns."""
        super().check()
        assert self.promise_bytes >= 0, "fewer bytes of promises than none"
        assert self.routes_bytes == sum(each.size_bytes for each in self.routes.values())
        assert all(work.is_queued for work in self.work), "a job is queued and does not know it"
        self.pending_connects.check()

    def stop_promise(self, promise: Promise, error: AssertionError) -> None:
        """Stops the session of a promise that could not be kept. Raises the error if there is
        none."""
        connection = promise.connection
        if connection is None or connection.session is None:
            raise error
        self.stop_session(connection.session, error)

    def is_congested(self, part: int = 1) -> bool:
        """Whether more than `1 / part` of the allowed bytes is pending."""
        return self.cluster.is_congested(part)

    def pause_input(self, connection: Connection) -> None:
        """Stops reading from a client because the journal is behind. Every appended packet counts:
        QoS 1, logged or retained QoS 0, PUBREL, SUBSCRIBE of a durable session."""
        if not connection.input_paused:
            connection.input_paused = True
            self.paused_inputs.append(connection)

    def resume_inputs(self) -> None:
        """Reads from the stalled clients again once less than half of the limit is pending. Called
        after a write group, and when a cluster is less congested."""
        if self.paused_inputs and not self.is_congested(2):
            for connection in self.paused_inputs:
                self.effects.append(ResumeInput(connection))
            self.paused_inputs = []
