"""As test_cluster_planted_bugs, for what is not the log: QoS 0 between nodes, delays and expiries,
shared groups, the witness, an operator's commands, disks that hang."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from holdfast.log.batch import Batch
from holdfast.log.record import Record
from holdfast.node.delivery import subscribe
from holdfast.node.failure.disk_watch import DiskWatch
from holdfast.node.groups import queue_changes as changes
from holdfast.node.metadata import commands, store
from holdfast.node.metadata.commands import Applied, PutNode
from holdfast.node.metadata.model import WITNESS, ClusterMetadata, NodeInfo
from holdfast.node.ownership.coordinator import SessionCoordinator
from holdfast.node.ownership.requests import SessionRequest
from holdfast.node.ownership.wills_and_expiry import Endings
from holdfast.node.publish.admission import STORE, Admission, UncommittedState
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.routing.qos0_routing import Qos0Routing
from holdfast.node.session.message import Message
from holdfast.node.session.session import NEVER_EXPIRES, Session
from holdfast.node.state.packet_ids import NO_EPOCH
from holdfast.node.state.recovery import Recovery
from holdfast.node.state.replicated import ReplicatedState
from tests.sim.casts import DEVICES, LOG, QOS0, QUEUES, RETAINED, SCHEDULED, TIMED
from tests.sim.plans import settings_for
from tests.sim.storing import RaftDisk
from tests.sim.world import Settings
from tests.support.planted import in_cluster


def filters_are_told_once() -> AbstractContextManager[object]:
    """Not again when a link comes back."""
    connected = Qos0Routing.connected
    known: set[tuple[int, str]] = set()

    def tell_once(interest: Qos0Routing, node: str) -> None:
        if (id(interest), node) in known:
            interest._acknowledged[node] = interest._number
            return
        known.add((id(interest), node))
        connected(interest, node)

    return patch.object(Qos0Routing, "connected", tell_once)


def retained_sets_are_empty() -> AbstractContextManager[object]:
    return patch.object(subscribe, "start_scan", lambda *arguments, **named: None)


def messages_come_twice() -> AbstractContextManager[object]:
    handle = Qos0Routing.handle_qos0

    def handle_twice(interest: Qos0Routing, payload: bytes) -> None:
        handle(interest, payload)
        handle(interest, payload)

    return patch.object(Qos0Routing, "handle_qos0", handle_twice)


def every_node_picks_itself() -> AbstractContextManager[object]:
    """Each node with members of a shared subscription gives a QoS 0 message to one of them."""
    handle = Qos0Routing.handle_qos0

    def handle_for_all(interest: Qos0Routing, payload: bytes) -> None:
        handle(interest, payload)
        interest._deliver_to_groups(list(interest._state.groups), _message(payload), 0)

    return patch.object(Qos0Routing, "handle_qos0", handle_for_all)


def _message(payload: bytes) -> Message:
    record = next(iter(Batch(payload).records()))
    return Message(record.topic, record.payload, 0, False, b"", -1, 0, b"")


def a_will_does_not_wait() -> AbstractContextManager[object]:
    rearm = Recovery._rearm

    def without_delay(recovery: Recovery, session: Session) -> bool:
        if session.will is not None:
            session.will.delay_s = 0
        return rearm(recovery, session)

    return patch.object(Recovery, "_rearm", without_delay)


@contextmanager
def a_timer_is_not_cancelled() -> Iterator[None]:
    """The will of a session that is back comes all the same."""
    due = Endings.due

    def due_though_it_is_back(endings: Endings, session: Session, kind: int) -> None:
        owner, session.owner = session.owner, ""
        due(endings, session, kind)
        session.owner = owner

    def touch(recovery: Recovery, session: Session) -> None:
        recovery.touched[session] = None

    with (
        patch.object(Endings, "due", due_though_it_is_back),
        patch.object(Recovery, "_touch", touch),
    ):
        yield


def a_held_up_node_is_sure() -> AbstractContextManager[object]:
    """It publishes the wills that are due by its clock, whoever decides by now."""
    return patch.object(Endings, "_is_confirmed", lambda *_: True)


@contextmanager
def sessions_expire_at_once() -> Iterator[None]:
    settle = ReplicatedState.arm_timers

    def expire(images: ReplicatedState, session: Session) -> bool:
        is_touched = session in images.touched
        is_there = settle(images, session)
        is_away = is_touched and not images.open_sessions.has(session)
        if is_away and session.expiry_s < NEVER_EXPIRES:
            return False
        return is_there

    with (
        patch.object(ReplicatedState, "arm_timers", expire),
        # It judges again, and does not let it pass.
        patch.object(Endings, "_is_armed", lambda *_: False),
        patch.object(Endings, "_left_s", lambda *_: 0.0),
    ):
        yield


def an_overdue_session_is_armed_twice() -> AbstractContextManager[object]:
    """Though it was closed again since it was overdue."""
    return patch.object(Endings, "_is_armed", lambda *_: False)


def what_was_overdue_is_forgotten() -> AbstractContextManager[object]:
    """By the node that leads next."""

    def forget(endings: Endings, partition: int) -> None:
        endings._overdue[partition].clear()

    return patch.object(Endings, "start_deciding", forget)


def messages_never_expire() -> AbstractContextManager[object]:
    return patch.object(Message, "is_expired", lambda *_: False)


def what_a_lost_node_has_sent_is_new() -> AbstractContextManager[object]:
    return patch.object(ReplicatedState, "_note_sent", lambda *_: None)


def a_witness_does_not_vote() -> AbstractContextManager[object]:
    is_good = store._is_good

    def is_good_data_node(
        member: str, own: str, wanted: dict[str, NodeInfo], leaving: set[str]
    ) -> bool:
        return is_good(member, own, wanted, leaving) and wanted[member].role != WITNESS

    return patch.object(store, "_is_good", is_good_data_node)


def a_removed_name_is_not_taken_again() -> AbstractContextManager[object]:
    """Whatever disk the node has by then."""
    put = commands._put_node

    def put_others(metadata: ClusterMetadata, command: PutNode) -> Applied:
        if command.info.node_id in dict(metadata.removed):
            return Applied(metadata, (), "planted")
        return put(metadata, command)

    return patch.object(commands, "_put_node", put_others)


def what_hangs_counts_as_written() -> AbstractContextManager[object]:
    """Of the metadata."""
    begin = RaftDisk._begin

    def begin_or_pretend(disk: RaftDisk) -> None:
        if disk._host.hangs_for_s():
            disk._process.later(0.001, disk._written)
        else:
            begin(disk)

    return patch.object(RaftDisk, "_begin", begin_or_pretend)


def nobody_looks_at_the_disk() -> AbstractContextManager[object]:
    return patch.object(DiskWatch, "handle_timers", lambda *_: False)


def a_due_message_is_stored_each_time() -> AbstractContextManager[object]:
    def store(core: Admission, tail: object, record: Record) -> int:
        return STORE

    return patch.object(Admission, "_admit_due", store)


def a_queue_has_no_keeper() -> AbstractContextManager[object]:
    return patch.object(changes, "create_queue", lambda *arguments: None)


def an_uncommitted_message_is_of_any_session() -> AbstractContextManager[object]:
    """Also of one that began after it."""
    note = UncommittedState.note

    def note_without_epoch(tail: UncommittedState, record: Record) -> None:
        note(tail, record)
        for key, (epoch, offset) in tail.inbound.items():
            if epoch != NO_EPOCH:
                tail.inbound[key] = (1 << 32, offset)

    return patch.object(UncommittedState, "note", note_without_epoch)


def the_home_partition_says_which_session_it_is() -> AbstractContextManager[object]:
    """The epoch as far as this node has applied it."""

    def born(replicated: ReplicatedState, record: Record) -> int:
        session = replicated.state.sessions.get(record.client_id.decode())
        return record.producer_epoch if session is None else session.life

    return patch.object(ReplicatedState, "life", born)


@contextmanager
def a_session_that_ends_is_still_there() -> Iterator[None]:
    """Until its end is applied, and what was found then is what the client is told."""
    open_, opened = SessionCoordinator._open, SessionCoordinator._opened
    was_there: dict[int, bool] = {}

    def look_and_open(coordinator: SessionCoordinator, request: SessionRequest) -> None:
        found = coordinator.recorded_session(request.client_id)
        was_there[request.number] = found is not None and not request.clean_start
        open_(coordinator, request)

    def tell(
        coordinator: SessionCoordinator,
        request: SessionRequest,
        epoch: int,
        present: bool,
        *,
        is_lost: bool = False,
    ) -> None:
        present = was_there.get(request.number, present)
        opened(coordinator, request, epoch, present, is_lost=is_lost)

    with (
        patch.object(SessionCoordinator, "_open", look_and_open),
        patch.object(SessionCoordinator, "_opened", tell),
        patch.object(Admission, "changes_session", lambda *_: False),
    ):
        yield


def a_node_that_lags_keeps_its_clients() -> AbstractContextManager[object]:
    """They wait for a barrier that only the other nodes can pass."""
    return patch.object(Barriers, "nodes_ahead", lambda barriers: [])


def settings(cast: str, *faults: str, mean_s: float = 0.4, **other: Any) -> Settings:
    return Settings(
        casts=(cast,),
        faults=faults,
        mean_s=mean_s,
        min_insync=other.pop("min_insync", 1),
        duration_s=other.pop("duration_s", 3.0),
        settled_within_s=12.0,
        skew_s=0.02,
        **other,
    )


PLANTED = {
    "filters are told once": in_cluster(
        filters_are_told_once, settings(QOS0, "reset"), "though nothing was wrong", 0
    ),
    "messages come twice": in_cluster(messages_come_twice, settings(QOS0), "twice with QoS 0", 0),
    "every node picks itself": in_cluster(
        every_node_picks_itself, settings(QOS0), "of $share/turns/q/#", 0
    ),
    "a will does not wait": in_cluster(
        a_will_does_not_wait, settings(TIMED), "before it was due", 0
    ),
    "a timer is not cancelled": in_cluster(
        a_timer_is_not_cancelled, settings(TIMED), "has ended", 3
    ),
    "a held-up node is sure": in_cluster(
        a_held_up_node_is_sure,
        settings(TIMED, "kill", "isolate", "reset", "pause", mean_s=1.0, min_insync=2),
        "though the session was back",
        12,
    ),
    "an overdue session is armed twice": in_cluster(
        an_overdue_session_is_armed_twice,
        settings(TIMED, "pause", duration_s=6.0),
        "has a second timer",
        4,
    ),
    "retained sets are empty": in_cluster(
        retained_sets_are_empty, settings(RETAINED, gateways=1), ", which retains ", 4
    ),
    "sessions expire at once": in_cluster(
        sessions_expire_at_once, settings(TIMED), "after its connection", 0
    ),
    "what was overdue is forgotten": in_cluster(
        what_was_overdue_is_forgotten, settings(TIMED, "kill", "pause"), "has not come", 31
    ),
    "messages never expire": in_cluster(
        messages_never_expire, settings(TIMED), "has received perishable", 4
    ),
    "what a lost node has sent is new": in_cluster(
        what_a_lost_node_has_sent_is_new, settings(LOG, "kill"), "now without DUP", 4
    ),
    "a due message is stored each time": in_cluster(
        a_due_message_is_stored_each_time,
        settings(SCHEDULED, "isolate", mean_s=0.3),
        "where '' waits",
        0,
    ),
    "a queue has no keeper": in_cluster(
        a_queue_has_no_keeper,
        settings(QUEUES, "kill"),
        "nobody of $stream/@earliest/$queue/s/# has received",
        17,
    ),
    "a node that lags keeps its clients": in_cluster(
        a_node_that_lags_keeps_its_clients,
        settings_for(696),
        "not settled while a fault lasts",
        92,
    ),
    "an uncommitted message is of any session": in_cluster(
        an_uncommitted_message_is_of_any_session,
        settings_for(11, casts=(DEVICES,)),
        "which is not committed",
        11,
    ),
    "the home partition says which session it is": in_cluster(
        the_home_partition_says_which_session_it_is,
        settings_for(93, casts=(DEVICES,)),
        "which is not committed",
        67,
    ),
    "a session that ends is still there": in_cluster(
        a_session_that_ends_is_still_there, settings(DEVICES), "of a session that has just begun", 2
    ),
    "a witness does not vote": in_cluster(
        a_witness_does_not_vote, settings(LOG, has_witness=True), "vote", 0
    ),
    "a removed name is not taken again": in_cluster(
        a_removed_name_is_not_taken_again,
        settings(LOG, "operate", mean_s=0.3),
        "reaches no majority",
        0,
    ),
    "what hangs counts as written": in_cluster(
        what_hangs_counts_as_written,
        settings(LOG, "hang-disk", "power", "outage"),
        "their disks are older copies",
        352,
    ),
    "nobody looks at the disk": in_cluster(
        nobody_looks_at_the_disk, settings(LOG, loses_one=True), "not settled without", 10
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    PLANTED[name].find()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PLANTED)
def test_its_run_is_well_without_it(name: str) -> None:
    PLANTED[name].check()
