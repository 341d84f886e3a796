"""The entries of one cluster node's core, each played with many sessions and filters.

An entry is a call of the event loop: a method of the runtime, of the broker's node, or a frame. A
row plays what makes one entry expensive, and runs turns until nothing is left to do. Its figures
are the longest single call and the CPU time of all of them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from msgspec import json

from holdfast.io.event_loop.loop import COLLECT_S, COLLECTOR
from holdfast.log.record import SESSION, Record
from holdfast.node import frame_kinds
from holdfast.node.cluster_node import ClusterNode
from holdfast.node.connections.accepted_connect import AcceptedConnect
from holdfast.node.connections.session_open import finish_open
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.frames import ImageRequest, OwnedSessions, encode_frame
from holdfast.node.node_state import NodeState
from holdfast.node.ownership.own_reports import OWNED_MAX
from holdfast.node.routing.interest_frames import Interest
from holdfast.node.routing.qos0_routing import ANNOUNCED_MAX
from holdfast.node.runtime.node_links import NodeLinks
from holdfast.node.runtime.runtime import Runtime
from holdfast.node.session.connection import OPENING, Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.session.session import Session
from holdfast.node.state.recorded_state import SESSION_EXPIRY
from holdfast.node.state.session_records import CloseRecord, encode_session, open_record
from holdfast.protocol.mqtt import packets as m
from tests.sim.process import Process
from tests.sim.world import Settings, World
from tests.support.wire_samples import CLUSTER, wire_samples

PARTITIONS: Final = 16
SETTLE_S: Final = 120.0
EXPIRY_S: Final = 3600
SERVER_KINDS: Final = frozenset({frame_kinds.QUESTION, frame_kinds.ANSWER})
"""The frames that `io.peers.questions` handles, outside the core."""
KINDS: Final = {
    name: kind
    for name, kind in vars(frame_kinds).items()
    if isinstance(kind, int) and name.isupper() and kind not in SERVER_KINDS
}
CALLED_BY_CORE: Final = frozenset(
    {
        "accept_publishes",
        "drain",
        "recorded_state",
        "refuse_publishes",
        "review",
        "send",
        "step",
        "waits_s",
        "when_written",
        "write_journal",
        "writer_full",
    }
)
"""The methods of the runtime and of its links that another entry calls, or that only return a
value."""


def entries() -> set[str]:
    """Every entry of the core: each method of the runtime, and each frame."""
    called = {
        f"{part}.{name}"
        for part, owner in (("runtime", Runtime), ("links", NodeLinks))
        for name in dir(owner)
        if not name.startswith("_") and callable(getattr(owner, name))
        if name not in CALLED_BY_CORE | {"handle_frame"}
    }
    return called | {f"frame {kind}" for kind in KINDS.values()}


class Clock:
    """The longest call of each kind since `begin`, in seconds, and the CPU time of all calls."""

    def __init__(self) -> None:
        # CPU time, and the time on the clock of the same call.
        self.longest: dict[str, tuple[float, float]] = {}
        self.sum_s = 0.0
        self.played: set[str] = set()
        self._depth = 0
        self._collect_at = 0.0
        self.states: list[NodeState] = []
        """The states of the nodes that are measured."""

    def begin(self) -> None:
        self.longest = {}
        self.sum_s = 0.0

    def measure(self, name: str, call: Callable[[], object]) -> object:
        self.played.add(name)
        if self._depth:
            return call()
        self._depth += 1
        try:
            return self._time(name, call)
        finally:
            self._depth -= 1
            leave_large_lists(self.states)
            if self._collect_at <= time.thread_time():
                # As after a turn of the event loop.
                self._time("collector", COLLECTOR.collect)
                self._collect_at = time.thread_time() + COLLECT_S

    def _time(self, name: str, call: Callable[[], object]) -> object:
        begun, begun_at = time.thread_time(), time.perf_counter()
        try:
            return call()
        finally:
            took_s, wall_s = time.thread_time() - begun, time.perf_counter() - begun_at
            self.sum_s += took_s
            self.longest[name] = max((took_s, wall_s), self.longest.get(name, (0.0, 0.0)))


def leave_large_lists(states: list[NodeState]) -> None:
    """Makes the large lists of these nodes permanent, as after a turn of the event loop."""
    if any(state.has_large_list for state in states):
        for state in states:
            state.has_large_list = False
        COLLECTOR.leave_present()


class Measured:
    """An object whose calls are measured. Compiled classes accept no other methods."""

    def __init__(self, measured: object, name: str, clock: Clock) -> None:
        self._measured = measured
        self._name = name
        self._clock = clock

    def __getattr__(self, name: str) -> object:
        found = getattr(self._measured, name)
        if isinstance(found, NodeLinks):
            return Measured(found, "links", self._clock)
        if not callable(found) or isinstance(found, type):
            return found

        def call(*arguments: object, **named: object) -> object:
            if name == "shut_down":
                # The last call of a process that leads nothing any more.
                return found(*arguments, **named)
            entry = f"{self._name}.{name}"
            if name == "handle_frame":
                entry = f"frame {arguments[1]}"
            return self._clock.measure(entry, lambda: found(*arguments, **named))

        return call


def started(partitions: int = PARTITIONS) -> World:
    """A cluster of three nodes without clients that works. Nothing is checked: the sums over all
    sessions would take most of the time, and the nodes have different states."""
    world = World(1, Settings(casts=(), partitions=partitions, snapshot_s=1e6))
    world.checks.turn_ended = lambda process: leave_large_lists([process.state])  # type: ignore[method-assign]
    world.checks.fail = lambda text: None  # type: ignore[method-assign, assignment]
    for host in world.hosts.values():
        host.start()
    world._wait(10.0, world._not_ready, "not ready")
    world.schedule.run(2.0)
    return world


def process_of(world: World, name: str) -> Process:
    process = world.hosts[name].process
    assert process is not None
    return process


def watch(process: Process, clock: Clock) -> None:
    """Measures the calls of a process from now on."""
    clock.states.append(process.state)
    process.runtime = Measured(process.runtime, "runtime", clock)  # type: ignore[assignment]
    process.node = Measured(process.node, "node", clock)  # type: ignore[assignment]


@dataclass(frozen=True)
class Row:
    """The figures of one row."""

    name: str
    longest_ms: float
    """CPU time."""
    wall_ms: float
    """The time that passed during that call, in which other processes ran."""
    entry: str
    """The call that took `longest_ms`."""
    sum_ms: float


class Site:
    """A node n1 whose cluster has `sessions` recorded sessions, a third of them at each node.

    The clients of n1 are connected. n1 and n2 have `filters` filters each. The replicated state of
    n2 and n3 is empty, because only the calls of n1 are measured.
    """

    def __init__(self, sessions: int, filters: int) -> None:
        self.world = started()
        self.schedule = self.world.schedule
        self.process = process_of(self.world, "n1")
        self.cluster_node: ClusterNode = self.process.cluster_node
        self.state = self.process.state
        self.images = self.process.images
        self.clock = Clock()
        self.count = sessions
        self.filters = [f"site/{number % 100}/device/{number}" for number in range(filters)]
        self._fill()
        COLLECTOR.start()
        watch(self.process, self.clock)
        self.runtime = self.process.runtime

    def name(self, number: int) -> str:
        return f"client-{number}"

    def of(self, node: str) -> range:
        """The numbers of the clients of a node. The last tenth of the sessions is closed."""
        return range(int(node[1:]) - 1, self.count * 9 // 10, 3)

    def record(self, client_id: str, owner: str, epoch: int, expiry_s: int = EXPIRY_S) -> None:
        """Opens a session in the replicated state."""
        session = Session(client_id)
        session.epoch = epoch
        session.expiry_s = expiry_s
        payload = encode_session(open_record(session, False, owner))
        home = self.images.home(client_id)
        key = session.key
        self.images.apply(Record(home, SESSION, client_id=key, sequence=epoch, payload=payload))

    def close(self, client_id: str, epoch: int, expiry_s: int) -> None:
        payload = encode_session(CloseRecord(client_id, expiry_s, False, False))
        home = self.images.home(client_id)
        wall_us = self.state.wall_us
        record = Record(
            home, SESSION, client_id=client_id.encode(), sequence=epoch, payload=payload
        )
        record.timestamp_us = wall_us
        self.images.apply(record)

    def _fill(self) -> None:
        for node in ("n1", "n2", "n3"):
            for number in self.of(node):
                self.record(self.name(number), node, 1)
        for number in range(self.count * 9 // 10, self.count):
            self.record(self.name(number), "n2", 1)
            self.close(self.name(number), 1, EXPIRY_S)
        self.images.arm_some_timers(self.count)
        for number in self.of("n1"):
            self.connect(self.name(number), 1)
        for filter in self.filters:
            self.cluster_node.interest.subscribed(filter)
        self.settle()

    def connect(self, client_id: str, epoch: int) -> Connection:
        """Lets a client be connected whose session is recorded for n1."""
        connection = self.process.cores.node.handle_connected("bench", ListenerRules("bench"))
        connection.client_id = client_id
        session = Session(client_id)
        session.epoch = epoch
        packet = m.Connect(4, False, 0, client_id, None, None, None, {})
        opening = AcceptedConnect(packet, EXPIRY_S, {})
        finish_open(self.state, connection, session, False, opening)
        connection.out = None
        connection.out_bytes = 0
        return connection

    def settle(self) -> None:
        """Runs turns until n1 has no work left."""
        self.process.touch()
        self.schedule.run(0.3)
        self.wait(lambda: not self.state.work)

    def wait(self, is_done: Callable[[], bool]) -> None:
        until = self.schedule.now + SETTLE_S
        while not is_done() and self.schedule.now < until:
            self.schedule.run(0.1)

    def frame(self, node: str, kind: int, payload: bytes) -> None:
        self.runtime.links.handle_frame(node, kind, payload, self.world.hosts["n1"].clock())

    def play(self, name: str, scenario: Callable[["Site"], None]) -> Row:
        self.clock.begin()
        scenario(self)
        self.settle()
        longest = self.clock.longest
        entry = max(longest, key=lambda each: longest[each])
        cpu_ms, wall_ms = (round(each * 1e3, 1) for each in longest[entry])
        return Row(name, cpu_ms, wall_ms, entry, round(self.clock.sum_s * 1e3))


def receive_filters(site: Site) -> None:
    for at in range(0, len(site.filters), ANNOUNCED_MAX):
        some = site.filters[at : at + ANNOUNCED_MAX]
        site.frame("n2", frame_kinds.INTEREST, json.encode(Interest(0, at == 0, some, [])))


def receive_report(site: Site, node: str = "n2") -> None:
    """The report of a node, as that node would send it."""
    led = [each for each, epoch in enumerate(site.cluster_node.context.leading) if epoch]
    homes = set(led)
    owned = [(name, 1) for name in map(site.name, site.of(node)) if site.images.home(name) in homes]
    for payload in report_frames(led, owned):
        site.frame(node, frame_kinds.SESSION_OWNED, payload)


def report_frames(led: list[int], owned: list[tuple[str, int]]) -> list[bytes]:
    frames = []
    for at in range(0, max(1, len(owned)), OWNED_MAX):
        some = owned[at : at + OWNED_MAX]
        more = at + OWNED_MAX < len(owned)
        frame = OwnedSessions(partitions=led, owned=some, asking=[], follows=at > 0, more=more)
        frames.append(encode_frame(frame))
    return frames


def receive_lacking_report(site: Site) -> None:
    """A report that lacks every session of its node: all of them are closed."""
    led = [each for each, epoch in enumerate(site.cluster_node.context.leading) if epoch]
    for payload in report_frames(led, []):
        site.frame("n3", frame_kinds.SESSION_OWNED, payload)


def request_report(site: Site) -> None:
    led = list(range(PARTITIONS))
    frame = OwnedSessions(ask=True, partitions=led, epochs=[9] * PARTITIONS, owned=[], asking=[])
    site.frame("n2", frame_kinds.SESSION_OWNED, encode_frame(frame))


def lose_link(site: Site) -> None:
    site.process.close("n2")
    site.schedule.run(3.0)


def lose_leaderships(site: Site) -> None:
    """Each partition that n1 leads goes to another node and comes back."""
    leadership = site.cluster_node.leadership
    led = [(each, epoch) for each, epoch in enumerate(site.cluster_node.context.leading) if epoch]

    def change() -> None:
        for partition, _ in led:
            leadership.stop_leading(partition)

    def come_back() -> None:
        for partition, epoch in led:
            leadership.lead(partition, epoch)

    site.clock.measure("metadata: leaderships lost", change)
    site.settle()
    site.clock.measure("metadata: leaderships won", come_back)


def doubt_ownership(site: Site) -> None:
    """n1 is stopped for longer than `suspect_s`."""
    site.world.hosts["n1"].pause(0.7)
    site.schedule.run(10.0)


def expire(site: Site) -> None:
    """All sessions without a connection end at once."""
    recorded = site.images.state
    due = site.state.now
    for number in range(site.count * 9 // 10, site.count):
        session = recorded.sessions[site.name(number)]
        session.expiry_s = 1
        session.own_rare().disconnected_us = site.state.wall_us - 10_000_000
        recorded.cancel(session.rare.expiry_timer)
        session.own_rare().expiry_timer = recorded.arm(due, SESSION_EXPIRY, session)
    site.schedule.run(5.0)


def end_overdue(site: Site) -> None:
    """A partition is won whose sessions have all expired under another leader."""
    endings = site.cluster_node.session_coordinator.endings
    # n1 may have lost its leaderships when it was stopped.
    site.wait(lambda: any(site.cluster_node.context.leading))
    partition = next(each for each, epoch in enumerate(site.cluster_node.context.leading) if epoch)
    sessions = [
        session
        for number in site.of("n3")
        if site.images.home(site.name(number)) == partition
        and (session := site.images.state.sessions.get(site.name(number))) is not None
    ]
    for session in sessions:
        endings._note_overdue(session.client_id, SESSION_EXPIRY)
    site.clock.measure("start_deciding", lambda: endings.start_deciding(partition))


def snapshot(site: Site) -> None:
    """Each entry of a snapshot is one call, and so is its begin."""
    _, entries = site.runtime.cluster_node.transfer.begin_snapshot()
    play_iterator(site, "snapshot entry", entries)


def play_iterator(site: Site, name: str, entries: Iterator[object]) -> None:
    is_over = False

    def step() -> None:
        nonlocal is_over
        is_over = next(entries, site) is site

    while not is_over:
        site.clock.measure(name, step)


def send_state(site: Site) -> None:
    """n2 requests the replicated state, piece by piece."""
    wanted = [(partition, 0) for partition in range(PARTITIONS)]
    outgoing = site.cluster_node.transfer._sending
    piece = 0
    while True:
        frame = ImageRequest(7, piece, None if piece else wanted)
        site.frame("n2", frame_kinds.IMAGE_REQUEST, encode_frame(frame))
        site.cluster_node.context.outgoing.clear()
        if "n2" not in outgoing:
            return
        piece += 1


def wait_for_sessions(site: Site) -> None:
    """CONNECTs wait for their sessions, then the link of the coordinator comes back."""
    for number in range(min(50_000, site.count // 20)):
        client_id = f"new-{number}"
        connection = site.process.cores.node.handle_connected("bench", ListenerRules("bench"))
        connection.client_id = client_id
        connection.state = OPENING
        packet = m.Connect(4, False, 0, client_id, None, None, None, {})
        site.state.cluster.open_session(connection, client_id, AcceptedConnect(packet, 60, {}))
    site.schedule.run(5.0)


def drain(site: Site) -> None:
    """Clients are sent away at a pace."""
    relocation = site.process.cores.node.relocation
    site.clock.measure("drain", lambda: relocation.drain("n2:1", "drained", 100.0))
    site.schedule.run(1.0)
    relocation.stop()


def node_dies(site: Site) -> None:
    site.world.hosts["n2"].kill(power=True)
    site.schedule.run(5.0)


def start_again(site: Site) -> None:
    site.world.hosts["n2"].start()
    site.schedule.run(5.0)


def each_frame(site: Site) -> None:
    """An example of each frame, with each command of the metadata as a proposal. The sender is
    down, so that no other node receives a reply to what it has not sent."""
    for sample in wire_samples():
        kind = KINDS.get(sample.name.partition(".")[0])
        if sample.format == CLUSTER and kind is not None:
            with contextlib.suppress(BadFrame):
                site.frame("n2", kind, sample.data)


def fill_disk(site: Site) -> None:
    """The disk has only its reserve left, and then space again."""
    site.runtime.check_space(0)
    site.schedule.run(1.0)
    site.runtime.check_space(1 << 40)


def refused_link(site: Site) -> None:
    site.runtime.links.link_refused("n2")


def publish_sys(site: Site) -> None:
    node = site.process.cores.node
    site.state.config.sys_interval_s = 10.0
    site.clock.measure("$SYS", node.sys_topics.publish)


def leave(site: Site) -> None:
    """n1 is asked to stop, and hands over what it leads."""
    site.runtime.ask_to_stop(site.state.now)
    site.runtime.leave(site.state.now)
    site.runtime.hand_over(site.state.now)


def lose_disk(site: Site) -> None:
    """The log is damaged, so n1 serves no client any more."""
    site.runtime.report_removed()
    site.runtime.report_older_copy("bench", may_begin_anew=False)
    site.runtime.distrust_disk()


def restart_partition(site: Site) -> None:
    """The log of a partition begins again behind deleted records."""
    cluster_node = site.cluster_node
    partition = cluster_node.context.leading.index(0)
    end = cluster_node.log.next_offset[partition] + 1000
    cluster_node.replication.suspend(partition)
    cluster_node.log.reset(partition, end)
    site.clock.measure("restart", lambda: cluster_node.effects.restart(partition, end))


ROWS: Final[dict[str, Callable[[Site], None]]] = {
    "a peer announces its filters": receive_filters,
    "a node reports its sessions": receive_report,
    "the same, to a coordinator that knows them": receive_report,
    "a node requests the report of n1": request_report,
    "leaderships are lost and won": lose_leaderships,
    "a link is lost, and comes back": lose_link,
    "CONNECTs wait for their sessions": wait_for_sessions,
    "n1 is stopped for 0.7 s": doubt_ownership,
    "a snapshot": snapshot,
    "n2 takes the replicated state": send_state,
    "a drain at a pace": drain,
    "expired sessions end": expire,
    "a partition with overdue sessions is won": end_overdue,
    "a report lacks the sessions of its node": receive_lacking_report,
    "n2 dies": node_dies,
    "one frame of each kind, each command": each_frame,
    "n2 starts again": start_again,
    "the disk is full": fill_disk,
    "the address of a node refuses": refused_link,
    "$SYS": publish_sys,
    "a partition begins behind deleted records": restart_partition,
    "the disk of n1 is damaged": lose_disk,
    "n1 is asked to stop": leave,
}


def play_all(sessions: int, filters: int, only: str = "") -> Iterator[Row]:
    """Plays the rows whose name contains `only`, one after the other on the same node. Raises
    AssertionError if an entry was not played: it needs a row."""
    site = Site(sessions, filters)
    for name, scenario in ROWS.items():
        if only in name:
            yield site.play(name, scenario)
    missing = entries() - site.clock.played
    assert only or not missing, f"entries without a row: {sorted(missing)}"
