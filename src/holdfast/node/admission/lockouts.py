"""Lock-outs: names that may not connect for a time after failed authentications, and their count.

Lock-outs live in memory: a restart ends them, and each node of a cluster has its own. They are
apart from bans, because a stranger can cause any number of them, and must displace no ban.
"""

from typing import Final

from msgspec import Struct

LOCKOUTS_MAX: Final = 100_000
"""The most lock-outs. Above it the oldest one ends."""
FAILURES_MAX: Final = 100_000
"""The most names whose failed authentications are counted. Above it the longest unseen is
forgotten."""


class LockedName(Struct, frozen=True):
    """One lock-out. `until`: the monotonic time of its end in seconds."""

    scope: str
    name: str
    until: float
    reason: str

    def text(self, now: float) -> str:
        """The lock-out in words, for the client."""
        left_s = max(1, round(self.until - now))
        return f"this {self.scope} is banned for {left_s} s: {self.reason}"


class LockoutTable:
    """The lock-outs by scope and name."""

    def __init__(self) -> None:
        self._lockouts: dict[tuple[str, str], LockedName] = {}

    def __len__(self) -> int:
        return len(self._lockouts)

    def add(self, lockout: LockedName) -> None:
        """Adds a lock-out, or replaces the one of its name."""
        table = self._lockouts
        table.pop((lockout.scope, lockout.name), None)
        if len(table) >= LOCKOUTS_MAX:
            del table[next(iter(table))]
        table[(lockout.scope, lockout.name)] = lockout

    def lift(self, scope: str, name: str) -> bool:
        """Ends the lock-out of a name. False: there was none."""
        return self._lockouts.pop((scope, name), None) is not None

    def find(self, scope: str, name: str, now: float) -> LockedName | None:
        """The lock-out of a name, or None. One that has ended is dropped."""
        lockout = self._lockouts.get((scope, name))
        if lockout is None or lockout.until > now:
            return lockout
        del self._lockouts[(scope, name)]
        return None

    def names(self) -> list[tuple[str, str]]:
        """The scope and name of each lock-out, ended ones included."""
        return list(self._lockouts)

    def get(self, scope: str, name: str) -> LockedName | None:
        """The lock-out of a name, ended or not."""
        return self._lockouts.get((scope, name))


class FailureCount:
    """The failed authentications of each name within a window of time."""

    def __init__(self) -> None:
        # (begin of the window, failures), the longest unseen first.
        self._counts: dict[tuple[str, str], tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, scope: str, name: str, window_s: float, now: float) -> int:
        """Counts a failure, and returns the number within the window."""
        key = (scope, name)
        begin, count = self._counts.pop(key, (now, 0))
        if now - begin > window_s:
            begin, count = now, 0
        if len(self._counts) >= FAILURES_MAX:
            del self._counts[next(iter(self._counts))]
        self._counts[key] = (begin, count + 1)
        return count + 1

    def forget(self, scope: str, name: str) -> None:
        """Forgets the failures of a name, because it is locked out now."""
        self._counts.pop((scope, name), None)
