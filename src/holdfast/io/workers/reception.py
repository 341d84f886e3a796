"""Receives clients in a worker."""

import asyncio
import logging

from holdfast.config.listener import Listener
from holdfast.io.sockets.reception import Reception
from holdfast.io.workers.relays import BrokerChannel, Relay
from holdfast.node.connections.pending_connects import PendingHandshake


class WorkerReception(Reception):
    """The reception of one listener in a worker. The broker admits or cuts each connection; here
    only the process's descriptors are bounded."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connect_timeout_s: float,
        broker: BrokerChannel,
        number: int,
        settings: Listener,
    ) -> None:
        super().__init__(loop, connect_timeout_s)
        self._broker = broker
        self._number = number
        self._settings = settings

    def new_connection(self, remote: str = "") -> Relay:
        return Relay(self._broker, self._number, self._settings, remote)

    def has_room(self, remote: str) -> bool:
        return self._broker.has_room(remote, self._settings.name)

    def begin_handshake(self, handshake: PendingHandshake) -> None:
        self._broker.begin_handshake(handshake)

    def end_handshake(self, handshake: PendingHandshake) -> None:
        self._broker.end_handshake(handshake)

    def count_failure(self) -> None:
        self._broker.note(0, "handshake_failed")

    def note_failure(self, event: str, remote: str, error: str) -> None:
        self._broker.note(
            logging.INFO, event, remote=remote, listener=self._settings.name, error=error
        )
