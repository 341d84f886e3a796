"""When to ping, and when the server counts as gone."""

from math import inf
from typing import Final

NEVER: Final = inf


class KeepAlive:
    """A ping is due when nothing was sent for the interval (the server would close the
    connection) or nothing received (it may be gone). With a response timeout one is due, too,
    half of it after the last word of a server that owes an answer: a server that is only slow
    answers the ping, one that is gone is found at the end of the timeout.

    `is_owed`, where it is asked for: something other than a ping waits for its answer.
    """

    def __init__(
        self,
        ping_timeout_s: float,
        response_timeout_s: float | None = None,
        ping_interval_s: float = 0.0,
    ) -> None:
        self.interval_s = 0.0
        """0: no pings on account of the keep alive."""
        self._ping_timeout_s = ping_timeout_s
        self._response_timeout_s = response_timeout_s
        self._ping_interval_s = ping_interval_s
        self._sent = 0.0
        self._received = 0.0
        self._asked = 0.0
        self._pinged: float | None = None
        self._held = False

    def start(self, now: float) -> None:
        self.interval_s = 0.0
        self._sent = self._received = self._asked = now
        self._pinged = None
        self._held = False

    def sent(self, now: float) -> None:
        self._sent = now

    def received(self, now: float) -> None:
        self._received = now

    def asked(self, now: float) -> None:
        """Something that wants an answer is sent, while nothing else is owed."""
        self._asked = now

    def pinged(self, now: float) -> None:
        self._pinged = now

    def answered(self) -> None:
        self._pinged = None

    def hold(self, held: bool, now: float) -> None:
        """While we do not read ourselves, silence says nothing about the server."""
        self._held = held
        self._received = now
        if self._pinged is not None:
            self._pinged = now

    def progressed(self, now: float) -> None:
        """The server takes our bytes: until it has all it can owe nothing."""
        self.hold(self._held, now)

    def ping_at(self, is_owed: bool) -> float:
        """When the next ping is due; NEVER if none is."""
        interval_s = self.interval_s
        if self._held:
            return self._sent + interval_s if interval_s else NEVER
        if self._pinged is not None:
            return NEVER
        received = self._received
        due = NEVER
        if interval_s:
            due = (self._sent if self._sent < received else received) + interval_s
        if self._ping_interval_s:
            due = min(due, received + self._ping_interval_s)
        if is_owed and self._response_timeout_s is not None:
            since = self._asked if self._asked > received else received
            at = since + self._response_timeout_s / 2
            if at < due:
                due = at
        return due

    def lost_at(self, is_owed: bool) -> float:
        """When the server counts as gone if it stays silent; NEVER without a question."""
        if self._held:
            return NEVER
        pinged = self._pinged
        due = NEVER
        if pinged is not None:
            timeout_s = self._ping_timeout_s
            due = pinged + min(timeout_s, self.interval_s or timeout_s)
        elif not is_owed:
            return NEVER
        if self._response_timeout_s is not None:
            since = self._asked if is_owed or pinged is None else pinged
            at = (since if since > self._received else self._received) + self._response_timeout_s
            if at < due:
                due = at
        return due

    def timer(self, is_owed: bool) -> float | None:
        """The sooner of the two, None for never. Asked for with each packet that is sent."""
        ping_at = self.ping_at(is_owed)
        lost_at = self.lost_at(is_owed)
        when = ping_at if ping_at < lost_at else lost_at
        return when if when < NEVER else None
