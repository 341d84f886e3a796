"""Linearizable reads of the metadata.

A read proposes a command without effect to Raft. Once it is applied here, everything that was
committed before the proposal is applied here too. An idle cluster proposes nothing.

One proposal is under way at a time. A read that begins meanwhile waits for the next one, because
the present proposal may precede an entry that it must see.
"""

from collections.abc import Callable
from typing import Final

from holdfast.node.metadata.commands import CHANGES_NOTHING
from holdfast.node.metadata.requests import Outcome, RequestRefused

NOTHING: Final = -1
ASK_AGAIN_S: Final = 0.1
"""The delay in seconds after a proposal that failed."""


class MetadataReads:
    """The reads of the metadata that this node waits for."""

    def __init__(self, propose: Callable[[float], int]) -> None:
        """`propose` sends the command without effect. It returns its request number, or NOTHING if
        no Raft leader is known."""
        self._propose = propose
        # Counts of proposals: sent, wanted, and the newest that is applied here.
        self._sent = 0
        self._wanted = 0
        self._known = 0
        self._request = NOTHING
        self._ask_at = 0.0
        self.is_alone = False
        """Whether a read is complete at once, because no other node can have changed anything."""

    def begin(self) -> int:
        """Returns the number of a read of everything that is committed by now."""
        self._wanted = self._sent + 1
        if self.is_alone:
            self._sent = self._known = self._wanted
        return self._wanted

    def has_passed(self, read: int) -> bool:
        """True if the read is complete."""
        return read <= self._known

    def advance(self, now: float) -> None:
        """Sends the proposal of the waiting reads, at the end of a turn."""
        if self._wanted <= self._known or self._request != NOTHING or now < self._ask_at:
            return
        self._ask_at = 0.0
        self._request = self._propose(now)
        if self._request != NOTHING:
            self._sent += 1

    def proposal_done(self, request: int, outcome: Outcome, now: float) -> bool:
        """Takes the outcome of a proposal. Returns False if it is not one of this class."""
        if request != self._request or request == NOTHING:
            return False
        self._request = NOTHING
        if isinstance(outcome, RequestRefused) and outcome.text == CHANGES_NOTHING:
            self._known = self._sent
        else:
            self._ask_at = now + ASK_AGAIN_S
        return True

    def timer(self) -> float | None:
        """Returns the time at which to call `advance` if nothing else happens, or None."""
        is_late = self._request == NOTHING and self._wanted > self._known
        return self._ask_at if is_late and self._ask_at else None
