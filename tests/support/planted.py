"""Planted bugs: mistakes that are made in the production code for the length of a test. The model
finds each of them and says what is wrong. Without the mistake the same run is well."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.sim.schedule import Violation, Wrong
from tests.sim.world import Settings, World

SEEDS = 40
"""At most; a planted bug that is not found in these is not looked for well enough. A seed is the
same run with the same version only, so the one that finds a bug moves."""

Plant = Callable[[], AbstractContextManager[object]]
Run = Callable[[int], object]
Errors = tuple[type[Exception], ...]


@dataclass(frozen=True)
class Planted:
    """A mistake and the model that finds it."""

    plant: Plant
    run: Run
    """Runs the model with a seed."""
    text: str = ""
    """A part of what the model then says."""
    seed: int = 0
    """The first that is looked at."""
    seeds: int = SEEDS
    finds: Errors = (Wrong, Violation)
    """The errors of the model. Any other ends the test: an assert of the production code that is
    hit before says nothing of the model."""

    def check(self) -> None:
        """It is found, and the seed that finds it is well without it."""
        self.run(self.find())

    def find(self) -> int:
        """Return the seed that finds it."""
        said = []
        with self.plant():
            for seed in range(self.seed, self.seed + self.seeds):
                try:
                    self.run(seed)
                except self.finds as error:
                    if self.text in str(error):
                        return seed
                    said.append(str(error))
        raise AssertionError(f"not found in {self.seeds} seeds from {self.seed} on: {said[:3]}")


def in_cluster(plant: Plant, settings: Settings, text: str, seed: int = 0) -> Planted:
    """A mistake that a run of the cluster finds, or the asserts of its nodes, which are among its
    checks."""
    finds = (Violation, AssertionError)
    return Planted(plant, lambda each: World(each, settings).run(), text, seed, finds=finds)


def is_found(run: Run, seeds: range = range(SEEDS), errors: Errors = (AssertionError,)) -> bool:
    """Returns whether the model finds a mistake that the test has made."""
    for seed in seeds:
        try:
            run(seed)
        except errors:
            return True
    return False


def fails_with(plant: Plant, test: Callable[[], object]) -> None:
    """A test that passes with the production code as it is fails with the mistake, and not by an
    assert of the production code: that says nothing of the test."""
    with plant(), pytest.raises((AssertionError, Violation)) as found:
        test()
    assert "tests" in Path(found.traceback[-1].path).parts, found.value


def print_searches() -> None:
    """Print each planted bug of the clusters and the lease that more than two seeds were played
    for: the first, and the one that finds it."""
    for module in ("cluster_planted_bugs", "cluster_wider_planted_bugs", "lease_planted_bugs"):
        for name, search in import_module(f"tests.model.test_{module}").PLANTED.items():
            seed = search.find()
            if seed > search.seed + 1:
                print(f"{module}: {name}: {search.seed} -> {seed}", flush=True)


def changed(target: object, name: str, value: object) -> AbstractContextManager[object]:
    return patch.object(target, name, value)


if __name__ == "__main__":
    print_searches()
