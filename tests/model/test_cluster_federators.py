"""The state of a member of a federation in a simulated cluster: what a federator was told is stored
stays, on every node, whatever fails and whoever runs the member."""

from unittest.mock import patch

import pytest

from holdfast.log.record import Record
from holdfast.node.state.member_values import IDENTITY, MemberValues
from tests.sim.casts import FEDERATORS
from tests.sim.federators import Federators
from tests.sim.plans import settings_for
from tests.sim.schedule import Violation
from tests.sim.world import World
from tests.support.seeds import block_of_seeds

SEEDS = 12
BLOCKS = 2
DURATION_S = 4.0
FIRST_PLANTED, LAST_PLANTED = 36, 80
"""The seeds in which the planted mistake is looked for, in order."""


def run(seed: int) -> Federators:
    world = World(seed, settings_for(seed, duration_s=DURATION_S, casts=(FEDERATORS,)))
    world.run()
    [federators] = world.parties
    assert isinstance(federators, Federators)
    return federators


@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_what_is_stored_stays(block: int) -> None:
    starts = 0
    for seed in block_of_seeds(block, BLOCKS, SEEDS):
        try:
            federators = run(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {DURATION_S} s: {error}") from error
        assert federators.stored, seed
        starts += len(federators.begun)
    assert starts > SEEDS // BLOCKS, "the member never moved"


def test_values_without_a_fence_are_found() -> None:
    """A record of an earlier start changes a value, as it must not."""

    def apply(values: MemberValues, record: Record) -> None:
        if record.client_id == IDENTITY:
            values.start = record.sequence
        values.values[record.client_id] = record.payload

    def look() -> None:
        for seed in range(FIRST_PLANTED, LAST_PLANTED):
            run(seed)

    with patch.object(MemberValues, "apply", apply), pytest.raises(Violation):
        look()
