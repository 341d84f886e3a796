"""The connections whose CONNECT is not answered yet, and the bounds on them.

A stranger pays nothing for such a connection, so the node bounds what it costs: bytes per
connection, bytes of all together, connections per address. Where there is no room, the oldest
connection that has sent no CONNECT makes room: silent connections never keep a client out.
"""

from collections.abc import Iterator
from ipaddress import IPv6Address
from typing import Final

from holdfast.broker.session.connection import NEW, Connection

CONNECT_FIRST_BYTE: Final = 0x10
"""[MQTT-3.1.0-1] [MQTT-2.1.3-1] CONNECT has no flags."""


def address_of(remote: str) -> str:
    """The address of host:port, for what one peer may have. Of IPv6 the first 64 bits: the other
    64 are the peer's own to choose."""
    host = remote.rpartition(":")[0]
    if ":" not in host:
        return host
    try:
        address = IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped
    return f"{int(address) >> 64:x}::/64" if mapped is None else str(mapped)


class PendingConnects:
    def __init__(self, bytes_max: int, per_address_max: int) -> None:
        """`per_address_max` of 0: no limit."""
        self.bytes_max = bytes_max
        self.per_address_max = per_address_max
        self.bytes = 0
        """Buffered for all of them, complete CONNECTs included."""
        # Nothing has arrived that is a whole CONNECT; the oldest first.
        self._silent: dict[Connection, None] = {}
        # The size of the CONNECT that waits for its answer.
        self._checking: dict[Connection, int] = {}
        # Bytes that no packet is made of yet, the oldest first.
        self._partial: dict[Connection, int] = {}
        self._by_address: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._silent) + len(self._checking)

    @property
    def silent(self) -> int:
        """The connections that have sent no CONNECT."""
        return len(self._silent)

    def is_crowded(self, remote: str) -> bool:
        """True if the remote's address has as many pending connections as it may have."""
        limit = self.per_address_max
        return limit > 0 and self._by_address.get(address_of(remote), 0) >= limit

    def enter(self, connection: Connection) -> None:
        self._silent[connection] = None
        address = address_of(connection.remote)
        self._by_address[address] = self._by_address.get(address, 0) + 1

    def buffer(self, connection: Connection, size_bytes: int) -> None:
        """So many bytes of the connection have arrived that no packet is made of yet."""
        if connection in self._silent or connection in self._checking:
            self.bytes += size_bytes - self._partial.get(connection, 0)
            if size_bytes:
                # Keeps its place in the order, however slowly it sends.
                self._partial[connection] = size_bytes
            else:
                self._partial.pop(connection, None)

    def receive_connect(self, connection: Connection, size_bytes: int) -> None:
        """A complete CONNECT has arrived, and is kept until it is answered."""
        if connection in self._silent:
            del self._silent[connection]
            self._checking[connection] = size_bytes
            self.bytes += size_bytes

    def leave(self, connection: Connection) -> None:
        """The CONNECT is answered, or the connection is closed. May be called again."""
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

    def oldest_silent(self) -> Connection | None:
        """The connection that makes room for another one."""
        return _first(iter(self._silent))

    def oldest_partial(self) -> Connection | None:
        """The connection that makes room for other connections' bytes."""
        return _first(iter(self._partial))


def _first(connections: Iterator[Connection]) -> Connection | None:
    for connection in connections:
        # One that is being closed frees what it has without us.
        if connection.state == NEW:
            return connection
    return None
