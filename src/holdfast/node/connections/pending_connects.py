"""Tracks and limits connections whose CONNECT is not answered yet.

A stranger pays nothing for such a connection, so the node bounds its cost: bytes per connection,
bytes of all together, connections per address.

Invariant: a connection that has proved nothing gives way to a newer one in every state: in a TLS
handshake, silent, in an exchange, while its proof is checked. The connections of all listeners are
in one order, the oldest first. Counter-example with an exception for any of these: strangers take
all descriptors in that state, and a client that is known stays out.
"""

from collections.abc import Callable
from ipaddress import IPv6Address, IPv6Network
from typing import Final

from holdfast.node.session.connection import AUTHENTICATING, EXCHANGING, NEW, Connection

CONNECT_FIRST_BYTE: Final = 0x10
"""The first byte of a CONNECT, which has no flags. [MQTT-3.1.0-1] [MQTT-2.1.3-1]"""

UNPROVED: Final = (NEW, EXCHANGING, AUTHENTICATING)
"""The states before a proof. A closing connection frees its bytes and its place on its own."""


def address_of(remote: str) -> str:
    """The address of host:port, as the unit of the limit per peer. For IPv6 it is the first 64
    bits, because a peer may choose the other 64."""
    host = remote.rpartition(":")[0]
    if ":" not in host:
        return host
    try:
        address = IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped
    if mapped is not None:
        return str(mapped)
    return str(IPv6Network((address.packed, 64), strict=False))


class PendingHandshake:
    """A socket below MQTT: in a TLS handshake, or before the header of a proxy."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        """`cancel` closes the socket."""
        self.cancel = cancel


class PendingConnects:
    """The table of connections without an answered CONNECT.

    Invariant: a connection is silent, or its CONNECT is being checked, or it is not in the table.
    `bytes` is the sum of the CONNECTs being checked and of the partial bytes.
    """

    def __init__(self, bytes_max: int, per_address_max: int) -> None:
        """`per_address_max` of 0: no limit."""
        self.bytes_max = bytes_max
        self.per_address_max = per_address_max
        self.bytes = 0
        """The bytes buffered for all connections together, complete CONNECTs included."""
        # Handshakes, and connections that have proved nothing, the oldest first.
        self._unproved: dict[PendingHandshake | Connection, None] = {}
        self._handshakes = 0
        # Connections without a complete CONNECT.
        self._silent: dict[Connection, None] = {}
        # The bytes of the CONNECT that waits for its reply.
        self._checking: dict[Connection, int] = {}
        # Bytes that do not form a packet yet.
        self._partial: dict[Connection, int] = {}
        # Unproved connections with bytes of either kind, the oldest first.
        self._holding: dict[Connection, None] = {}
        self._by_address: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._silent) + len(self._checking)

    @property
    def unproved(self) -> int:
        """The number of connections that have proved nothing, without handshakes."""
        return len(self._unproved) - self._handshakes

    def is_crowded(self, remote: str) -> bool:
        """Whether the remote's address has as many pending connections as it may have."""
        limit = self.per_address_max
        if len(self) < limit:
            return False
        return limit > 0 and self._by_address.get(address_of(remote), 0) >= limit

    def enter(self, connection: Connection) -> None:
        """Adds a connection, which is silent so far."""
        self._silent[connection] = self._unproved[connection] = None
        address = address_of(connection.remote)
        self._by_address[address] = self._by_address.get(address, 0) + 1

    def buffer(self, connection: Connection, size_bytes: int) -> None:
        """Counts the received bytes of the connection that do not form a packet yet."""
        if connection in self._silent or connection in self._checking:
            self.bytes += size_bytes - self._partial.get(connection, 0)
            if size_bytes:
                self._partial[connection] = size_bytes
                if connection in self._unproved:
                    # It keeps its position in the order, however slowly it sends.
                    self._holding[connection] = None
            else:
                self._partial.pop(connection, None)
                if connection in self._silent:
                    self._holding.pop(connection, None)

    def receive_connect(self, connection: Connection, size_bytes: int) -> None:
        """Counts a complete CONNECT, which is kept until it is answered."""
        if connection in self._silent:
            del self._silent[connection]
            self._checking[connection] = size_bytes
            self._holding[connection] = None
            self.bytes += size_bytes

    def note_proof(self, connection: Connection) -> None:
        """Notes that the client is admitted, so that its connection gives way no more."""
        self._unproved.pop(connection, None)
        self._holding.pop(connection, None)

    def begin_handshake(self, handshake: PendingHandshake) -> None:
        """Adds a handshake."""
        self._unproved[handshake] = None
        self._handshakes += 1

    def end_handshake(self, handshake: PendingHandshake) -> None:
        """Removes a handshake. Repeated calls do nothing."""
        if handshake in self._unproved:
            del self._unproved[handshake]
            self._handshakes -= 1

    def leave(self, connection: Connection) -> None:
        """Removes a connection that is closed or whose CONNECT is answered. Repeated calls do
        nothing."""
        self.note_proof(connection)
        if connection in self._silent:
            del self._silent[connection]
        elif connection in self._checking:
            self.bytes -= self._checking.pop(connection)
        else:
            return
        self.bytes -= self._partial.pop(connection, 0)
        assert self.bytes >= 0, "fewer bytes are buffered than none"
        address = address_of(connection.remote)
        left = self._by_address[address] - 1
        if left:
            self._by_address[address] = left
        else:
            del self._by_address[address]

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold."""
        assert self.bytes == sum(self._checking.values()) + sum(self._partial.values())
        assert not self._silent.keys() & self._checking.keys(), "silent and checked"
        assert sum(self._by_address.values()) == len(self), "the counts of the addresses"
        handshakes = [each for each in self._unproved if isinstance(each, PendingHandshake)]
        assert self._handshakes == len(handshakes), "the number of handshakes"
        assert self._holding.keys() <= self._unproved.keys(), "a known client gives way"

    def checking(self) -> list[Connection]:
        """The connections whose CONNECT is complete and not answered."""
        return list(self._checking)

    def oldest(self) -> PendingHandshake | Connection | None:
        """The handshake or connection to close for another one."""
        for each in self._unproved:
            if isinstance(each, PendingHandshake) or each.state in UNPROVED:
                return each
        return None

    def oldest_holder(self) -> Connection | None:
        """The connection to close for other connections' bytes."""
        for each in self._holding:
            if each.state in UNPROVED:
                return each
        return None
