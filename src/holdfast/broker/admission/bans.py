"""Bans: clients, users and addresses that may not connect for a time, and the count of failed
authentications that leads to one.

A ban is of one name in one scope. It ends on its own, or is lifted. Bans live in memory: they do
not survive the process, and each node of a cluster has its own.
"""

from dataclasses import dataclass
from typing import Final

BANS_MAX: Final = 100_000
"""The most bans of operators, and the most lock-outs. Above it the oldest of its kind ends."""
FAILURES_MAX: Final = 100_000
"""The most names whose failed authentications are counted. Above it the longest unseen is
forgotten."""


@dataclass(frozen=True)
class Ban:
    """One ban. `until`: the monotonic time of its end in seconds. `is_lockout`: failed
    authentications caused it, not an operator."""

    scope: str
    name: str
    until: float
    reason: str
    is_lockout: bool = False


class BanTable:
    """The present bans by scope and name. Lock-outs are apart, because a stranger can cause any
    number of them, and must not displace an operator's ban."""

    def __init__(self) -> None:
        self._bans: dict[tuple[str, str], Ban] = {}
        self._lockouts: dict[tuple[str, str], Ban] = {}

    def __len__(self) -> int:
        return len(self._bans) + len(self._lockouts)

    def add(self, ban: Ban) -> None:
        """Add a ban, or replace the one of the same name and kind."""
        table = self._lockouts if ban.is_lockout else self._bans
        table.pop((ban.scope, ban.name), None)
        if len(table) >= BANS_MAX:
            del table[next(iter(table))]
        table[(ban.scope, ban.name)] = ban

    def lift(self, scope: str, name: str) -> bool:
        """End the bans of a name. False: there was none."""
        ban = self._bans.pop((scope, name), None)
        lockout = self._lockouts.pop((scope, name), None)
        return ban is not None or lockout is not None

    def find(self, scope: str, name: str, now: float) -> Ban | None:
        """The ban of a name, or None. One that has ended is dropped."""
        for table in (self._bans, self._lockouts):
            ban = table.get((scope, name))
            if ban is None:
                continue
            if ban.until > now:
                return ban
            del table[(scope, name)]
        return None

    def present(self, now: float) -> list[Ban]:
        """The bans, those that end first first."""
        for table in (self._bans, self._lockouts):
            for key in [key for key, ban in table.items() if ban.until <= now]:
                del table[key]
        bans = [*self._bans.values(), *self._lockouts.values()]
        return sorted(bans, key=lambda each: each.until)


class FailureCount:
    """The failed authentications of each name within a window of time."""

    def __init__(self) -> None:
        # (begin of the window, failures), the longest unseen first.
        self._counts: dict[tuple[str, str], tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, scope: str, name: str, window_s: float, now: float) -> int:
        """Count a failure, and return the number within the window."""
        key = (scope, name)
        begin, count = self._counts.pop(key, (now, 0))
        if now - begin > window_s:
            begin, count = now, 0
        if len(self._counts) >= FAILURES_MAX:
            del self._counts[next(iter(self._counts))]
        self._counts[key] = (begin, count + 1)
        return count + 1

    def forget(self, scope: str, name: str) -> None:
        """Forget the failures of a name, because it is locked out now."""
        self._counts.pop((scope, name), None)
