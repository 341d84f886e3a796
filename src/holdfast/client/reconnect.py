"""Delays a client's attempts to connect, and names the failures that end them."""

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
"""The reasons of CONNACK and DISCONNECT that another attempt may not meet again.

The others say that the client's request is wrong, or that another client has its id. A repetition
would change nothing, and two clients of one id would take the session from each other for ever.
"""


def is_transient(error: ClientError) -> bool:
    """Whether another server, or a later attempt, may succeed."""
    if isinstance(error, ConnectionLost | ConnectionRefused):
        return error.reason in TRANSIENT
    if isinstance(error, SubscribeRefused):
        # Unspecified error is permanent: MQTT 3 has no other code for a filter that is not allowed.
        return error.reason in (reasons.QUOTA_EXCEEDED, reasons.IMPLEMENTATION_SPECIFIC_ERROR)
    return isinstance(error, TimedOut)


@dataclass(frozen=True)
class Reconnect:
    """The policy by which a client finds a server, the first time and after a lost connection.

    A round tries each server of the list, beginning with the one that worked last. If that one
    stopped replying, it begins with the next. Failed rounds are `first_delay_s` apart, then
    `multiplier` times as long each time up to `delay_max_s`. Each delay is shortened at random by
    up to a half, so that clients of the same server do not come back in step.
    """

    first_delay_s: float = 0.02
    delay_max_s: float = 5.0
    multiplier: float = 1.5
    """The growth of the delays. With 1.5 a delay is about half of the outage so far, so that is the
    most it adds."""
    attempts_max: int | None = None
    """The rounds without a connection after which the client gives up; None: never."""
    give_up_after_s: float | None = None
    """The seconds without a connection after which the client gives up; None: never."""
    stable_after_s: float = 5.0
    """The seconds after which a connection resets the delays. One that breaks sooner continues
    them, so that a server that accepts and drops is not tried in a tight loop."""
    stagger_s: float = 0.25
    """The seconds to wait for a socket before the next server is tried beside it."""
    connack_timeout_s: float = 0.5
    """The seconds to wait for CONNACK if another server has accepted its socket, too. It doubles
    each time, up to `Options.connect_timeout_s`, so that slow servers are reached as well."""
    follow_references: bool = True
    """True: "use another server" and "server moved" may name servers that are not in the list."""

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
"""The policy of a client without `reconnect`: one round."""


class Backoff:
    """The delays between rounds. `random` returns numbers from 0 up to 1."""

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._delay_s = 0.0

    def reset(self) -> None:
        """Begins with the first delay again."""
        self._delay_s = 0.0

    def next_s(self, policy: Reconnect) -> float:
        """The seconds before the next round, half of them fixed and half random."""
        delay_s = min(max(self._delay_s, policy.first_delay_s), policy.delay_max_s)
        self._delay_s = delay_s * policy.multiplier
        return delay_s * (1 - 0.5 * self._random())
