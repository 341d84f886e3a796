"""The seeds of simulations: each runs, also after a wrong one, and all wrong ones are named."""

import pytest

from tests.support.seeds import block_of_seeds, run_seeds, run_worlds


class Odd:
    """A world in which odd seeds are wrong."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.trace = [f"{seed} begins"]

    def play(self) -> None:
        if self.seed % 2:
            raise ValueError("odd")


def test_every_seed_runs_and_all_wrong_ones_are_named() -> None:
    with pytest.raises(AssertionError) as failed:
        run_worlds(range(10, 15), Odd)
    assert str(failed.value).splitlines() == [
        "2 of 5 seeds are wrong",
        "seed 11: ValueError: odd",
        "11 begins",
        "seed 13: ValueError: odd",
        "13 begins",
    ]


def test_the_blocks_have_each_seed_once() -> None:
    seen: list[int] = []
    for block in range(4):
        run_seeds(block_of_seeds(block, 4, 10), seen.append)
    assert sorted(seen) == list(range(10))
