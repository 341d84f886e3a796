"""Replicated state that is compared while a run goes on, not only at its end.

`ImagesWatch`: the image of a session or a shared group is a function of the records of its home
partition. So after the record at one offset it is the same on every node. Counter-example: a node
that fills in a cursor from the records it has delivered itself differs from the others until the
session logs a cursor, and a takeover in between resumes at the wrong offset.

`FeedsWatch`: a mark of a gateway passes only records that it was fed, or does not need.
Counter-example: a client subscribes, and the leader has the filter after a mark that the
subscription begins at.

`OwnersWatch`: the owner of an open session has it. Counter-example: the leader opens a session for
a request of a process that has ended. Nobody has the session then, so its will is never published
and it never expires.

A client is connected to one node, also with a session that no record tells of [MQTT-3.1.4-3].
Counter-example: a new leader gives such a session away before it has heard the node that has it,
and neither node lets go.

An epoch of a session is with one node. Counter-example: two leaders of a home give a client the
same one at two nodes, and a QoS 2 message at the second is taken for one that the client sent at
the first.

A record that is assigned to a node waits for a member there, or one has it. Counter-example: the
last member leaves, another one joins in the same turn, and the returned records stay in the group
of the first one. The coordinator waits for them for good. Nor does the coordinator assign such a
record again. Counter-example: two nodes report a record, the first one returns it, and the session
at the second gets it twice.

A session's timers are its own, one of each kind. Counter-example: two timers are armed for the end
of a session, the client comes back, one of them is cancelled, and the other one ends the session
after its next connection.
"""

import itertools
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.log import record as log_record
from holdfast.log.batch import Batch
from holdfast.log.partition import partition_of
from holdfast.log.record import Record
from holdfast.node.publish.apply import Applier
from holdfast.node.session.message import Message
from holdfast.node.session.session import Inflight, Session, tag_of
from holdfast.node.state.recorded_state import SESSION_EXPIRY, WILL_DUE
from holdfast.node.state.replicated import ReplicatedState
from holdfast.protocol.topics.names import is_shared, matches

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.process import Process
    from tests.sim.world import World

LOOK_S: Final = 0.1
ORPHANED_MAX_S: Final = 3.0
"""How long an open session may be without its owner while its home partition works."""
DOUBLE_MAX_S: Final = 1.0
"""How long two nodes may have a session that no record tells of, while its home partition works and
its leader reaches both."""


class AppliedRecords:
    """Reports each record of a session or a group after it is applied."""

    def __init__(self, applier: Applier) -> None:
        self._pass_on = applier.on_session
        applier.on_session = self._applied
        self.on_applied: Callable[[Record], None] | None = None
        # Per partition: from this offset on the images contain exactly the records up to the one
        # that is applied. Snapshots and images of other nodes may be ahead before it.
        self.exact_from: list[int] = []

    def _applied(self, record: Record) -> None:
        if self.on_applied is not None and record.kind in (log_record.SESSION, log_record.CURSOR):
            self.on_applied(record)
        self._pass_on(record)


class FeedsWatch:
    """Compares the marks of a gateway with the committed log and with what it was fed."""

    def __init__(self, process: "Process") -> None:
        self._process = process
        partitions = process.host.world.settings.partitions
        self._fed: list[set[int]] = [set() for _ in range(partitions)]
        self._marks = [0] * partitions
        # The filters of connected clients, and the marks when each was seen first.
        self._filters: dict[str, list[int]] = {}
        process.cluster_node.feeds.receiver.on_record = self._note

    def _note(self, partition: int, offset: int) -> None:
        self._fed[partition].add(offset)

    def look(self, committed: list[list[Batch]]) -> None:
        """After each turn: a mark passes no record that the node needs and was not fed."""
        process = self._process
        marks = process.state.delivered
        starts = process.cluster_node.applier.starts
        transfer = process.cluster_node.transfer
        for partition, mark in enumerate(marks):
            if transfer.lacks(partition):
                # The leader's log begins at the mark. The state before it is still to come.
                continue
            # The state below `starts` came by transfer.
            begin = max(self._marks[partition], starts[partition])
            self._look_at(partition, begin, mark, committed[partition])
        self._marks = list(marks)
        self.note_filters()

    def note_filters(self) -> None:
        """After each turn, whether or not a mark moved. Counter-example: a session leaves, its
        filters are withdrawn, and the mark passes a record of them some turns later."""
        process = self._process
        present = {
            filter
            for session in process.state.sessions.values()
            if session.connection is not None
            for filter in session.subscriptions
            if not is_shared(filter)
        }
        for gone in self._filters.keys() - present:
            del self._filters[gone]
        for filter in present:
            self._filters.setdefault(filter, list(process.state.delivered))

    def _look_at(self, partition: int, begin: int, mark: int, committed: list[Batch]) -> None:
        checks, name = self._process.host.world.checks, self._process.host.name
        end = committed[-1].end_offset if committed else 0
        if mark > end:
            checks.fail(f"{name}: the mark of partition {partition} is {mark}, committed {end}")
        fed = self._fed[partition]
        at = max(0, bisect_right(committed, begin, key=lambda each: each.base_offset) - 1)
        while at < len(committed) and committed[at].base_offset < mark:
            for record in committed[at].records():
                is_new = begin <= record.offset < mark
                if is_new and record.offset not in fed and self._needs(record):
                    checks.fail(
                        f"{name}: the mark {mark} of partition {partition} passes offset"
                        f" {record.offset}, kind {record.kind}, {record.topic!r}"
                    )
            at += 1
        fed.clear()

    def _needs(self, record: Record) -> bool:
        if record.is_state() or record.kind != log_record.MESSAGE:
            return record.is_state()
        topic = record.topic.decode()
        return any(
            matches(filter, topic) and start[record.partition] <= record.offset
            for filter, start in self._filters.items()
        )


class ImagesWatch:
    def __init__(self, world: "World") -> None:
        self._world = world
        # (partition, offset) of a record -> the image after it, and the first node that had it.
        self._views: dict[tuple[int, int], tuple[dict[str, object], str]] = {}
        self.compared = 0

    def begin(self, process: "Process") -> None:
        """The process has recovered, or gets images of another node."""
        applied = process.cores.applied
        applied.exact_from = self._world.checks.ends()
        applied.on_applied = lambda record: self._applied(process, record)

    def _applied(self, process: "Process", record: Record) -> None:
        images = process.images
        if record.offset < process.cores.applied.exact_from[record.partition]:
            return
        key = record.client_id.decode()
        view = _view(images, key)
        name = process.host.name
        known = self._views.setdefault((record.partition, record.offset), (view, name))
        if known[1] == name:
            return
        self.compared += 1
        if known[0] != view:
            names = [each for each in {**known[0], **view} if known[0].get(each) != view.get(each)]
            text = ", ".join(f"{each}: {known[0].get(each)} and {view.get(each)}" for each in names)
            self._world.checks.fail(
                f"the image of {key} after offset {record.offset} of partition {record.partition}"
                f" differs: {known[1]} and {name}, {text}"
            )


def _view(images: ReplicatedState, key: str) -> dict[str, object]:
    session = images.state.sessions.get(key)
    if session is not None:
        return _session_view(images, session)
    if key in images.group_positions:
        done = images.groups.done[key].items() if key in images.groups.done else []
        return {
            "positions": list(images.group_positions[key]),
            "done": {
                partition: ranges.ranges()
                for partition, ranges in sorted(done, key=lambda each: each[0])
            },
            "epoch": images.groups.epochs.get(key, 0),
        }
    return {}


def _session_view(images: ReplicatedState, session: Session) -> dict[str, object]:
    """Without the will: records of other partitions may have published it."""
    return {
        "epoch": session.epoch,
        "owner": session.owner,
        "is open": images.open_sessions.has(session),
        "expiry": session.expiry_s,
        "username": session.username,
        "disconnected": session.rare.disconnected_us,
        "subscriptions": sorted(
            (filter, each.qos, each.start) for filter, each in session.subscriptions.items()
        ),
        "positions": None if session.positions is None else list(session.positions),
        "inflight": sorted(
            (packet_id, each.partition, each.offset, each.qos, each.state, each.group_tag)
            for packet_id, each in session.inflight.items()
        ),
        "done": sorted(session.done or ()),
        "maybe sent": session.rare.lacks_sent,
        "born": session.life,
    }


class OwnersWatch:
    def __init__(self, world: "World") -> None:
        self._world = world
        # (client, epoch) -> how long its owner was without it, while its home worked.
        self._orphaned_s: dict[tuple[str, int], float] = {}
        # Per host and partition: where the log ended when it was looked at last.
        self._ends: dict[tuple[str, int], int] = {}
        self.longest_s = 0.0
        # Client -> how long two nodes had it, while its home worked.
        self._double_s: dict[str, float] = {}
        # (client, epoch) -> the node that it was given to.
        self._given: dict[tuple[str, int], str] = {}

    def begin(self) -> None:
        self._world.schedule.after(LOOK_S, self._look)

    def _look(self) -> None:
        self._world.schedule.after(LOOK_S, self._look)
        orphaned: set[tuple[str, int]] = set()
        deciding: dict[int, Process] = {}
        for host in self._world.client_hosts:
            process = host.process
            if process is None or host.is_paused:
                continue
            self._look_at_timers(process)
            self._look_at_epochs(process)
            self._look_at_assigned(process)
            self._look_at_unheld(process)
            for partition in range(self._world.settings.partitions):
                if self._works(host, process, partition):
                    deciding[partition] = process
                    self._look_at(process, partition, orphaned)
        for key in [each for each in self._orphaned_s if each not in orphaned]:
            if not self._is_orphan_anywhere(*key):
                del self._orphaned_s[key]
        self._look_for_doubles(deciding)

    def _look_for_doubles(self, deciding: "dict[int, Process]") -> None:
        nodes: dict[str, list[str]] = {}
        for host in self._world.client_hosts:
            if host.process is not None:
                for session in host.process.state.sessions.values():
                    if session.connection is not None and not session.recorded:
                        nodes.setdefault(session.client_id, []).append(host.name)
        doubles = {client_id: names for client_id, names in nodes.items() if len(names) > 1}
        for client_id in [each for each in self._double_s if each not in doubles]:
            del self._double_s[client_id]
        for client_id, names in doubles.items():
            leader = deciding.get(partition_of(client_id.encode(), self._world.settings.partitions))
            if leader is None or not all(self._reaches(leader, name) for name in names):
                continue
            lasted_s = self._double_s.get(client_id, 0.0) + LOOK_S
            self._double_s[client_id] = lasted_s
            if lasted_s > DOUBLE_MAX_S:
                self._world.checks.fail(
                    f"{client_id} has been connected to {' and '.join(names)} for {lasted_s:.1f} s"
                )

    def _look_at_epochs(self, process: "Process") -> None:
        owners = process.cluster_node.session_coordinator.owners._owners
        # One with a record counts when that is committed: its node then has the session.
        given = [
            (client_id, each.epoch, each.node)
            for client_id, each in owners.items()
            if not each.recorded
        ]
        for session in process.state.sessions.values():
            if session.connection is not None:
                given.append((session.client_id, session.epoch, process.host.name))
        for client_id, epoch, node in given:
            known = self._given.setdefault((client_id, epoch), node)
            if known != node:
                self._world.checks.fail(f"epoch {epoch} of {client_id} is with {known} and {node}")

    def _look_at_timers(self, process: "Process") -> None:
        for timer in process.images.state.timers:
            session = timer.subject
            if timer.kind not in (WILL_DUE, SESSION_EXPIRY) or not isinstance(session, Session):
                continue
            own = session.rare.will_timer if timer.kind == WILL_DUE else session.rare.expiry_timer
            if timer is not own:
                self._world.checks.fail(
                    f"{process.host.name} has a second timer for {session.client_id}, epoch"
                    f" {session.epoch}"
                )

    def _look_at_assigned(self, process: "Process") -> None:
        agent = process.cluster_node.groups.agent
        kept = {(share.key, place) for share, place in agent.kept.records}
        for share in agent.assignments.values():
            tag = tag_of(share.key)
            found = {place for key, place in kept if key == share.key}
            # Denied for the second time: `tidy` returns it.
            found |= share.again.keys()
            if share.assigned.keys() <= found:
                continue
            if share.group is not None:
                aside = itertools.chain.from_iterable(share.group.deferred.values())
                found |= {_place(each) for each in (*share.group.returned, *aside)}
            for session in process.state.sessions.values():
                found |= {_place(e) for e in session.inflight.values() if e.group_tag == tag}
            for place in share.assigned:
                if place not in found:
                    self._world.checks.fail(
                        f"{process.host.name} has offset {place[1]} of partition {place[0]} of"
                        f" {share.key}, and no member there has it"
                    )

    def _look_at_unheld(self, process: "Process") -> None:
        """The records that this coordinator is about to assign are with no node that has reported
        to it."""
        for home in process.cluster_node.groups.coordinator.homes.led.values():
            for coordination in home.groups.values() if home.is_open else ():
                for host in self._world.client_hosts:
                    if host.process is None or host.name not in home.reported:
                        continue
                    agent = host.process.cluster_node.groups.agent
                    told = (process.host.name, home.epoch, home.reported[host.name])
                    share = agent.assignments.get(coordination.key)
                    if share is None or agent.told(home.partition) != told:
                        continue
                    for place in coordination.unheld() & share.assigned.keys():
                        self._world.checks.fail(
                            f"{process.host.name} is to assign offset {place[1]} of partition"
                            f" {place[0]} of {share.key}, which {host.name} has"
                        )

    def _works(self, host: "Host", process: "Process", partition: int) -> bool:
        """Does the node lead the partition and get its records committed?

        No other node may know a later leader. Counter-example: the disk of a deposed leader hangs,
        so it learns of no change of the metadata. Nobody asks it any more, and the session that it
        takes for open has long been closed by its successor.
        """
        journal = process.journal
        key = (host.name, partition)
        end = self._ends.get(key, 1 << 62)
        self._ends[key] = journal.next_offset[partition]
        cluster_node = process.cluster_node
        epochs = [
            other.process.cluster_node.context.epoch(partition)
            for other in self._world.client_hosts
            if other.process is not None
        ]
        return (
            cluster_node.session_coordinator.decisions.decides(partition)
            and partition not in cluster_node.context.uncompared
            and cluster_node.context.epoch(partition) == max(epochs)
            and journal.high_watermark[partition] >= end
            and cluster_node.meta.has_majority(process.state.now)
        )

    def _look_at(self, process: "Process", partition: int, orphaned: set[tuple[str, int]]) -> None:
        cluster_node = process.cluster_node
        images = process.images
        for session in filter(images.open_sessions.has, images.state.sessions.values()):
            if cluster_node.session_coordinator.home(session.client_id) != partition:
                continue
            if not self._reaches(process, session.owner):
                continue
            if _has(self._world.hosts[session.owner], session):
                continue
            key = (session.client_id, session.epoch)
            orphaned.add(key)
            lasted_s = self._orphaned_s.get(key, 0.0) + LOOK_S
            self._orphaned_s[key] = lasted_s
            self.longest_s = max(self.longest_s, lasted_s)
            if lasted_s > ORPHANED_MAX_S:
                self._world.checks.fail(
                    f"{session.client_id}, epoch {session.epoch}, is open for {session.owner},"
                    f" which has not had it for {lasted_s:.1f} s"
                )

    def _reaches(self, process: "Process", other: str) -> bool:
        host = process.host
        if other == host.name:
            return True
        owner = self._world.hosts[other]
        network = self._world.network
        return (
            owner.process is not None
            and not owner.is_paused
            and other in process.links
            and owner.process.links.get(host.name) is process.links[other]
            and not network.is_cut(host.name, other)
            and not network.is_cut(other, host.name)
        )

    def _is_orphan_anywhere(self, client_id: str, epoch: int) -> bool:
        """By the image of any node, whatever its partition does now."""
        for host in self._world.client_hosts:
            if host.process is None:
                continue
            session = host.process.images.state.sessions.get(client_id)
            if session is None or session.epoch != epoch or not session.owner:
                continue
            return not _has(self._world.hosts[session.owner], session)
        return False


def _place(record: object) -> tuple[int, int]:
    assert isinstance(record, (Inflight, Message))
    return record.partition, record.offset


def _has(owner: "Host", image: Session) -> bool:
    process = owner.process
    if process is None:
        return False
    session = process.state.sessions.get(image.client_id)
    if session is not None and session.connection is not None:
        return True
    asking = process.cluster_node.acquisition.asking.values()
    return any(each.client_id == image.client_id for each in asking)
