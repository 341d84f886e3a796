"""Which seeds the simulations run: the same ones each time, or those from HOLDFAST_FIRST_SEED on.

`make sim` draws a first seed that nobody has seen, and prints it. `make test` does not set it.
"""

import os
from collections.abc import Callable
from typing import Final, Protocol

FIRST: Final = int(os.environ.get("HOLDFAST_FIRST_SEED", "0"))


class SimulatedWorld(Protocol):
    """A simulated run of one seed. `trace` is the list of its events."""

    trace: list[str]

    def play(self) -> None: ...


def block_of_seeds(block: int, blocks: int, count: int) -> range:
    """One of `blocks` parts of `count` seeds."""
    return range(FIRST + block, FIRST + count, blocks)


def run_seeds(seeds: range, run: Callable[[int], object]) -> None:
    """Runs every seed, also after a wrong one. Raises AssertionError with all wrong seeds."""
    wrong = []
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:  # noqa: BLE001
            notes = getattr(error, "__notes__", [])
            wrong.append("\n".join((f"seed {seed}: {type(error).__name__}: {error}", *notes)))
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(seeds)} seeds are wrong\n" + "\n".join(wrong))


def run_worlds(seeds: range, world_class: Callable[[int], SimulatedWorld]) -> None:
    """Runs the world of every seed as `run_seeds` does. The message has the traces of the wrong
    ones."""

    def run(seed: int) -> None:
        world = world_class(seed)
        try:
            world.play()
        except Exception as error:
            error.add_note("\n".join(world.trace))
            raise

    run_seeds(seeds, run)
