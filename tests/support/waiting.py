"""Waiting for what other processes do."""

import time
from collections.abc import Callable

WAIT_S = 60.0
POLL_S = 0.02
POLL_MAX_S = 0.1
REST = 4


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
