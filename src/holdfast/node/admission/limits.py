"""Configured rates, quotas and lock-out, as plain values."""

from typing import Final

from msgspec import Struct, field

CLIENT: Final = "client"
USER: Final = "user"
ADDRESS: Final = "address"
LISTENER: Final = "listener"
SCOPES: Final = (CLIENT, USER, ADDRESS, LISTENER)
"""The scopes of a limit. Everything of one scope and name shares its allowance."""

REFUSE: Final = "refuse"
DISCONNECT: Final = "disconnect"


class RateLimits(Struct):
    """The rates of each client, user, address or listener."""

    messages_per_s: float = 0.0
    bytes_per_s: float = 0.0
    connects_per_s: float = 0.0

    def counts_messages(self) -> bool:
        """Whether messages of the scope are counted."""
        return self.messages_per_s > 0 or self.bytes_per_s > 0


class AdmissionLimits(Struct):
    """All limits of admission."""

    client: RateLimits = field(default_factory=RateLimits)
    user: RateLimits = field(default_factory=RateLimits)
    address: RateLimits = field(default_factory=RateLimits)
    listener: RateLimits = field(default_factory=RateLimits)
    listeners: dict[str, RateLimits] = field(default_factory=dict)
    """The rates of the listeners that have their own, in place of `listener`."""
    over: str = REFUSE
    """The effect of a message above a rate: REFUSE, DISCONNECT or "wait"."""
    burst_s: float = 1.0
    """The seconds of a rate that may come at once."""
    sessions_per_user: int = 0
    bytes_per_user: int = 0
    """The most bytes that a user may publish in `period_s`."""
    period_s: float = 86_400.0
    lockout_failures: int = 0
    """The failed authentications within `lockout_window_s` after which a name is locked out."""
    lockout_window_s: float = 60.0
    lockout_s: float = 300.0
    lockout_scopes: list[str] = field(default_factory=lambda: [ADDRESS])

    def rates_of(self, scope: str, name: str) -> RateLimits:
        """The rates of a name in a scope."""
        if scope == CLIENT:
            return self.client
        if scope == USER:
            return self.user
        return self.address if scope == ADDRESS else self.listeners.get(name, self.listener)

    def _all_rates(self) -> list[RateLimits]:
        return [self.client, self.user, self.address, self.listener, *self.listeners.values()]

    def counts_messages(self) -> bool:
        """Whether any limit counts messages."""
        return self.bytes_per_user > 0 or any(each.counts_messages() for each in self._all_rates())

    def counts_connects(self) -> bool:
        """Whether any limit counts CONNECTs."""
        return any(each.connects_per_s > 0 for each in self._all_rates())
