"""Limits how much of a connection may be on the way between two processes.

Invariants
- A sender that stops when it is told to has at most its window and one write unconfirmed.
- No deadlock: a sender that is stopped has more than half a window unconfirmed, and its receiver
  confirms a quarter of one as soon as it is done with so much. Counter-example with a receiver that
  waits for two windows: the sender stops a byte above one, and neither side ever says anything
  more.
"""

from typing import Final

WINDOW_BYTES: Final = 262_144
"""The unconfirmed bytes of one connection and direction above which its sender stops."""


class SendingCredit:
    """The bytes that a sender may still send."""

    def __init__(self) -> None:
        self.unconfirmed = 0
        self.is_exhausted = False

    def spend(self, size: int) -> bool:
        """Counts bytes sent. True: the sender stops now."""
        self.unconfirmed += size
        if self.is_exhausted or self.unconfirmed <= WINDOW_BYTES:
            return False
        self.is_exhausted = True
        return True

    def restore(self, size: int) -> bool:
        """Counts bytes that the receiver is done with. True: the sender goes on now."""
        self.unconfirmed -= size
        if not self.is_exhausted or self.unconfirmed > WINDOW_BYTES // 2:
            return False
        self.is_exhausted = False
        return True


class ReceivingCredit:
    """The bytes that a receiver has yet to confirm."""

    def __init__(self) -> None:
        self.unconfirmed = 0

    def finish(self, size: int) -> int:
        """Counts bytes that the receiver is done with. The bytes to confirm now; 0: none yet."""
        self.unconfirmed += size
        if self.unconfirmed < WINDOW_BYTES // 4:
            return 0
        due = self.unconfirmed
        self.unconfirmed = 0
        return due
