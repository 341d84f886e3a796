"""The simulated runs of shared groups whose members leave, are away or are stuck find what they are
there for."""

from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import pytest

from holdfast.cluster.metadata.model import PartitionInfo
from holdfast.cluster.placement import controller
from holdfast.cluster.placement.planning import NodeConditions
from holdfast.cluster.shared_groups.coordinator import Coordinator
from holdfast.cluster.shared_groups.group_state import Coordination
from holdfast.cluster.shared_groups.homes import Home, LedHomes
from holdfast.cluster.state.group_members import GroupMembers
from holdfast.cluster.state.groups import GroupPositions
from holdfast.cluster.state.offset_ranges import FinishedOffsets
from tests.sim.casts import LEAVERS
from tests.sim.plans import settings_for
from tests.sim.world import World
from tests.support.planted import Planted

SEEDS = 2000
"""The default seeds below this one that have LEAVERS are looked at: about two hundred."""


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


def finished_offsets_are_forgotten() -> AbstractContextManager[object]:
    """Beyond some, as with a bound that forgets."""
    add = FinishedOffsets.add

    def add_some(finished: FinishedOffsets, partition: int, start: int, end: int) -> None:
        if sum(end - start for _, each in finished.items() for start, end in each.ranges()) < 20:
            add(finished, partition, start, end)

    return patch.object(FinishedOffsets, "add", add_some)


def a_leader_keeps_what_it_cannot_commit() -> AbstractContextManager[object]:
    """Though a replica in sync does not hear it, and another node hears both."""
    relieved = controller.relieved

    def relieve_the_retiring(info: PartitionInfo, standing: NodeConditions) -> PartitionInfo:
        return relieved(info, standing) if info.leader in standing.retiring else info

    return patch.object(controller, "relieved", relieve_the_retiring)


def leavers(seed: int) -> None:
    """The default run of a seed that has LEAVERS; no run of another one."""
    settings = settings_for(seed)
    if settings.casts == (LEAVERS,):
        World(seed, settings).run()


PLANTED = {
    "a leader keeps what it cannot commit": Planted(
        a_leader_keeps_what_it_cannot_commit, leavers, "though nothing was wrong", 1, SEEDS - 1
    ),
    "a group ends by what is applied": Planted(
        a_group_ends_by_what_is_applied, leavers, "with QoS 2", 0, SEEDS
    ),
    "only members keep records": Planted(
        only_members_keep_records, leavers, "with QoS 2", 547, SEEDS - 547
    ),
    "finished offsets are forgotten": Planted(
        finished_offsets_are_forgotten, leavers, "nobody of $share/stuck/s/#", 1, SEEDS - 1
    ),
}
RARE = {
    "a group ends by what is applied",
    "a leader keeps what it cannot commit",
}
"""Few seeds find these, and which ones they are moves with each version."""


@pytest.mark.parametrize("name", sorted(PLANTED.keys() - RARE))
def test_a_planted_bug_is_found(name: str) -> None:
    PLANTED[name].check()


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", sorted(RARE))
def test_a_rare_planted_bug_is_found(name: str) -> None:
    PLANTED[name].check()
