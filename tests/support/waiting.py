"""Waiting for what other processes do."""

import os
import time
from collections.abc import Callable, Iterator

WAIT_S = 60.0
POLL_S = 0.02
POLL_MAX_S = 0.1
REST = 4


def patience(bound_s: float, what: str = "") -> Iterator[None]:
    """Lets a loop go on for so many seconds of a machine with free cores. While more processes want
    to run than there are cores, a second counts as the share of a core that one of them gets.
    Afterwards raises AssertionError with `what`, if it is given."""
    spent_s, before = 0.0, time.monotonic()
    while spent_s < bound_s:
        yield
        share = min(1.0, (os.cpu_count() or 1) / max(os.getloadavg()[0], 1.0))
        now = time.monotonic()
        spent_s, before = spent_s + share * (now - before), now
    assert not what, f"{what} within {bound_s:g} s of free cores"


def until(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Returns when the condition holds. Raises AssertionError with `what` if it does not in time.

    A look takes at most a fifth of the time: it often costs the processes that are waited for some
    of the cores that they share with the test.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        if condition():
            return
        assert began < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(min(max(POLL_S, REST * (time.monotonic() - began)), POLL_MAX_S))
