"""The connections whose CONNECT is not answered yet, and the limits for them.

A stranger pays nothing for such a connection, so the node bounds its cost: bytes per connection,
bytes of all together, connections per address. Without room, the oldest connection that has sent no
CONNECT is closed, so silent connections never keep a client out.
"""

from collections.abc import Iterator
from ipaddress import IPv6Address, IPv6Network
from typing import Final

from holdfast.broker.session.connection import NEW, Connection

CONNECT_FIRST_BYTE: Final = 0x10
"""The first byte of a CONNECT, which has no flags. [MQTT-3.1.0-1] [MQTT-2.1.3-1]"""


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
        # Connections without a complete CONNECT, the oldest first.
        self._silent: dict[Connection, None] = {}
        # The bytes of the CONNECT that waits for its reply.
        self._checking: dict[Connection, int] = {}
        # Bytes that do not form a packet yet, the oldest first.
        self._partial: dict[Connection, int] = {}
        self._by_address: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._silent) + len(self._checking)

    @property
    def silent(self) -> int:
        """The number of connections that have sent no CONNECT."""
        return len(self._silent)

    def is_crowded(self, remote: str) -> bool:
        """Whether the remote's address has as many pending connections as it may have."""
        limit = self.per_address_max
        if len(self) < limit:
            return False
        return limit > 0 and self._by_address.get(address_of(remote), 0) >= limit

    def enter(self, connection: Connection) -> None:
        """Add a connection, which is silent so far."""
        self._silent[connection] = None
        address = address_of(connection.remote)
        self._by_address[address] = self._by_address.get(address, 0) + 1

    def buffer(self, connection: Connection, size_bytes: int) -> None:
        """Count the received bytes of the connection that do not form a packet yet."""
        if connection in self._silent or connection in self._checking:
            self.bytes += size_bytes - self._partial.get(connection, 0)
            if size_bytes:
                # It keeps its position in the order, however slowly it sends.
                self._partial[connection] = size_bytes
            else:
                self._partial.pop(connection, None)

    def receive_connect(self, connection: Connection, size_bytes: int) -> None:
        """Count a complete CONNECT, which is kept until it is answered."""
        if connection in self._silent:
            del self._silent[connection]
            self._checking[connection] = size_bytes
            self.bytes += size_bytes

    def leave(self, connection: Connection) -> None:
        """Remove a connection that is closed or whose CONNECT is answered. Repeated calls do
        nothing."""
        if connection in self._silent:
            del self._silent[connection]
        elif connection in self._checking:
            self.bytes -= self._checking.pop(connection)
        else:
            return
        self.bytes -= self._partial.pop(connection, 0)
        address = address_of(connection.remote)
        left = self._by_address[address] - 1
        if left:
            self._by_address[address] = left
        else:
            del self._by_address[address]

    def checking(self) -> list[Connection]:
        """The connections whose CONNECT is complete and not answered."""
        return list(self._checking)

    def oldest_silent(self) -> Connection | None:
        """The connection to close for another one."""
        return _first(iter(self._silent))

    def oldest_partial(self) -> Connection | None:
        """The connection to close for other connections' bytes."""
        return _first(iter(self._partial))


def _first(connections: Iterator[Connection]) -> Connection | None:
    for connection in connections:
        # A closing connection frees its bytes on its own.
        if connection.state == NEW:
            return connection
    return None
