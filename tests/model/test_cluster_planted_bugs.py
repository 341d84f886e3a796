"""The cluster simulator finds what it is there to find: each mistake, made in the production code
for the length of a test, breaks a promise within a bounded number of seeds."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from holdfast.log import record as log_record
from holdfast.log.batch import Batch
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.record import Record
from holdfast.node.context import ClusterContext
from holdfast.node.node_state import Promise
from holdfast.node.ownership.coordinator import SessionCoordinator
from holdfast.node.ownership.replies import HomeAnswers
from holdfast.node.ownership.reports import SessionReports
from holdfast.node.publish.admission import Admission
from holdfast.node.publish.forwarding import RecordForwarder
from holdfast.node.publish.leader_sync import LeaderSync
from holdfast.node.publish.pending_records import PendingRecord
from holdfast.node.refusal import Rejection
from holdfast.node.replicate.follower import FollowerSide
from holdfast.node.replicate.in_sync import InSync
from holdfast.node.replicate.incomplete import Incomplete
from holdfast.node.replicate.progress import LedPartition
from holdfast.node.runtime import peer_check
from holdfast.node.session.session import Session
from holdfast.node.session.state import complete_inflight
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.snapshot_entries import first_starts
from tests.sim.casts import TIMED
from tests.sim.checks import Checks
from tests.sim.storing import ProcessDisk
from tests.sim.world import Settings
from tests.support.planted import in_cluster


def acknowledged_before_the_fsync() -> AbstractContextManager[object]:
    submit = ProcessDisk.submit

    def count_at_once(disk: ProcessDisk, group: WriteGroup) -> None:
        submit(disk, group)
        disk._process.journal.commit(group)
        disk._process.cluster_node.handle_durable(disk._process.state.now)

    return patch.object(ProcessDisk, "submit", count_at_once)


def truncation_to_the_watermark() -> AbstractContextManager[object]:
    ask = FollowerSide._send_follow

    def cut_and_ask(core: FollowerSide, followed: Any, source: Any, now: float) -> None:
        log = core._state.log
        watermark = log.high_watermark[followed.partition]
        if log.next_offset[followed.partition] > watermark:
            log.truncate(followed.partition, watermark)
        ask(core, followed, source, now)

    return patch.object(FollowerSide, "_send_follow", cut_and_ask)


def no_epoch_check_at_the_follower() -> AbstractContextManager[object]:
    def take_from_anybody(
        core: FollowerSide, node: str, batches: list[tuple[int, Batch]], now: float
    ) -> None:
        log = core._state.log
        source = core._sources[node]
        for _, batch in batches:
            source.received_bytes += batch.length
            source.has_ignored = True
            followed = core._partitions[batch.partition]
            if followed.leader and batch.base_offset == log.next_offset[batch.partition]:
                log.append_batch(batch)
                core._mark(followed)

    return patch.object(FollowerSide, "handle_replicate", take_from_anybody)


def releases_are_not_logged() -> AbstractContextManager[object]:
    """PUBCOMP comes though no record says that the packet id is free."""
    publish = RecordForwarder.publish

    def publish_others(forwarding: RecordForwarder, record: Record, promise: Promise) -> None:
        if record.kind != log_record.RELEASE:
            publish(forwarding, record, promise)
        else:
            forwarding.promises.add(promise)

    return patch.object(RecordForwarder, "publish", publish_others)


def shrink_before_the_metadata() -> AbstractContextManager[object]:
    propose = InSync.propose

    def propose_and_forget(rules: InSync, led: LedPartition, now: float) -> None:
        propose(rules, led, now)
        if led.proposal is not None:
            led.counted = [one for one in led.counted if one.peer.node in led.proposal]

    return patch.object(InSync, "propose", propose_and_forget)


def records_of_an_owner_before_count() -> AbstractContextManager[object]:
    apply = ReplicatedState.apply

    def apply_whatever_the_epoch(images: ReplicatedState, record: Record) -> None:
        is_open = record.kind == log_record.SESSION and b'"op":"open"' in record.payload
        if record.kind in (log_record.SESSION, log_record.CURSOR) and not is_open:
            record.sequence = 0
        apply(images, record)

    return patch.object(ReplicatedState, "apply", apply_whatever_the_epoch)


def sent_again_without_alignment() -> AbstractContextManager[object]:
    lose = LeaderSync.lose

    def go_on_at_once(alignment: LeaderSync, partition: int) -> None:
        lose(alignment, partition)
        context = alignment._context
        leader = context.leader(partition)
        if leader and leader != context.node_id:
            epoch = context.epoch(partition)
            alignment._forwarding.aligned(partition, leader, epoch, set())

    return patch.object(LeaderSync, "lose", go_on_at_once)


def home_decides_before_it_has_applied() -> AbstractContextManager[object]:
    start = SessionCoordinator.start_leading

    def begin_at_once(homes: SessionCoordinator, partition: int) -> None:
        start(homes, partition)
        if partition in homes.decisions.begins_at:
            homes.decisions.begins_at[partition] = 0
            homes.committed(partition)

    return patch.object(SessionCoordinator, "start_leading", begin_at_once)


def leader_forgets_the_tail() -> AbstractContextManager[object]:
    """What leaders before have appended is not compared with what is sent again."""

    def start_empty(admission: Admission, partition: int, uncommitted: list[Batch]) -> None:
        start(admission, partition, [])

    start = Admission.start_leading
    return patch.object(Admission, "start_leading", start_empty)


def wills_can_be_refused() -> AbstractContextManager[object]:
    overdue = RecordForwarder.refuse_overdue

    def refuse_at_once(forwarding: RecordForwarder, now: float) -> None:
        overdue(forwarding, now)
        for pending in list(forwarding.pending.values()):
            if pending.record.flags & log_record.FLAG_WILL and _is_waiting(forwarding, pending):
                forwarding.refuse(pending.ticket, Rejection("planted"))

    return patch.object(RecordForwarder, "refuse_overdue", refuse_at_once)


def _is_waiting(forwarding: RecordForwarder, pending: PendingRecord) -> bool:
    return not forwarding.target(pending.partition)


def owners_are_not_asked() -> AbstractContextManager[object]:
    """A new home leader trusts what it was told before it led."""
    return patch.object(HomeAnswers, "ask_owned", lambda *_: None)


def messages_of_an_owner_before_are_stored() -> AbstractContextManager[object]:
    return patch.object(Admission, "_is_superseded", lambda *_: False)


def a_request_opens_twice() -> AbstractContextManager[object]:
    return patch.object(ReplicatedState, "requests", lambda *_: [])


@contextmanager
def what_was_refused_is_stored() -> Iterator[None]:
    """Now and then. That is found at once: here only what comes of it is looked for. The client
    uses the packet id for another message, which is acknowledged and not stored."""
    append = Admission._append

    def append_and_refuse(admission: Admission, origin: str, record: Record) -> None:
        append(admission, origin, record)
        is_message = record.kind == log_record.MESSAGE and record.flags & log_record.FLAG_PACKET_ID
        if is_message and record.ticket % 5 == 0 and record.offset >= 0:
            admission._answer(origin, record.partition, record.ticket, Rejection("planted"))

    with (
        patch.object(Admission, "_append", append_and_refuse),
        patch.object(Checks, "refused", lambda *_: None),
    ):
        yield


def frames_leave_on_the_next_link() -> AbstractContextManager[object]:
    return patch.object(ClusterContext, "drop_frames", lambda *_: None)


def cursors_are_filled_in_when_looked_at() -> AbstractContextManager[object]:
    """From what this node has delivered, if the session has no subscription yet."""

    def planted(replicated: ReplicatedState, session: Session) -> None:
        if session.positions is None:
            session.positions = first_starts(replicated.state, session)
        complete_inflight(session)

    return patch.object(ReplicatedState, "_complete_session", planted)


def a_session_that_its_node_does_not_have_stays_open() -> AbstractContextManager[object]:
    receive = SessionReports.receive

    def believe(
        reports: SessionReports,
        node: str,
        partitions: list[int],
        had: dict[str, int],
        asking: list[str],
        users: Any = None,
        **others: Any,
    ) -> None:
        sessions = reports._replicated.state.sessions
        receive(reports, node, partitions, had, [*asking, *sessions], users, **others)

    return patch.object(SessionReports, "receive", believe)


def an_older_copy_goes_on() -> AbstractContextManager[object]:
    """Nobody compares it with what is remembered."""
    return patch.object(peer_check, "find_loss", lambda *_: "")


def a_replica_that_lost_records_leads() -> AbstractContextManager[object]:
    return patch.object(Incomplete, "_is_resolved", lambda _, partition, info: True)


def settings(*faults: str, mean_s: float = 0.4, min_insync: int = 1, **other: Any) -> Settings:
    return Settings(
        faults=faults,
        mean_s=mean_s,
        min_insync=min_insync,
        duration_s=4.0,
        settled_within_s=12.0,
        **other,
    )


PLANTED = {
    "acknowledged before the fsync": in_cluster(
        acknowledged_before_the_fsync, settings("power", "outage"), "which is not committed", 5
    ),
    "truncation to the watermark": in_cluster(
        truncation_to_the_watermark, settings("kill", "pause"), "replica_diverged", 94
    ),
    "no epoch check at the follower": in_cluster(
        no_epoch_check_at_the_follower,
        settings("pause", "late", mean_s=0.3),
        "the log ends at",
        158,
    ),
    "releases are not logged": in_cluster(
        releases_are_not_logged, settings("kill"), "which is not committed", 0
    ),
    "shrink before the metadata": in_cluster(
        shrink_before_the_metadata,
        settings("isolate", "one-way", "kill"),
        "the counted followers",
        41,
    ),
    "records of an owner before count": in_cluster(
        records_of_an_owner_before_count, settings("isolate", "pause", "one-way"), "is with", 0
    ),
    "sent again without alignment": in_cluster(
        sent_again_without_alignment, settings("kill", "reset"), "and was sent less often", 26
    ),
    "an older copy of a disk goes on": in_cluster(
        an_older_copy_goes_on, settings("go-back", "kill", min_insync=2), "replica_diverged", 1
    ),
    "a replica that lost records leads": in_cluster(
        a_replica_that_lost_records_leads,
        settings("power", "kill", min_insync=2, durable=False, snapshot_s=1000.0),
        "replica_diverged",
        24,
    ),
    "home decides too early": in_cluster(
        home_decides_before_it_has_applied, settings("kill", "outage"), "which has not had it", 2
    ),
    "leader forgets the tail": in_cluster(
        leader_forgets_the_tail, settings("kill", "slow-disk"), "is in the log twice", 68
    ),
    "owners are not asked": in_cluster(
        owners_are_not_asked, settings("isolate", "pause", "kill"), "has been connected to", 66
    ),
    "messages of an owner before are stored": in_cluster(
        messages_of_an_owner_before_are_stored,
        settings("isolate", "pause", "one-way"),
        "is in the log twice",
        12,
    ),
    "a request opens twice": in_cluster(
        a_request_opens_twice, settings("isolate", "pause", "one-way"), "a session from nowhere", 61
    ),
    "wills can be refused": in_cluster(
        wills_can_be_refused, settings("kill", "outage"), "have not come", 61
    ),
    "what was refused is stored": in_cluster(
        what_was_refused_is_stored, settings("kill"), "has acknowledged", 2
    ),
    "frames leave on the next link": in_cluster(
        frames_leave_on_the_next_link, settings("reset", "kill"), "keeps frames of a lost link", 2
    ),
    "cursors are filled in when looked at": in_cluster(
        cursors_are_filled_in_when_looked_at, settings("kill"), "the image of", 0
    ),
    "a session that its node does not have stays open": in_cluster(
        a_session_that_its_node_does_not_have_stays_open,
        settings("kill", casts=(TIMED,), skew_s=0.02),
        "which has not had it",
        0,
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
