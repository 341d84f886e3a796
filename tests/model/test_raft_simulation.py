"""Consensus on the metadata under everything that may go wrong: no term has two leaders, nothing
that was committed is lost, all nodes come to the same metadata, and when all is well again they go
on. See tests/support/sim_raft.py (elections) and sim_meta.py (whole nodes, files, membership).
"""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from holdfast.node.raft import leader as raft_leading
from holdfast.node.raft import node as raft
from holdfast.node.raft.node import RaftFailure, RaftNode, Ready
from holdfast.node.raft.state import Raft
from tests.support.seeds import block_of_seeds, run_worlds
from tests.support.sim_meta import World
from tests.support.sim_raft import ElectionWorld, SlowDisks, Wrong

SEEDS = 24
"""How many worlds of whole nodes; A failure names its seed; `tests.model` runs more."""
ELECTION_SEEDS = 240
"""How many of elections, which are cheap."""
SLOW_SEEDS = 60
BLOCKS = 8
PLANTED_SEEDS = 1000
"""A planted bug is found within so many worlds; most within 50."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_metadata_is_agreed(block: int) -> None:
    run_worlds(block_of_seeds(block, BLOCKS, SEEDS), World)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_elections_are_safe(block: int) -> None:
    run_worlds(block_of_seeds(block, BLOCKS, ELECTION_SEEDS), ElectionWorld)


@pytest.mark.timeout(3600)
def test_slow_disks_elect_a_leader() -> None:
    run_worlds(range(SLOW_SEEDS), SlowDisks)


def test_a_slow_disk_that_a_majority_needs_is_mended_too() -> None:
    """Writes of m0 that outlast an election deposed one leader after the other, and the backlog
    grew meanwhile. Now the leader of the time of the mending stays, or the one after it."""
    world = ElectionWorld(1155231618, "members")
    world.play()
    assert max(world.leaders) <= world.term_at_mend + 1


def test_a_seed_says_everything() -> None:
    """What failed once can be looked at."""
    worlds = [World(5), World(5)]
    for world in worlds:
        world.play()
    assert worlds[0].trace == worlds[1].trace
    assert worlds[0].agreed == worlds[1].agreed


def test_the_worlds_are_rough() -> None:
    """A world where nothing happens shows nothing."""
    elections = [ElectionWorld(seed) for seed in range(20)]
    for world in elections:
        world.play()
    assert sum(len(world.leaders) for world in elections) > 60
    assert sum(len(world.agreed) for world in elections) > 200
    nodes = [World(seed) for seed in range(4)]
    for each in nodes:
        each.play()
    assert sum(each.elections for each in nodes) > 8
    assert sum(each.outcome is not None for each in nodes for each in each.asked) > 50


# Planted bugs: what the worlds must find.


class ForgetfulWorld(ElectionWorld):
    forgets_vote = True


def no_bug(patch: pytest.MonkeyPatch) -> None:
    """It is in the world."""


def send_before_durable(patch: pytest.MonkeyPatch) -> None:
    take_ready = RaftNode.take_ready

    def take(self: RaftNode, now: float) -> Ready | None:
        ready = take_ready(self, now)
        if ready is None:
            return None
        return replace(ready, messages=ready.messages + ready.messages_after, messages_after=())

    patch.setattr(RaftNode, "take_ready", take)


def commit_by_counting(patch: pytest.MonkeyPatch) -> None:
    """Entries of earlier terms too: Raft 5.4.2, figure 8."""

    def advance_commit(state: Raft, now: float) -> None:
        if state.followers is not None:
            index = state.followers.committed(state.durable_index)
            state.commit_to(max(index, state.commit))

    patch.setattr(raft_leading, "advance_commit", advance_commit)
    patch.setattr(raft, "advance_commit", advance_commit)


def change_members_at_any_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(raft, "may_change_members", lambda state: state.role == "leader")


def count_own_entries_before_durable(patch: pytest.MonkeyPatch) -> None:
    take_write = Raft.take_write

    def take(self: Raft) -> object:
        write = take_write(self)
        self.durable_index = self.log.last_index
        return write

    patch.setattr(Raft, "take_write", take)


def vote_for_any_log(patch: pytest.MonkeyPatch) -> None:
    handle = raft.handle_vote_request
    patch.setattr(
        raft,
        "handle_vote_request",
        lambda state, sender, request, now: handle(
            state, sender, replace(request, last_term=1 << 40), now
        ),
    )


Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("plant", "kind", "world_class"),
    [
        (no_bug, "votes", ForgetfulWorld),
        (send_before_durable, "mixed", ElectionWorld),
        (commit_by_counting, "backlogs", ElectionWorld),
        (change_members_at_any_time, "members", ElectionWorld),
        (count_own_entries_before_durable, "mixed", ElectionWorld),
        (vote_for_any_log, "mixed", ElectionWorld),
    ],
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Plant, kind: str, world_class: type[ElectionWorld]
) -> None:
    plant(monkeypatch)
    for seed in range(PLANTED_SEEDS):
        try:
            world_class(seed, kind).play()
        except (Wrong, RaftFailure):
            return
    raise AssertionError(f"{plant.__name__} was not found in {PLANTED_SEEDS} worlds")
