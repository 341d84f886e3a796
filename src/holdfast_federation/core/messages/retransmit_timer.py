"""Computes the retransmission timeout of one destination.

The timeout begins at `retry_s` and doubles with each retransmission. It grows with the measured
round trip: otherwise a slow destination would receive every message several times. A message that
was sent twice gives no measurement, because its confirmation may belong to either copy (Karn's
rule). So a doubled timeout stays until a message that was sent once is confirmed.

After a change of the path, messages may be lost until the members on it have the new graph. For
`retry_s` the timeout then begins at `reroute_s`, but never below the measured round trip.

If the path has lost a link, the first wait is `reroute_s` alone. No confirmation of a part of what
was in flight then makes it longer: that part came through before the loss, and what follows it may
be lost. Counter-example: places 22 to 25 are in flight, and the last two are on the lost link. The
confirmations of 22 and 23 take detours, and with each of them the wait would begin again.
"""

from typing import Final

from holdfast_federation.core.config import FederationConfig

SLACK: Final = 1.5
"""The timeout as a multiple of the longest recent round trip."""
FADING: Final = 8
"""The number of confirmations after which that time mostly follows shorter round trips."""
NEVER: Final = float("-inf")


class RetransmitTimer:
    """The timeout of one stream, measured on one message at a time (the probe)."""

    def __init__(self, config: FederationConfig) -> None:
        self._config = config
        self.wait_s = config.retry_s
        """For what is in flight, from the last confirmation or sending on."""
        self._slow_s = 0.0
        self._moved_at = NEVER
        self._is_backed_off = False
        # The last message in flight when the path was lost, by epoch and place, until it is
        # confirmed or the first wait is over: that is short, and nothing is learnt from it.
        self._lost_path_end: tuple[int, int] | None = None
        # The messages in flight were sent before, so none of them may be a probe.
        self._is_repeated = False
        # A message that was sent once, by epoch and place, and when.
        self._probe: tuple[int, int] | None = None
        self._probe_at = 0.0

    @property
    def uses_short_timeout(self) -> bool:
        """True if the path was lost and a confirmation does not put off the retransmission."""
        return self._lost_path_end is not None

    def start(self, now: float) -> None:
        """Sets the timeout when the first message goes into flight."""
        if not self._is_backed_off:
            self.wait_s = self._least_s(now)

    def launched(self, epoch: int, place: int, now: float) -> None:
        if self._probe is None and not self._is_repeated:
            self._probe = (epoch, place)
            self._probe_at = now

    def confirmed(self, epoch: int, place: int, now: float) -> None:
        """Handles a confirmation of places that were not confirmed before."""
        self._is_repeated = False
        if self._lost_path_end is not None and self._lost_path_end <= (epoch, place):
            self._lost_path_end = None
        if self._probe is not None and self._probe <= (epoch, place):
            took_s = now - self._probe_at
            self._slow_s = max(took_s, self._slow_s + (took_s - self._slow_s) / FADING)
            self._probe = None
            self._is_backed_off = False
        if not self._is_backed_off:
            self.wait_s = self._least_s(now)

    def expired(self) -> None:
        """Doubles the timeout, because the messages in flight are sent again."""
        if self._lost_path_end is not None:
            self._lost_path_end = None
        else:
            self.wait_s = min(2 * self.wait_s, self._config.retry_max_s)
            self._is_backed_off = True
        self._is_repeated = True
        self._probe = None

    def moved(self, now: float) -> None:
        """Begins again with a short timeout, because the path has changed."""
        self._moved_at = now
        self._is_backed_off = False
        self.wait_s = self._least_s(now)

    def after_a_loss(self, epoch: int, place: int) -> float:
        """Returns the seconds to wait for messages in flight, up to this place, after the path on
        which they were sent has lost a link."""
        self._lost_path_end = (epoch, place)
        # It tells how long the path was lost, and not how long the next one takes.
        self._probe = None
        return self._config.reroute_s

    def after_a_change(self) -> float:
        """Returns the seconds to wait for messages in flight after another change of the graph."""
        if self._slow_s:
            # Its confirmation may have been lost, or a member on the path had an old graph.
            return max(self._config.reroute_s, SLACK * self._slow_s)
        return self._config.retry_s

    def _least_s(self, now: float) -> float:
        config = self._config
        is_settling = now - self._moved_at < config.retry_s
        least_s = config.reroute_s if is_settling else config.retry_s
        return min(max(least_s, SLACK * self._slow_s), config.retry_max_s)
