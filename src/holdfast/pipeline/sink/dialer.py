"""Chooses the server that a task publishes to: one after another, until one accepts."""

import logging
import ssl
import time
from collections.abc import Sequence
from random import random
from typing import Final

from holdfast.client.errors import ClientError, ConnectionLost, ConnectionRefused, TimedOut
from holdfast.client.options import Options
from holdfast.client.reconnect import TRANSIENT
from holdfast.client.servers import Server, parse_references
from holdfast.pipeline.sink.link import BrokerLink, open_link

logger = logging.getLogger("holdfast.pipeline")

ROUND_FIRST_S: Final = 0.02
ROUND_MAX_S: Final = 5.0
"""The longest pause in seconds between two rounds through the servers. The first is
ROUND_FIRST_S."""
SERVERS_MAX: Final = 64
"""The most servers in one round, including those that other servers named."""


class PublishError(RuntimeError):
    """The task cannot continue. The text says why and what to do."""


class LinkDialer:
    """The dialer of one task. A round begins with the server that accepted last.

    The pause before a round grows until a message is acknowledged. So a connection that ends before
    any acknowledgement counts like a failed one, and a server that accepts and disconnects is not
    called in a tight loop.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        options: Options,
        tls: ssl.SSLContext | None,
        server_name: str | None,
        retry_timeout_s: float,
    ) -> None:
        self._servers = list(servers)
        self._options = options
        self._tls = tls
        self._server_name = server_name
        self._retry_timeout_s = retry_timeout_s
        self._round_s = 0.0
        self._is_told = False
        """True after a warning that no server accepts."""

    def connect(self, since: float) -> BrokerLink:
        """Connects to the first server that accepts.

        `since` is the time of the last acknowledgement, on the monotonic clock. Raises
        PublishError.
        """
        while True:
            if self._round_s:
                time.sleep(self._round_s * (0.5 + 0.5 * random()))
            self._round_s = min(max(self._round_s * 2, ROUND_FIRST_S), ROUND_MAX_S)
            errors: list[ClientError] = []
            link = self._try_servers(errors)
            if link is not None:
                return link
            text = "; ".join(map(str, errors))
            if not any(map(is_transient, errors)):
                raise PublishError(text)
            stuck_s = time.monotonic() - since
            if stuck_s > self._retry_timeout_s:
                raise PublishError(f"no connection for {stuck_s:.0f} s (retryTimeout): {text}")
            if not self._is_told:
                self._is_told = True
                logger.warning("%s; trying for %g s", text, self._retry_timeout_s)

    def succeeded(self) -> None:
        """Notes that a message was acknowledged: the next round begins without a pause."""
        self._round_s = 0.0
        self._is_told = False

    def avoid(self, server: Server) -> None:
        """Moves a silent server to the end. It may still accept connections."""
        self._servers.remove(server)
        self._servers.append(server)

    def _try_servers(self, errors: list[ClientError]) -> BrokerLink | None:
        candidates = list(self._servers)
        for server in candidates:
            try:
                link = open_link(server, self._options, self._tls, self._server_name)
            except ClientError as error:
                errors.append(error)
                self._follow(candidates, error.server_reference, server)
                continue
            if server in self._servers:
                self._servers.remove(server)
            self._servers.insert(0, server)
            return link
        return None

    def _follow(self, candidates: list[Server], references: str, origin: Server) -> None:
        """Adds the servers that a refusal named to the current round."""
        for server in parse_references(references, origin):
            is_reachable = not server.is_websocket and (self._tls or not server.is_secure)
            if is_reachable and server not in candidates and len(candidates) < SERVERS_MAX:
                candidates.append(server)


def is_transient(error: Exception) -> bool:
    """Returns whether another attempt may succeed."""
    if isinstance(error, ConnectionLost | ConnectionRefused):
        return error.reason in TRANSIENT
    return isinstance(error, TimedOut)
