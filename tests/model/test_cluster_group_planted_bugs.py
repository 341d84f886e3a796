"""The simulated runs of shared groups whose members leave, are away or are stuck find what they are
there for."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import pytest

from holdfast.cluster.shared_groups.coordinator import Coordinator
from holdfast.cluster.shared_groups.group_state import Coordination
from holdfast.cluster.shared_groups.homes import Home, LedHomes
from holdfast.cluster.state.group_members import GroupMembers
from holdfast.cluster.state.groups import GroupPositions
from holdfast.cluster.state.offset_ranges import FinishedOffsets
from tests.sim.casts import LEAVERS
from tests.sim.plans import settings_for
from tests.sim.schedule import Violation
from tests.sim.world import World

SEEDS = 2000
"""The default seeds below this one that have LEAVERS are looked at: about two hundred."""

Plant = Callable[[], AbstractContextManager[object]]


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


PLANTED: dict[str, tuple[Plant, int]] = {
    "a group ends by what is applied": (a_group_ends_by_what_is_applied, 1135),
    "only members keep records": (only_members_keep_records, 402),
    "finished offsets are forgotten": (finished_offsets_are_forgotten, 1),
}
"""With the default seed from which on it is looked for."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    plant, first = PLANTED[name]
    with plant():
        for seed in range(first, SEEDS):
            settings = settings_for(seed)
            if settings.casts != (LEAVERS,):
                continue
            try:
                World(seed, settings).run()
            except (Violation, AssertionError, ValueError, KeyError):
                return
    pytest.fail("no run has found it")
