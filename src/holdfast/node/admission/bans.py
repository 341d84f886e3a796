"""Bans: clients, users, addresses and networks that an operator keeps from connecting.

A ban is of one name in one scope. It ends at a time of the wall clock, or when an operator lifts
it. The table is a part of the recorded state: a ban is a record in the log, so a restart keeps it,
and each node of a cluster has the same (`node.state.ban_records`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

from holdfast.node.admission.limits import ADDRESS

BANS_MAX: Final = 100_000
"""The most bans. One more is refused."""
SWEPT: Final = 4
"""The bans that are looked at for each one added, so that ended ones do not gather."""
IPV6_UNIT: Final = 64
"""The longest prefix of an IPv6 ban, because a peer may choose the other 64 bits."""


class BadBanName(ValueError):
    """A name that cannot be banned. The text says what is allowed."""


@dataclass(frozen=True)
class Ban:
    """One ban. Times are in microseconds since 1970."""

    scope: str
    """client, user or address."""
    name: str
    until_us: int
    """The end; 0: when it is lifted."""
    reason: str = ""
    by: str = ""
    """The operator, as the audit names callers."""
    since_us: int = 0

    def is_over(self, wall_us: int) -> bool:
        """Whether the ban has ended."""
        return 0 < self.until_us <= wall_us

    def text(self, wall_us: int) -> str:
        """The ban in words, for the client and the log."""
        left = ""
        if self.until_us:
            left = f" for {max(1, round((self.until_us - wall_us) / 1e6))} s"
        return f"this {self.scope} is banned{left}" + (f": {self.reason}" if self.reason else "")


class BanTable:
    """The bans by scope and name."""

    def __init__(self) -> None:
        self._bans: dict[tuple[str, str], Ban] = {}
        # Names that the present round of the sweep has not looked at.
        self._unswept: list[tuple[str, str]] = []
        # The number of banned networks by IP version and prefix length.
        self._networks: dict[tuple[int, int], int] = {}
        self.watch: Callable[[], None] | None = None
        """Called when a ban was added."""

    def __len__(self) -> int:
        return len(self._bans)

    def put(self, ban: Ban, wall_us: int) -> None:
        """Adds a ban, or replaces the one of its name."""
        # Without a sweep, bans that nobody looks up would gather when a log of years is read.
        if not self._unswept:
            self._unswept = list(self._bans)
        for _ in range(min(SWEPT, len(self._unswept))):
            oldest = self._bans.get(self._unswept.pop())
            if oldest is not None and oldest.is_over(wall_us):
                self.lift(oldest.scope, oldest.name)
        self.lift(ban.scope, ban.name)
        self._bans[(ban.scope, ban.name)] = ban
        self._count_network(ban, 1)
        if self.watch is not None:
            self.watch()

    def lift(self, scope: str, name: str) -> Ban | None:
        """Removes the ban of a name and returns it; None: there was none."""
        ban = self._bans.pop((scope, name), None)
        if ban is not None:
            self._count_network(ban, -1)
        return ban

    def find(self, scope: str, name: str, wall_us: int) -> Ban | None:
        """The ban of a name, or None. That of an address may be of a network around it."""
        ban = self._present(scope, name, wall_us)
        if ban is not None or scope != ADDRESS or not self._networks:
            return ban
        for network in self._networks_around(name):
            ban = self._present(ADDRESS, network, wall_us)
            if ban is not None:
                return ban
        return None

    def names(self) -> list[tuple[str, str]]:
        """The scope and name of each ban, ended ones included."""
        return list(self._bans)

    def get(self, scope: str, name: str) -> Ban | None:
        """The ban of exactly this name, ended or not."""
        return self._bans.get((scope, name))

    def _present(self, scope: str, name: str, wall_us: int) -> Ban | None:
        ban = self._bans.get((scope, name))
        return None if ban is None or ban.is_over(wall_us) else ban

    def _count_network(self, ban: Ban, change: int) -> None:
        if ban.scope != ADDRESS or "/" not in ban.name:
            return
        try:
            network = ip_network(ban.name)
        except ValueError:
            return  # Of a damaged record: it bans nobody.
        kind = (network.version, network.prefixlen)
        left = self._networks.get(kind, 0) + change
        if left > 0:
            self._networks[kind] = left
        else:
            self._networks.pop(kind, None)

    def _networks_around(self, name: str) -> Iterator[str]:
        """The networks with an address, of the lengths that are banned."""
        try:
            address = ip_address(name.partition("/")[0])
        except ValueError:
            return
        for version, length in self._networks:
            if version == address.version:
                bits = address.max_prefixlen - length
                yield f"{type(address)(int(address) >> bits << bits)}/{length}"


def ban_address(text: str) -> str:
    """The name under which an address or network is banned: 192.0.2.7, 192.0.2.0/24 or
    2001:db8::/64. An IPv6 address stands for its /64. Raises `BadBanName`."""
    try:
        if "/" not in text:
            address: IPv4Address | IPv6Address = ip_address(text)
            if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
                return str(IPv6Network((address.packed, IPV6_UNIT), strict=False))
            return str(getattr(address, "ipv4_mapped", None) or address)
        network: IPv4Network | IPv6Network = ip_network(text)
    except ValueError as error:
        allowed = "an address like 192.0.2.7, or a network like 192.0.2.0/24 or 2001:db8::/48"
        raise BadBanName(f"{error}: {allowed}") from None
    if network.version == 4 and network.prefixlen == 32:
        return str(network.network_address)
    if network.version == 6 and network.prefixlen > IPV6_UNIT:
        raise BadBanName(f"{text!r}: an IPv6 ban is of a /64 or more, because a client chooses"
                         " the other 64 bits of its address")  # fmt: skip
    return str(network)
