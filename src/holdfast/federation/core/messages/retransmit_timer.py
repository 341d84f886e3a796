"""How long a destination's confirmations are waited for, until what is in flight is sent again.

`retry_s` at first, doubled each time. Where confirmations take longer, so does the wait: else a
slow destination would get everything several times. What was sent more than once tells nothing of
how long that takes, so a doubled wait stays until a message that was sent once is confirmed.

When the path has become another, what is sent may get lost until the members on it know the graph:
for a while the wait begins at `reroute_s`, but not below what confirmations take.
"""

from typing import Final

from holdfast.federation.core.config import FederationConfig

SLACK: Final = 1.5
"""Of the longest time that a confirmation took lately."""
FADING: Final = 8
"""Confirmations by which that time mostly follows shorter ones."""
NEVER: Final = float("-inf")


class RetransmitTimer:
    def __init__(self, config: FederationConfig) -> None:
        self._config = config
        self.wait_s = config.retry_s
        """For what is in flight, from the last confirmation or sending on."""
        self._slow_s = 0.0
        self._moved_at = NEVER
        self._is_backed_off = False
        # The path is lost: the first wait is short, and nothing is learnt from it.
        self._is_hasty = False
        # What is in flight was sent before.
        self._is_repeated = False
        # A message that was sent once, by epoch and place, and when.
        self._probe: tuple[int, int] | None = None
        self._probe_at = 0.0

    def begin(self, now: float) -> None:
        """Nothing was in flight."""
        if not self._is_backed_off:
            self.wait_s = self._least_s(now)

    def launched(self, epoch: int, place: int, now: float) -> None:
        if self._probe is None and not self._is_repeated:
            self._probe = (epoch, place)
            self._probe_at = now

    def confirmed(self, epoch: int, place: int, now: float) -> None:
        """Places up to this one, that were not confirmed before."""
        self._is_repeated = False
        self._is_hasty = False
        if self._probe is not None and self._probe <= (epoch, place):
            took_s = now - self._probe_at
            self._slow_s = max(took_s, self._slow_s + (took_s - self._slow_s) / FADING)
            self._probe = None
            self._is_backed_off = False
        if not self._is_backed_off:
            self.wait_s = self._least_s(now)

    def expired(self) -> None:
        """The wait is over: what is in flight is sent again."""
        if self._is_hasty:
            self._is_hasty = False
        else:
            self.wait_s = min(2 * self.wait_s, self._config.retry_max_s)
            self._is_backed_off = True
        self._is_repeated = True
        self._probe = None

    def moved(self, now: float) -> None:
        """The path is another one."""
        self._moved_at = now
        self._is_backed_off = False
        self.wait_s = self._least_s(now)

    def after_a_change(self, is_broken: bool) -> float:
        """How long to wait for what is in flight when the graph has changed; `is_broken`: the path
        on which that was sent is gone."""
        if is_broken:
            self._is_hasty = True
            return self._config.reroute_s
        if self._slow_s:
            # Its confirmation may have been lost, or a member on its way was astray.
            return max(self._config.reroute_s, SLACK * self._slow_s)
        return self._config.retry_s

    def _least_s(self, now: float) -> float:
        config = self._config
        is_settling = now - self._moved_at < config.retry_s
        least_s = config.reroute_s if is_settling else config.retry_s
        return min(max(least_s, SLACK * self._slow_s), config.retry_max_s)
