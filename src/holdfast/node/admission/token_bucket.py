"""A token bucket: the allowance of a rate with a burst. It reads no clock; times are seconds."""

from typing import Final

EMPTY: Final = 1e-9
"""The number of tokens at or below which a bucket counts as empty, because sums of fractions do not
end at exactly 0."""


class TokenBucket:
    """A store of at most `burst` tokens that gains `per_s` of them each second.

    A taker may leave a debt: one message larger than the whole burst must pass some time. So the
    rule is "take whenever the bucket is not empty", and the debt is waited for afterwards. Over a
    long time the tokens taken are at most `burst + per_s * seconds`, plus one message.
    """

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        """`per_s` above 0. The bucket starts full."""
        self.per_s = per_s
        self.burst = burst
        self.tokens = burst
        self.at = now
        # Of it, what was not reported to the other processes yet.
        self.taken = 0.0

    def refill(self, now: float) -> None:
        """Adds the tokens gained until `now`. An earlier time changes nothing."""
        passed_s = now - self.at
        if passed_s > 0.0:
            self.at = now
            self.tokens = min(self.burst, self.tokens + passed_s * self.per_s)

    def is_empty(self, now: float) -> bool:
        """Whether nothing may be taken now."""
        self.refill(now)
        return self.tokens <= EMPTY

    def is_full(self, now: float) -> bool:
        """Whether the bucket equals a new one, so that it need not be remembered."""
        self.refill(now)
        return self.tokens >= self.burst

    def take(self, amount: float) -> None:
        """Removes tokens as of the last `refill`, into debt if there are fewer."""
        self.tokens -= amount
        self.taken += amount

    def wait_s(self) -> float:
        """The seconds from the last `refill` until the bucket is not empty; 0.0: it is not."""
        # One token is enough to begin again. A tenth of a burst below one is as good.
        wanted = min(1.0, self.burst / 10)
        return 0.0 if self.tokens > EMPTY else (wanted - self.tokens) / self.per_s
