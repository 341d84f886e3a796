"""Which server a task publishes to: one after another, until one takes it."""

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

ROUND_FIRST_S: Final = 0.02
ROUND_MAX_S: Final = 5.0
"""Between two rounds through the servers."""
SERVERS_MAX: Final = 64
"""In one round, with those that others named."""


class PublishError(RuntimeError):
    """The task cannot go on. The text says why and what to do."""


class LinkDialer:
    """A round begins with the server that took us last. A connection that ends before a message
    was acknowledged makes the next round wait as a failed one does."""

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

    def connect(self, since: float) -> BrokerLink:
        """`since`: when a message was acknowledged last, of the monotonic clock. Raises
        PublishError."""
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

    def succeeded(self) -> None:
        """A message was acknowledged: the next round need not wait."""
        self._round_s = 0.0

    def avoid(self, server: Server) -> None:
        """It fell silent, and perhaps still accepts: it comes last from now on."""
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
        """Try the servers that this one named, too, in the same round."""
        for server in parse_references(references, origin):
            is_reachable = not server.is_websocket and (self._tls or not server.is_secure)
            if is_reachable and server not in candidates and len(candidates) < SERVERS_MAX:
                candidates.append(server)


def is_transient(error: Exception) -> bool:
    """Whether another attempt may go better."""
    if isinstance(error, ConnectionLost | ConnectionRefused):
        return error.reason in TRANSIENT
    return isinstance(error, TimedOut)
