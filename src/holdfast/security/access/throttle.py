"""Throttles logins, by address and by user."""

from ipaddress import IPv6Address, ip_address
from typing import Final

ADDRESS_ATTEMPTS: Final = 5
"""The attempts that an address has at once. It regains one every ADDRESS_REGAIN_S."""
ADDRESS_REGAIN_S: Final = 10.0
USER_ATTEMPTS: Final = 30
"""The attempts for one user from all addresses together."""
USER_REGAIN_S: Final = 2.0
KEYS_MAX: Final = 4096
"""The most addresses, and the most users, that are tracked. The oldest one is forgotten first."""


class Buckets:
    """The attempts left, by key."""

    def __init__(self, most: int, regain_s: float) -> None:
        self._most = most
        self._regain_s = regain_s
        # Key -> (attempts left, time of that), the least recently used first.
        self._left: dict[str, tuple[float, float]] = {}

    def left(self, key: str, now_s: float) -> float:
        """The attempts left, a fraction of one included."""
        attempts, since_s = self._left.get(key, (float(self._most), now_s))
        return min(float(self._most), attempts + max(0.0, now_s - since_s) / self._regain_s)

    def set(self, key: str, left: float, now_s: float) -> None:
        self._left.pop(key, None)
        if left >= self._most:
            return
        if len(self._left) >= KEYS_MAX:
            del self._left[next(iter(self._left))]
        self._left[key] = (left, now_s)

    def take(self, key: str, now_s: float) -> bool:
        """Counts an attempt. Returns False if none was left."""
        left = self.left(key, now_s)
        if left >= 1.0:
            self.set(key, left - 1.0, now_s)
        return left >= 1.0

    def wait_s(self, left: float) -> float:
        """The seconds until a whole attempt is left."""
        return max(0.0, 1.0 - left) * self._regain_s


class LoginThrottle:
    """The attempts of logins.

    Invariant: an attempt counts before its password is checked, and a right one is given back.
    Counter-example: counting afterwards lets a thousand attempts begin at once.
    """

    def __init__(self) -> None:
        self._addresses = Buckets(ADDRESS_ATTEMPTS, ADDRESS_REGAIN_S)
        self._users = Buckets(USER_ATTEMPTS, USER_REGAIN_S)

    def begin(self, remote: str, user: str, now_s: float) -> float:
        """Counts an attempt. Returns 0, or the seconds to wait for the next one."""
        wait_s = 0.0
        found = []
        for buckets, key in ((self._addresses, network_of(remote)), (self._users, user)):
            left = buckets.left(key, now_s)
            found.append((buckets, key, left))
            if left < 1.0:
                wait_s = max(wait_s, buckets.wait_s(left))
        if wait_s:
            return wait_s
        for buckets, key, left in found:
            buckets.set(key, left - 1.0, now_s)
        return 0.0

    def succeeded(self, remote: str, user: str, now_s: float) -> None:
        """Gives a right attempt back."""
        for buckets, key in ((self._addresses, network_of(remote)), (self._users, user)):
            buckets.set(key, buckets.left(key, now_s) + 1.0, now_s)


def network_of(remote: str) -> str:
    """The address, or of IPv6 its /64 network, because one host has all of it."""
    try:
        address = ip_address(remote.partition("%")[0])
    except ValueError:
        return remote
    if not isinstance(address, IPv6Address):
        return remote
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Address(int(address) >> 64 << 64))
