"""When a client tries again after a failure, and after which failures it does not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.client.errors import (
    ClientError,
    ConnectionLost,
    ConnectionRefused,
    SubscribeRefused,
    TimedOut,
)
from holdfast.protocol.mqtt import reasons

TRANSIENT: Final = frozenset(
    {
        -1,
        reasons.SUCCESS,
        reasons.UNSPECIFIED_ERROR,
        reasons.IMPLEMENTATION_SPECIFIC_ERROR,
        reasons.SERVER_UNAVAILABLE,
        reasons.SERVER_BUSY,
        reasons.SERVER_SHUTTING_DOWN,
        reasons.KEEP_ALIVE_TIMEOUT,
        reasons.MESSAGE_RATE_TOO_HIGH,
        reasons.QUOTA_EXCEEDED,
        reasons.ADMINISTRATIVE_ACTION,
        reasons.USE_ANOTHER_SERVER,
        reasons.SERVER_MOVED,
        reasons.CONNECTION_RATE_EXCEEDED,
        reasons.MAXIMUM_CONNECT_TIME,
    }
)
"""Reasons of CONNACK and DISCONNECT that another attempt may not meet again. The others say that
what we send is wrong, or that another client has our id: sending it again would change nothing,
and two clients of one id would take the session from each other for ever."""


def is_transient(error: ClientError) -> bool:
    """Whether it may be otherwise with another server, or later."""
    if isinstance(error, ConnectionLost | ConnectionRefused):
        return error.reason in TRANSIENT
    if isinstance(error, SubscribeRefused):
        # Not Unspecified error: MQTT 3 has no other code for a filter that is not allowed.
        return error.reason in (reasons.QUOTA_EXCEEDED, reasons.IMPLEMENTATION_SPECIFIC_ERROR)
    return isinstance(error, TimedOut)


@dataclass(frozen=True)
class Reconnect:
    """How a client finds a server, the first time and after a lost connection.

    A round tries each server of the list, beginning with the one that worked last (after it
    stopped answering: with the one behind it). Failed rounds are `first_delay_s` apart, then
    `multiplier` times as long each time up to `delay_max_s`; each delay is shortened at random by
    up to a half, so that clients who lost the same server do not come back in step.
    """

    first_delay_s: float = 0.02
    delay_max_s: float = 5.0
    multiplier: float = 1.5
    """1.5: a delay is about half of the outage so far, so that is the most it adds."""
    attempts_max: int | None = None
    """Rounds without a connection after which the client gives up; None: never."""
    give_up_after_s: float | None = None
    """Time without a connection after which the client gives up; None: never."""
    stable_after_s: float = 5.0
    """A connection that lasted this long starts the delays anew. One that breaks sooner goes on
    with them, so that a server which accepts and drops is not asked in a tight loop."""
    stagger_s: float = 0.25
    """A server that has not accepted the socket after this time is not waited for: the next one
    is tried beside it."""
    connack_timeout_s: float = 0.5
    """A server that accepted the socket but has not answered CONNECT after this time is left if
    another one has accepted, too. Doubles each time, up to `Options.connect_timeout_s`, so that
    slow servers are reached as well."""
    follow_references: bool = True
    """Whether a server's "use another server" and "server moved" may name servers that are not in
    the list."""

    def __post_init__(self) -> None:
        if not 0 < self.first_delay_s <= self.delay_max_s:
            raise ValueError(
                f"delays from {self.first_delay_s} s to {self.delay_max_s} s: the first must be "
                "above 0 and not above the longest"
            )
        if self.multiplier < 1:
            raise ValueError(f"multiplier {self.multiplier}: at least 1")
        if self.attempts_max is not None and self.attempts_max < 1:
            raise ValueError(f"attempts_max {self.attempts_max}: at least 1, or None")
        for name in ("give_up_after_s", "stagger_s", "connack_timeout_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} {value}: above 0")
        if self.stable_after_s < 0:
            raise ValueError(f"stable_after_s {self.stable_after_s}: 0 or more")


ONCE: Final = Reconnect(attempts_max=1)
"""One round: what a client without `reconnect` does."""


class Backoff:
    """The delays between rounds. `random` gives numbers from 0 up to 1."""

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._delay_s = 0.0

    def reset(self) -> None:
        self._delay_s = 0.0

    def next_s(self, policy: Reconnect) -> float:
        """The delay before the next round, half of it fixed and half of it random."""
        delay_s = min(max(self._delay_s, policy.first_delay_s), policy.delay_max_s)
        self._delay_s = delay_s * policy.multiplier
        return delay_s * (1 - 0.5 * self._random())
