"""One run of a model, in a process of the pool of `python -m tests.model`."""

import os
import signal
from collections.abc import Callable
from functools import cache
from typing import Final

from tests.model.models import Model
from tests.support.seeds import what_is_wrong

SEED_S: Final = 600
"""A run that takes longer is wrong. The longest known takes some 10 s."""


def begin(is_interpreted: bool) -> None:
    """The first step of a process of the pool, before it imports the production code."""
    # Ctrl-C ends the campaign after the runs that have begun.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if is_interpreted:
        os.environ["HOLDFAST_INTERPRETED"] = "1"


def run_seed(model: Model, seed: int) -> str:
    """The error of this run. Empty if it is well."""
    signal.signal(signal.SIGALRM, _end)
    signal.alarm(SEED_S)
    try:
        return what_is_wrong(_loaded(model), seed)
    finally:
        signal.alarm(0)


@cache
def _loaded(model: Model) -> Callable[[int], object]:
    return model.load()


def _end(*_: object) -> None:
    raise TimeoutError(f"the run has taken more than {SEED_S} s")
