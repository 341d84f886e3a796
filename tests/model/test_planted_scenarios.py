"""Small tests of whole simulated nodes, and of parts of one, find what they are there to find: each
mistake, made in the production code for the length of a test, makes one of them fail."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from holdfast.cli.backup import restoration as cut
from holdfast.cli.backup.restoration import LogCut
from holdfast.io.disk import older_copy
from holdfast.log.journal.recovery import OpenedJournal
from holdfast.node.delivery.log_replay import message_of
from holdfast.node.failure.cluster_clock import ClusterClock
from holdfast.node.failure.detector import Detector
from holdfast.node.groups import group_state
from holdfast.node.groups.coordinator import Coordinator
from holdfast.node.groups.group_state import Coordination
from holdfast.node.groups.groups import Groups
from holdfast.node.groups.homes import Home, LedHomes
from holdfast.node.ownership import lease
from holdfast.node.ownership.closings import Closings
from holdfast.node.ownership.lease import FOREVER, OwnershipLease
from holdfast.node.ownership.owners import EpochReservations
from holdfast.node.position_reports import PositionReports
from holdfast.node.publish.forwarding import RecordForwarder
from holdfast.node.publish.producers import ProducerTable
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.replicate.disk_position import DiskPosition
from holdfast.node.routing.peer_filters import PeerFilters
from holdfast.node.routing.qos0_routing import Qos0Routing
from holdfast.node.runtime import relayed_links
from holdfast.node.runtime.relayed_links import RelayedLinks
from holdfast.node.session.message import Message
from holdfast.node.state.groups import GroupMembers, GroupPositions
from holdfast.node.state.offset_ranges import FinishedOffsets
from holdfast.node.state.recorded_state import RecordedState
from tests.model import test_cluster_put_back as put_back
from tests.support.planted import Plant, fails_with
from tests.unit.cli import test_backup_files as backup_files
from tests.unit.node import test_bounds as bounds
from tests.unit.node import test_position_reports as position_reports
from tests.unit.node.failure import test_clock as clock
from tests.unit.node.failure import test_doubt as doubt
from tests.unit.node.groups import test_ended as group_ended
from tests.unit.node.groups import test_finished as group_finished
from tests.unit.node.groups import test_group_state as group_states
from tests.unit.node.groups import test_groups as groups
from tests.unit.node.ownership import test_epochs as epochs
from tests.unit.node.ownership import test_many_sessions as many_sessions
from tests.unit.node.publish import test_forwarding as forwarding
from tests.unit.node.routing import test_lost_link as lost_link
from tests.unit.node.routing import test_peer_filters as peer_filters
from tests.unit.node.runtime import test_relayed_links

MANY = 1 << 30


def a_group_ends_by_what_is_applied() -> AbstractContextManager[object]:
    """A coordinator ends a group whose member's session it has not applied."""

    def has_any(members: GroupMembers, key: str) -> bool:
        group = members._state.groups.get(key)
        return group is not None and any(each.expiry_s > 0 for each in group.members)

    def knows_all(coordinator: Coordinator, home: Home, group: Coordination) -> bool:
        return False

    apply = GroupPositions.apply

    def end_always(positions: GroupPositions, record: Any) -> None:
        recorded = positions.members.recorded
        positions.members.recorded = {}
        apply(positions, record)
        positions.members.recorded = recorded

    stack = ExitStack()
    stack.enter_context(patch.object(GroupMembers, "has_any", has_any))
    stack.enter_context(patch.object(Coordinator, "_may_have_older_members", knows_all))
    stack.enter_context(patch.object(LedHomes, "all_reported", lambda homes, home: True))
    stack.enter_context(patch.object(GroupPositions, "apply", end_always))
    return stack


def only_members_keep_records() -> AbstractContextManager[object]:
    """A session that has unsubscribed keeps no QoS 2 record of the group."""
    kept_by_sessions = GroupPositions.kept_by_sessions

    def kept_by_members(positions: GroupPositions, key: str) -> set[tuple[int, int]]:
        group = positions._state.groups.get(key)
        if group is None:
            return set()
        mine = {
            (entry.partition, entry.offset)
            for session in group.members
            for entry in session.inflight.values()
        }
        return kept_by_sessions(positions, key) & mine

    return patch.object(GroupPositions, "kept_by_sessions", kept_by_members)


def a_barrier_gives_up() -> AbstractContextManager[object]:
    """After 5 s, so that the records of a lost node go to other members."""
    has_passed = Barriers.has_passed

    def has_waited(barriers: Barriers, number: int) -> bool:
        barrier = barriers.waiting.get(number)
        is_late = barrier is not None and 0 < barrier.asked_at < barriers._state.now - 5.0
        return is_late or has_passed(barriers, number)

    return patch.object(Barriers, "has_passed", has_waited)


def a_cut_reports_nothing_older() -> AbstractContextManager[object]:
    """A restored replica may lack records from before the cut, and its operator does not know."""
    return patch.object(cut, "_older_left_out", lambda *_: 0)


def a_cut_goes_by_the_last_record() -> AbstractContextManager[object]:
    """It keeps all that is stored before the last record that is too new."""
    find = cut.find_cut

    def find_last(opened: OpenedJournal, until_us: int) -> LogCut | None:
        found = find(opened, until_us)
        while found is not None:
            last = found
            found = find(opened, until_us := until_us + 1_000_000)
            if found is None:
                return last
        return None

    return patch.object(cut, "find_cut", find_last)


def with_a_journal(test: Callable[..., None], *arguments: object) -> Callable[[], None]:
    """For a test of a directory with two hundred messages."""

    def run() -> None:
        with TemporaryDirectory() as name:
            journal = backup_files.two_hundred_messages(Path(name))
            test(journal, Path(name), *arguments)

    return run


def finished_offsets_are_forgotten() -> AbstractContextManager[object]:
    """Beyond some, as with a bound that forgets."""
    add = FinishedOffsets.add

    def add_some(finished: FinishedOffsets, partition: int, start: int, end: int) -> None:
        if sum(end - start for _, each in finished.items() for start, end in each.ranges()) < 20:
            add(finished, partition, start, end)

    return patch.object(FinishedOffsets, "add", add_some)


def a_node_asks_nobody_for_a_way() -> AbstractContextManager[object]:
    """Though another node hears the silent one."""
    return patch.object(Detector, "unheard", lambda detector, now: {})


def an_end_takes_frames_of_an_earlier_link() -> AbstractContextManager[object]:
    handle = RelayedLinks._handle

    def handle_any(
        links: RelayedLinks, through: str, kind: int, epoch: int, peer: str, *rest: object
    ) -> None:
        link = links.links.get(peer)
        if link is not None and kind == relayed_links.DATA:
            through, epoch = link.through, link.epoch
        handle(links, through, kind, epoch, peer, *rest)  # type: ignore[arg-type]

    return patch.object(RelayedLinks, "_handle", handle_any)


def a_lost_node_keeps_what_it_had() -> AbstractContextManager[object]:
    lose = Coordination.lose

    def lose_nothing(coordination: Coordination, node: str) -> list[tuple[int, int]]:
        lose(coordination, node)
        return []

    return patch.object(Coordination, "lose", lose_nothing)


def what_sessions_have_kept_is_given_again() -> AbstractContextManager[object]:
    return patch.object(GroupPositions, "kept_by_sessions", lambda *_: set())


def groups_begin_at_the_end() -> AbstractContextManager[object]:
    """A new coordinator does not look at where the group stands."""
    open_ = Coordination.open

    def open_here(
        coordination: Coordination, positions: list[int] | None, images: GroupPositions
    ) -> None:
        if positions is not None:
            positions = list(coordination._state.delivered)
        open_(coordination, positions, images)

    return patch.object(Coordination, "open", open_here)


def groups_begin_before_where_they_stand() -> AbstractContextManager[object]:
    """A new coordinator logs positions below those in the log."""
    open_ = Coordination.open

    def open_below(
        coordination: Coordination, positions: list[int] | None, images: GroupPositions
    ) -> None:
        if positions is not None:
            positions = [max(0, position - 5) for position in positions]
        open_(coordination, positions, images)

    return patch.object(Coordination, "open", open_below)


def ids_are_free_before_the_group_has_finished() -> AbstractContextManager[object]:
    return patch.object(Groups, "await_finish", lambda *_: None)


def one_silent_node_counts_as_two() -> AbstractContextManager[object]:
    """The ends of a lost link suspend all sessions before it is relayed."""
    return patch.object(lease, "ALONE", 1.0)


def whom_it_hears_does_not_matter() -> AbstractContextManager[object]:
    """To a node that takes itself for the owner of its sessions."""
    return patch.object(OwnershipLease, "_heard_until", lambda *_: FOREVER)


def epochs_are_not_reserved() -> AbstractContextManager[object]:
    """A new home leader does not know which ones the leader before gave without a record."""
    return patch.object(EpochReservations, "is_reserved", lambda *_: True)


def a_nodes_own_clock_counts() -> AbstractContextManager[object]:
    return patch.object(ClusterClock, "tick", lambda _, now, wall_us: wall_us)


def a_node_closes_all_sessions_at_once() -> AbstractContextManager[object]:
    step = Closings.step
    return patch.object(Closings, "step", lambda closings, state, _: step(closings, state, MANY))


def a_slice_does_not_look_again() -> AbstractContextManager[object]:
    """Whether the node is still down, and this one decides."""
    return patch.object(Closings, "_may_close", lambda *_: True)


def filters_are_applied_at_once() -> AbstractContextManager[object]:
    apply = PeerFilters._apply
    return patch.object(PeerFilters, "_apply", lambda filters, node, _: apply(filters, node, MANY))


def filters_of_the_link_before_count() -> AbstractContextManager[object]:
    return patch.object(PeerFilters, "connected", lambda *_: None)


def routes_of_a_slice_stay() -> AbstractContextManager[object]:
    return patch.object(Qos0Routing, "_drop_routes", lambda *_: None)


def a_stop_ends_the_standing_apart() -> AbstractContextManager[object]:
    return patch.object(older_copy, "stand_apart", lambda *_: None)


def an_accepted_copy_waits_for_nobody() -> AbstractContextManager[object]:
    return patch.object(older_copy, "nodes_given_up", lambda *_: None)


def retained_bounds_are_of_each_node() -> AbstractContextManager[object]:
    set_retained = RecordedState.set_retained

    def set_if_there_is_room(state: RecordedState, topic: str, message: Message) -> None:
        more = (len(message.payload), 1)
        if not message.payload or not state.retained.refusal(state.config, "", more, more, (0, 0)):
            set_retained(state, topic, message)

    return patch.object(RecordedState, "set_retained", set_if_there_is_room)


def producer_bounds_are_of_each_node() -> AbstractContextManager[object]:
    store = ProducerTable.store

    def store_and_forget(table: ProducerTable, *arguments: Any, **more: Any) -> None:
        store(table, *arguments, **more)
        for producer_id, place in table.excess():
            table.remove(producer_id, place.partition)

    return patch.object(ProducerTable, "store", store_and_forget)


def a_coordinator_reads_for_any_audience() -> AbstractContextManager[object]:
    return patch.object(group_state, "message_of", lambda record: _of_all(message_of(record)))


def _of_all(message: Message) -> Message:
    message.audience = None
    return message


def a_ticket_is_known_by_its_number() -> AbstractContextManager[object]:
    """Whichever node gave it."""
    aligned = RecordForwarder.aligned

    def by_number(forwarding: RecordForwarder, *arguments: Any) -> None:
        *target, known = arguments
        numbers = {number for number, _ in known}
        pending = forwarding.pending.values()
        mine = {(each.ticket, each.record.client_id) for each in pending if each.ticket in numbers}
        aligned(forwarding, *target, mine)

    return patch.object(RecordForwarder, "aligned", by_number)


def records_cut_off_count_for_lost_ones() -> AbstractContextManager[object]:
    lacks = DiskPosition.lacks
    return patch.object(
        DiskPosition, "lacks", lambda own, other: lacks(own, replace(other, written=0))
    )


def nobody_waits_for_a_clock() -> AbstractContextManager[object]:
    return patch.object(PositionReports, "is_awaited", lambda _: False)


def clocks_of_members_count_alone() -> AbstractContextManager[object]:
    """Also at a node that does not know the members yet."""
    handle = PositionReports.handle

    def handle_known(reports: PositionReports, *arguments: Any) -> None:
        if reports._context.metadata is not None:
            handle(reports, *arguments)

    return patch.object(PositionReports, "handle", handle_known)


def patching(test: Callable[..., None], **arguments: object) -> Callable[[], None]:
    """For a test that patches on its own."""

    def run() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            test(monkeypatch, **arguments)

    return run


PLANTED: dict[str, tuple[Plant, Callable[[], object]]] = {
    "a node asks nobody for a way": (
        a_node_asks_nobody_for_a_way,
        partial(lost_link.test_every_partition_acknowledges_through_every_node, "ab", False),
    ),
    "an end takes frames of an earlier link": (
        an_end_takes_frames_of_an_earlier_link,
        test_relayed_links.test_frames_through_an_earlier_relay_are_dropped,
    ),
    "a group ends by what is applied": (
        a_group_ends_by_what_is_applied,
        partial(group_ended.test_while_its_coordinator_lags, 1, True),
    ),
    "only members keep records": (
        only_members_keep_records,
        partial(
            group_ended.test_a_qos_2_record_of_a_member_that_unsubscribes_goes_to_nobody_else,
            *(5, "keep"),
        ),
    ),
    "a barrier gives up": (
        a_barrier_gives_up,
        partial(group_ended.test_a_record_of_a_lost_node_waits_for_the_home_of_its_session, 1),
    ),
    "a cut reports nothing older": (
        a_cut_reports_nothing_older,
        with_a_journal(backup_files.test_a_cut_reports_older_records_that_it_leaves_out),
    ),
    "a cut goes by the last record": (
        a_cut_goes_by_the_last_record,
        with_a_journal(backup_files.test_a_cut_at_each_place, 57),
    ),
    "finished offsets are forgotten": (
        finished_offsets_are_forgotten,
        patching(group_finished.test_after_a_failover_no_session_gets_a_record_again, seed=3),
    ),
    "a lost node keeps what it had": (
        a_lost_node_keeps_what_it_had,
        patching(groups.test_what_a_lost_node_had_goes_to_others),
    ),
    "what sessions have kept is given again": (
        what_sessions_have_kept_is_given_again,
        patching(groups.test_qos2_stays_with_its_session),
    ),
    "groups begin at the end": (
        groups_begin_at_the_end,
        patching(groups.test_what_the_coordinators_own_node_had_is_in_the_log),
    ),
    "groups begin before where they stand": (
        groups_begin_before_where_they_stand,
        patching(groups.test_what_is_finished_above_the_positions_is_in_the_log),
    ),
    "ids are free before the group has finished": (
        ids_are_free_before_the_group_has_finished,
        partial(
            group_ended.test_a_qos_2_record_of_a_member_that_unsubscribes_goes_to_nobody_else,
            *(5, "complete"),
        ),
    ),
    "one silent node counts as two": (
        one_silent_node_counts_as_two,
        partial(lost_link.test_a_lost_link_concerns_those_that_need_it, False),
    ),
    "whom it hears does not matter": (
        whom_it_hears_does_not_matter,
        doubt.test_a_node_that_is_not_heard_by_one_that_decides_is_in_doubt,
    ),
    "epochs are not reserved": (
        epochs_are_not_reserved,
        epochs.test_two_leaders_give_a_client_no_epoch_twice,
    ),
    "a node's own clock counts": (
        a_nodes_own_clock_counts,
        clock.test_who_has_just_started_believes_the_one_that_runs,
    ),
    "a node closes all sessions at once": (
        a_node_closes_all_sessions_at_once,
        patching(many_sessions.test_a_turn_closes_a_bounded_number_of_sessions),
    ),
    "a slice does not look again": (
        a_slice_does_not_look_again,
        patching(many_sessions.test_the_next_leader_closes_what_the_one_before_has_left),
    ),
    "filters are applied at once": (
        filters_are_applied_at_once,
        peer_filters.test_many_filters_come_and_go_in_slices,
    ),
    "filters of the link before count": (
        filters_of_the_link_before_count,
        peer_filters.test_a_change_of_an_earlier_link_is_not_acknowledged,
    ),
    "routes of a slice stay": (
        routes_of_a_slice_stay,
        partial(peer_filters.test_slices_between_other_inputs_have_the_same_end, 0),
    ),
    "a stop ends the standing apart": (
        a_stop_ends_the_standing_apart,
        partial(
            put_back.test_two_copies_both_wait_for_the_one_that_runs, *put_back.ORDERS[0].values
        ),
    ),
    "a start forgets the disks of others": (
        partial(patch.object, older_copy, "load_memory", lambda *_: None),
        partial(put_back.test_nodes_that_were_all_killed_know_the_copy_of_one, 1, "n1"),
    ),
    "an accepted copy waits for nobody": (
        an_accepted_copy_waits_for_nobody,
        put_back.test_an_accepted_only_voter_waits_for_every_node_that_is_not_given_up,
    ),
    "retained bounds are of each node": (
        retained_bounds_are_of_each_node,
        partial(bounds.test_the_state_is_a_function_of_the_records, "retained", 0),
    ),
    "producer bounds are of each node": (
        producer_bounds_are_of_each_node,
        partial(bounds.test_the_state_is_a_function_of_the_records, "producers", 0),
    ),
    "a coordinator reads for any audience": (
        a_coordinator_reads_for_any_audience,
        group_states.test_a_coordinator_that_reads_the_log_respects_the_audience,
    ),
    "a ticket is known by its number": (
        a_ticket_is_known_by_its_number,
        forwarding.test_a_record_with_the_ticket_of_another_node_is_sent,
    ),
    "records cut off count for lost ones": (
        records_cut_off_count_for_lost_ones,
        position_reports.test_records_that_were_cut_off_hide_no_lost_ones,
    ),
    "nobody waits for a clock": (
        nobody_waits_for_a_clock,
        position_reports.test_a_node_waits_for_the_clock_of_another_member,
    ),
    "clocks of members count alone": (
        clocks_of_members_count_alone,
        position_reports.test_a_node_that_does_not_know_the_members_yet_takes_their_clocks,
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_breaks_a_test(name: str) -> None:
    fails_with(*PLANTED[name])
