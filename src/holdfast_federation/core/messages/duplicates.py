"""Detection of duplicates at QoS 0: per origin and epoch, the last 65,536 sequences.

It is a sliding window, not a cache of recent ids. A message below the window counts as seen. A
cache would forget it, and a message that circles in a loop would start to circulate again.
"""

import enum
from typing import Final

from holdfast_federation.core.identity import MessageId

WINDOW: Final = 65_536
EPOCH_KEPT_S: Final = 600.0
WINDOWS_MAX: Final = 8192
"""The most epochs that are tracked, 8 KiB each. The least recently used one is dropped first."""


class Freshness(enum.Enum):
    """The result of a look-up."""

    NEW = enum.auto()
    LATE = enum.auto()
    """The message is new, but a later one of its origin came before it."""
    SEEN = enum.auto()
    """The message came before, or is below the window."""


class Window:
    """The sequences of one origin and epoch that were seen.

    Bit i of the ring stands for the sequence that is i modulo WINDOW. Bits above `newest` are
    clear.
    """

    def __init__(self) -> None:
        self.newest = 0
        self.used_at = 0.0
        self._bits = bytearray(WINDOW // 8)

    def add(self, sequence: int) -> Freshness:
        """Looks up a sequence and marks it as seen."""
        if sequence <= self.newest - WINDOW:
            return Freshness.SEEN
        if sequence > self.newest:
            self._clear(sequence)
            self.newest = sequence
            freshness = Freshness.NEW
        else:
            freshness = Freshness.LATE
        at = sequence % WINDOW
        bit = 1 << (at & 7)
        if self._bits[at >> 3] & bit:
            return Freshness.SEEN
        self._bits[at >> 3] |= bit
        return freshness

    def _clear(self, sequence: int) -> None:
        if sequence - self.newest >= WINDOW:
            self._bits = bytearray(WINDOW // 8)
            return
        for passed in range(self.newest + 1, sequence + 1):
            at = passed % WINDOW
            self._bits[at >> 3] &= ~(1 << (at & 7)) & 255


class Duplicates:
    """The windows of all origins, at most WINDOWS_MAX of them."""

    def __init__(self, one_epoch: bool = False) -> None:
        """`one_epoch`: each origin has one window, for its newest epoch. Then an origin that
        starts often cannot displace the windows of others."""
        self._one_epoch = one_epoch
        self._windows: dict[tuple[bytes, int], Window] = {}
        self._epochs: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._windows)

    def add(self, id: MessageId, now: float) -> Freshness:
        key = (id.node, id.epoch)
        window = self._windows.pop(key, None)
        if window is None:
            self.expire(now)
            if self._one_epoch:
                before = self._epochs.get(id.node, id.epoch)
                if id.epoch < before:
                    return Freshness.SEEN
                self._windows.pop((id.node, before), None)
                self._epochs[id.node] = id.epoch
            if len(self._windows) >= WINDOWS_MAX:
                self._forget(next(iter(self._windows)))
            window = Window()
        # The order of the dict is the order of use.
        self._windows[key] = window
        window.used_at = now
        return window.add(id.sequence)

    def expire(self, now: float) -> None:
        """Forgets the epochs without a message for EPOCH_KEPT_S."""
        for key in list(self._windows):
            if now - self._windows[key].used_at < EPOCH_KEPT_S:
                return
            self._forget(key)

    def _forget(self, key: tuple[bytes, int]) -> None:
        del self._windows[key]
        if self._epochs.get(key[0]) == key[1]:
            del self._epochs[key[0]]
