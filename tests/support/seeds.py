"""Which seeds the simulations run. Their tests run the same ones each time; `python -m tests.model`
runs fresh ones."""

from collections.abc import Callable
from typing import Protocol


class SimulatedWorld(Protocol):
    """A simulated run of one seed. `trace` is the list of its events."""

    trace: list[str]

    def play(self) -> None: ...


def block_of_seeds(block: int, blocks: int, count: int) -> range:
    """One of `blocks` parts of `count` seeds."""
    return range(block, count, blocks)


def run_seeds(seeds: range, run: Callable[[int], object]) -> None:
    """Runs every seed, also after a wrong one. Raises AssertionError with all wrong seeds."""
    wrong = [f"seed {seed}: {found}" for seed in seeds if (found := what_is_wrong(run, seed))]
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(seeds)} seeds are wrong\n" + "\n".join(wrong))


def what_is_wrong(run: Callable[[int], object], seed: int) -> str:
    """The error that the run of this seed ends with, and its notes. Empty if there is none."""
    try:
        run(seed)
    except Exception as error:  # noqa: BLE001
        notes = getattr(error, "__notes__", [])
        return "\n".join((f"{type(error).__name__}: {error}", *notes))
    return ""


def playing(world_class: Callable[[int], SimulatedWorld]) -> Callable[[int], None]:
    """A function that plays the world of a seed. Its errors have the world's events as a note."""

    def play(seed: int) -> None:
        world = world_class(seed)
        try:
            world.play()
        except Exception as error:
            error.add_note("\n".join(world.trace))
            raise

    return play


def run_worlds(seeds: range, world_class: Callable[[int], SimulatedWorld]) -> None:
    """Plays the world of every seed as `run_seeds` does."""
    run_seeds(seeds, playing(world_class))
