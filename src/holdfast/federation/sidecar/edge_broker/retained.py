"""Reads a broker's retained messages in pieces, so that its clients do not wait."""

import logging
from collections.abc import Callable
from typing import Final

from holdfast.federation.core.effects import Message
from holdfast.io.event_loop.broker import Broker
from holdfast.node.session.message import Message as BrokerMessage
from holdfast.protocol.topics.retained import RetainedScan

logger = logging.getLogger("holdfast")

PAGE: Final = 200
"""The most messages read in one turn of the loop."""
MESSAGES_MAX: Final = 100_000
BYTES_MAX: Final = 64 << 20
"""The limits of one scan. Messages beyond either limit are left out, and that is logged."""

Convert = Callable[[BrokerMessage], Message | None]
Done = Callable[[list[Message]], None]


class BrokerRetainedScan:
    """One scan of a broker's retained store under several filters."""

    def __init__(self, broker: Broker, convert: Convert) -> None:
        """`convert`: returns None for a message to leave out."""
        self._broker = broker
        self._convert = convert
        self._found: dict[str, Message] = {}
        self._bytes = 0

    def start(self, filters: list[str], done: Done) -> None:
        """Begins the scan; `done` is called in a later turn of the loop."""
        scans = [self._broker.node.state.retained.scan(filter) for filter in filters]
        self._broker.loop.call_soon(self._continue, scans, done)

    def _continue(self, scans: list[RetainedScan[BrokerMessage]], done: Done) -> None:
        if self._is_full() and scans:
            logger.warning("federation_retained_left_out messages=%d", len(self._found))
            scans = []
        if not scans:
            done(list(self._found.values()))
            return
        for topic, message in scans[0].next(PAGE):
            found = None if topic in self._found else self._convert(message)
            if found is not None:
                self._found[topic] = found
                self._bytes += len(found.payload) + len(found.properties) + len(topic)
        if scans[0].done:
            scans = scans[1:]
        self._broker.loop.call_soon(self._continue, scans, done)

    def _is_full(self) -> bool:
        return len(self._found) >= MESSAGES_MAX or self._bytes >= BYTES_MAX
