"""Reading the metadata as of now: a change that changes nothing is proposed, and once it has come
back, everything that was agreed before it was proposed is known here.

One proposal is under way at a time; whoever asks meanwhile waits for the next one.
"""

from collections.abc import Callable
from typing import Final

from holdfast.cluster.metadata.commands import CHANGES_NOTHING
from holdfast.cluster.metadata.requests import Outcome, RequestRefused

NOTHING: Final = -1
ASK_AGAIN_S: Final = 0.1
"""After a proposal that was not carried out."""


class MetadataReads:
    def __init__(self, propose: Callable[[float], int]) -> None:
        """`propose`: the change that changes nothing; returns its request, or NOTHING if there is
        nobody to send it to."""
        self._propose = propose
        # Proposals are counted: how many were sent, how many of them are wanted, and the newest
        # that has come back.
        self._sent = 0
        self._wanted = 0
        self._known = 0
        self._request = NOTHING
        self._ask_at = 0.0

    def begin(self) -> int:
        """A read of everything that is agreed by now."""
        self._wanted = self._sent + 1
        return self._wanted

    def has_passed(self, read: int) -> bool:
        return read <= self._known

    def advance(self, now: float) -> None:
        """End of a turn."""
        if self._wanted <= self._known or self._request != NOTHING or now < self._ask_at:
            return
        self._ask_at = 0.0
        self._request = self._propose(now)
        if self._request != NOTHING:
            self._sent += 1

    def proposal_done(self, request: int, outcome: Outcome, now: float) -> bool:
        """False if it was not for this."""
        if request != self._request or request == NOTHING:
            return False
        self._request = NOTHING
        if isinstance(outcome, RequestRefused) and outcome.text == CHANGES_NOTHING:
            self._known = self._sent
        else:
            self._ask_at = now + ASK_AGAIN_S
        return True

    def timer(self) -> float | None:
        """When to call `advance`, if nothing else happens."""
        is_late = self._request == NOTHING and self._wanted > self._known
        return self._ask_at if is_late and self._ask_at else None
