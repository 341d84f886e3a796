"""The node's state. Behaviour is in modules of functions over `NodeState`.

`publish` is the one gate for records with a promise: it appends the record and ties the promise to
it. A promise is everything that may leave only after a record is committed: PUBACK, PUBREC,
PUBCOMP, SUBACK, CONNACK of a durable session, an outbound QoS 2 PUBLISH, a delivery.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from holdfast.log.journal.journal import Journal
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.record import Record
from holdfast.node.admission.control import AdmissionControl
from holdfast.node.config import NodeConfig
from holdfast.node.connections.accepted_connect import AcceptedConnect
from holdfast.node.connections.pending_connects import PendingConnects
from holdfast.node.delivery.replay_pace import ReplayPace
from holdfast.node.effects import Cut, ResumeInput
from holdfast.node.publish.trace_context import PublishTracer
from holdfast.node.refusal import Rejection
from holdfast.node.session.connection import CLOSED, Connection, Deadline
from holdfast.node.session.message import Message
from holdfast.node.session.session import Group, Inflight, Session, Subscription
from holdfast.node.state.recorded_state import PROGRESS, WORK, RecordedState
from holdfast.protocol.topics.trie import SubscriptionTrie
from holdfast.security.acl import RuleSource

PROMISE_BYTES: Final = 300
"""The memory in bytes of one promise that waits for the log, approximately."""

STEPS_PER_TURN: Final = 1000
"""The most steps of large jobs (`Work`) in one turn of the event loop, all jobs together. A step
takes 2 to 10 µs, so they delay a turn by at most some milliseconds."""
STEPS_AT_ONCE: Final = 200
"""The most steps of one job before the others have their turn."""

LARGE_LIST: Final = 10_000
"""More elements make a list large for a collection of garbage."""

STOPPED_MAX: Final = 100
"""The most parts that `NodeState.stopped` names."""

ROUTE_CHANGES_MAX: Final = 256
"""The most changed filters that are remembered, so that routes of other topics stay valid."""


class Promise:
    """A PUBACK, a SUBACK, a delivery, or whatever else waits for the commit of its record.

    It goes to `connection`, if there is one.
    """

    def __init__(self, connection: Connection | None = None) -> None:
        self.connection = connection
        # The number of conditions that are not met yet: records without a commit, and others.
        self.waiting = 0
        # In a cluster whose only node this is: the appended record whose commit it waits for.
        self.appended: Record | None = None
        # The reason code of a positive acknowledgement.
        self.reason = 0
        self.refusal: Rejection | None = None

    def release(self, state: "NodeState") -> None:
        """Keeps the promise: its record is committed. This one only lets others wait behind it."""

    def refuse(self, state: "NodeState", refusal: Rejection) -> None:
        """Takes the place of `release`: the leader of the record's partition refuses the message,
        or the partition has no leader. This one closes the connection: its client gets no reply,
        and sends again what it wants."""
        if self.connection is not None:
            self.connection.close(state.dirty)


class CallbackPromise(Promise):
    """The promise of a record's outcome to a part of the process: `done` is called with "" once it
    is committed, or with the reason of a refusal. Interpreted code cannot derive from `Promise`."""

    def __init__(self, done: Callable[[str], None]) -> None:
        super().__init__()
        self.done = done

    def release(self, state: "NodeState") -> None:
        self.done("")

    def refuse(self, state: "NodeState", refusal: Rejection) -> None:
        self.done(refusal.text or "refused")


class ReplyPromise(Promise):
    """The promise of bytes for a client, kept behind the earlier promises to it."""

    def __init__(self, connection: Connection, data: bytes, acknowledges: bool) -> None:
        super().__init__(connection)
        self.data = data
        self.acknowledges = acknowledges

    def release(self, state: "NodeState") -> None:
        connection = self.connection
        assert connection is not None
        if self.acknowledges:
            connection.note_acknowledged()
        # Nothing follows a DISCONNECT.
        if connection.state != CLOSED and not connection.closing:
            connection.send(self.data, state.dirty)


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


class GroupPort:
    """The shared groups of a node as the broker's core reports on them. A group's cursor is with
    its coordinator, which assigns records to nodes."""

    def changed(self, group: Group) -> None:
        """The group's members here, their capacity, or its cursor may have changed. The coordinator
        logs the cursor within `progress_interval_s`."""
        raise NotImplementedError

    def sent(self, group: Group, message: Message) -> None:
        """The record is about to be sent to a member here, so the group's cursor has moved."""
        self.changed(group)

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


class ClusterPort:
    """The log and the other nodes as the core uses them; `node.cluster_node.BrokerPort` implements
    it. Records go to the leaders of
    their partitions, so their offsets are unknown until they come back committed."""

    groups: GroupPort

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

    def refusal(self, connection: Connection, record: Record) -> Rejection | None:
        """The reason why a client's QoS > 0 message is refused now, which is counted."""
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

    def request_retained(self, subscriptions: list[Subscription]) -> None:
        """Clients have subscribed and need the retained messages of other nodes."""
        raise NotImplementedError

    def is_retained_behind(self, topic: str, subscription: Subscription) -> bool:
        """Whether the clients here have received a QoS 0 update of the retained message that the
        store does not have yet. The subscription then receives it once the store has it."""
        raise NotImplementedError

    def open_session(
        self, connection: Connection, client_id: str, opening: AcceptedConnect
    ) -> None:
        """Becomes the owner of the session, then calls `session_open.finish_open`. The input of the
        connection is paused until then."""
        raise NotImplementedError

    def session_detached(self, session: Session) -> None:
        """The session's connection is closed, and all records about that are appended."""
        raise NotImplementedError

    def hold_filters(
        self, connection: Connection, filters: list[str], then: Callable[[], None]
    ) -> bool:
        """Announces the filters of a SUBSCRIBE, if it may not begin before. True: `then` continues
        it."""
        raise NotImplementedError

    def count_filter(self, filter: str, more: int) -> None:
        """One more session here has this filter, or (-1) one fewer."""
        raise NotImplementedError


class NodeState(RecordedState):
    """The whole state of a node: what its log records, with connections, routes, jobs and
    promises."""

    recorded: RecordedState
    """The state that the committed records define, as far as they are applied here: the sessions of
    all nodes. Anonymous ones are one owner of filters in it. Parts sets it."""
    steps_per_turn: int = STEPS_PER_TURN
    steps_at_once: int = STEPS_AT_ONCE
    """The limits of this node. The simulator makes slices of single steps."""
    has_stopped_partition: bool = False
    """True once a partition is in `stopped`. The state may then have a part of a record. A restart
    rebuilds it from the log."""
    has_large_list: bool = False
    """True if a list of more than LARGE_LIST elements was made since the driver looked. Each
    collection of garbage would visit its elements: 18 ms for 300,000 sessions."""
    tracer: PublishTracer | None = None
    """Traces publishes; None: nothing is traced."""

    def __init__(self, config: NodeConfig, journal: Journal) -> None:
        super().__init__(config, journal)
        # `ClusterNode` sets the one that it implements.
        self.cluster: ClusterPort = ClusterPort()
        # Further values under $SYS/broker/, by name.
        self.sys_values: list[Callable[[], dict[str, str]]] = []
        # Whether this node stores all of the log. Parts sets it.
        self.has_whole_log: Callable[[], bool] = lambda: True
        # Why a session waits for the lake, or "". Parts sets it.
        self.lake_wait: Callable[[Session], str] = lambda session: ""
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

        self.replay_pace = ReplayPace(self)
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

    def note_list(self, length: int) -> None:
        """Notes that a list was made which stays for several turns."""
        if length > LARGE_LIST:
            self.has_large_list = True

    def list_sessions(self) -> list[Session]:
        """The sessions of this node at this moment, for a job in slices."""
        self.note_list(len(self.sessions))
        return list(self.sessions.values())

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
