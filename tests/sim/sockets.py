"""The connection of a client to a node: bytes in order, in pieces of any size, late, or lost with
the connection."""

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from holdfast.node.session.connection import Connection
from holdfast.protocol.mqtt.packets import PUBACK, PUBREC
from tests.sim.process import Process
from tests.sim.schedule import Work

if TYPE_CHECKING:
    from tests.sim.host import Host


ACKNOWLEDGING: Final = (PUBACK << 4, PUBREC << 4)


class SocketUser(Protocol):
    def received(self, socket: "ClientSocket", data: bytes) -> None: ...

    def closed(self, socket: "ClientSocket") -> None:
        """By the node, or with it."""

    def refused(self, packet_id: int) -> None:
        """The node has said so; the client may never hear of it."""


class ClientSocket:
    def __init__(self, user: SocketUser, host: "Host") -> None:
        assert host.process is not None
        self.user = user
        self.host = host
        self.process: Process = host.process
        self.schedule = host.schedule
        self._chance = host.world.client_chance
        self._connection: Connection | None = None
        self.is_open = True
        """For the client."""
        self.is_abandoned = False
        """The client is elsewhere; what still comes is looked at all the same."""
        self._node_closed = False
        self.ended_at = float("inf")
        """The node has sent the last thing then."""
        self._up_at = 0.0
        self._down_at = 0.0
        # What has arrived while the node wanted no input.
        self._waiting: deque[bytes] = deque()
        self._send(self._accept)

    # The client's side

    def write(self, data: bytes) -> None:
        if not self.is_open:
            return
        chance = self._chance
        if len(data) > 1 and chance.random() < 0.1:
            cut = chance.randrange(1, len(data))
            self._send(partial(self._arrived, data[:cut]))
            data = data[cut:]
        self._send(partial(self._arrived, data))

    def close(self, *, after_s: float = 0.0) -> None:
        """The client hears nothing more; the node sees it when all sent before has arrived, or
        after a while."""
        self.is_open = False
        self._up_at += after_s
        self._send(self._gone)

    def abandon(self, after_s: float) -> None:
        """The client connects anew; the node finds out after a while."""
        self.is_abandoned = True
        self.close(after_s=after_s)

    def vanish(self) -> None:
        """What the client has sent is lost too, if it has not arrived."""
        self.is_open = False
        process = self.process
        self.schedule.after(self._chance.random() * 0.5, lambda: process.post(self._gone_now))
        self._node_closed = True

    def _send(self, work: Work) -> None:
        self._up_at = max(self._up_at, self.schedule.now + 0.0001 + self._chance.random() * 0.001)
        process = self.process
        self.schedule.at(self._up_at, lambda: process.post(work))

    # The node's side

    def _accept(self) -> None:
        if not self._node_closed:
            self._connection = self.process.accept(self)

    def _arrived(self, data: bytes) -> None:
        connection = self._connection
        if connection is None or self._node_closed:
            return
        if connection.input_paused:
            self._waiting.append(data)
            return
        self.process.received(connection, data)

    def resume(self) -> None:
        connection = self._connection
        assert connection is not None
        while self._waiting and not connection.input_paused and not self._node_closed:
            self.process.received(connection, self._waiting.popleft())

    def flush(self) -> None:
        connection = self._connection
        assert connection is not None
        if connection.out:
            for packet in connection.out:
                if packet[0] in ACKNOWLEDGING and packet[1] >= 3 and packet[4] >= 0x80:
                    self.user.refused(packet[2] << 8 | packet[3])
            data = b"".join(connection.out)
            connection.out = None
            connection.out_bytes = 0
            self._down(lambda: self._to_client(data))
        if connection.closing and not self._node_closed:
            self._node_closed = True
            self.ended_at = self.schedule.now
            self._down(self._closed)
            self.process.later(0.0, lambda: self.process.client_gone(connection))

    def _gone(self) -> None:
        connection = self._connection
        if connection is None or self._node_closed:
            return
        if self._waiting and connection.input_paused:
            # A closed socket is seen when it is read again.
            self.process.later(0.05, self._gone)
            return
        self._gone_now()

    def _gone_now(self) -> None:
        if self._connection is not None:
            self._node_closed = True
            self.ended_at = min(self.ended_at, self.schedule.now)
            self.process.client_gone(self._connection)

    def node_ended(self) -> None:
        self._node_closed = True
        self.ended_at = min(self.ended_at, self.schedule.now)
        self._down(self._closed)

    def _down(self, work: Work) -> None:
        self._down_at = max(
            self._down_at, self.schedule.now + 0.0001 + self._chance.random() * 0.001
        )
        self.schedule.at(self._down_at, work)

    def _to_client(self, data: bytes) -> None:
        if self.is_open or self.is_abandoned:
            self.user.received(self, data)

    def _closed(self) -> None:
        if self.is_open:
            self.is_open = False
            self.user.closed(self)
