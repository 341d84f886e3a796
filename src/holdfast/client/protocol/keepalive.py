"""Decides when to ping, and when a silent server counts as down."""

from math import inf
from typing import Final

NEVER: Final = inf


class KeepAlive:
    """The timer of one connection.

    A ping is due when nothing was sent for the interval (the server would close the connection) or
    nothing received (it may be down). With a response timeout, one is also due half of it after the
    last input from a server that owes a reply. A server that is only slow replies to the ping; one
    that is down is detected at the end of the timeout.

    `is_owed`: a packet other than a ping waits for its reply.
    """

    def __init__(
        self,
        ping_timeout_s: float,
        response_timeout_s: float | None = None,
        ping_interval_s: float = 0.0,
    ) -> None:
        self.interval_s = 0.0
        """The keep alive in seconds; 0: it needs no pings."""
        self._ping_timeout_s = ping_timeout_s
        self._response_timeout_s = response_timeout_s
        self._ping_interval_s = ping_interval_s
        self._sent = 0.0
        self._received = 0.0
        self._requested_at = 0.0
        self._pinged: float | None = None
        self._is_paused = False

    def start(self, now: float) -> None:
        """Begins a connection."""
        self.interval_s = 0.0
        self._sent = self._received = self._requested_at = now
        self._pinged = None
        self._is_paused = False

    def sent(self, now: float) -> None:
        """Notes that a packet was sent."""
        self._sent = now

    def received(self, now: float) -> None:
        """Notes that bytes arrived."""
        self._received = now

    def note_request(self, now: float) -> None:
        """Notes a packet that needs a reply, while no other reply is owed."""
        self._requested_at = now

    def pinged(self, now: float) -> None:
        """Notes that a PINGREQ was sent."""
        self._pinged = now

    def note_pingresp(self) -> None:
        """Notes that its PINGRESP arrived."""
        self._pinged = None

    def set_paused(self, is_paused: bool, now: float) -> None:
        """Notes whether the client reads. While it does not, silence is no sign of the server's
        state."""
        self._is_paused = is_paused
        self._received = now
        if self._pinged is not None:
            self._pinged = now

    def progressed(self, now: float) -> None:
        """Notes that the server takes bytes. Until it has all of them it can owe no reply."""
        self.set_paused(self._is_paused, now)

    def ping_at(self, is_owed: bool) -> float:
        """The time of the next ping, or NEVER."""
        interval_s = self.interval_s
        if self._is_paused:
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
            since = self._requested_at if self._requested_at > received else received
            at = since + self._response_timeout_s / 2
            if at < due:
                due = at
        return due

    def times_out_at(self, is_owed: bool) -> float:
        """The time at which a silent server counts as down, or NEVER if no reply is awaited."""
        if self._is_paused:
            return NEVER
        pinged = self._pinged
        due = NEVER
        if pinged is not None:
            timeout_s = self._ping_timeout_s
            due = pinged + min(timeout_s, self.interval_s or timeout_s)
        elif not is_owed:
            return NEVER
        if self._response_timeout_s is not None:
            since = self._requested_at if is_owed or pinged is None else pinged
            at = (since if since > self._received else self._received) + self._response_timeout_s
            if at < due:
                due = at
        return due

    def timer(self, is_owed: bool) -> float | None:
        """The earlier of the two times, or None. Called for each packet that is sent."""
        ping_at = self.ping_at(is_owed)
        lost_at = self.times_out_at(is_owed)
        when = ping_at if ping_at < lost_at else lost_at
        return when if when < NEVER else None
