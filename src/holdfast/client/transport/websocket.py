"""Client's half of MQTT over WebSocket. MQTT 5.0, section 6; RFC 6455, section 4.1."""

import asyncio
import logging
from re import fullmatch
from typing import Final, cast

from websockets.client import ClientProtocol
from websockets.protocol import OPEN
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from holdfast.protocol.websocket.errors import WebSocketError
from holdfast.protocol.websocket.stream import WebSocketStream

PATH: Final = "/mqtt"
UPGRADE_TIMEOUT_S: Final = 10.0
"""The seconds from the connection (TLS included) to the server's reply."""
TEXT_CHARACTERS_MAX: Final = 200
"""The most characters of a refusal's text in an error."""
SUBPROTOCOL: Final = Subprotocol("mqtt")

logger = logging.getLogger("holdfast.client.websocket")


def websocket_protocol_factory(
    inner: asyncio.Protocol,
    host: str,
    port: int,
    path: str = PATH,
    timeout_s: float = UPGRADE_TIMEOUT_S,
) -> asyncio.Protocol:
    """A protocol for loop.create_connection, with or without TLS, that upgrades the connection to a
    WebSocket and then drives `inner` as a socket would.

    `path` may have a query; an invalid one raises `ValueError`. `inner.connection_made` is called
    once the WebSocket is open. If it does not open there is only `inner.connection_lost`, with a
    WebSocketError that has the reason. `timeout_s`: the seconds until the server's reply.
    """
    if not fullmatch(r'/[!"$-~]*', path):
        raise ValueError(
            f"WebSocket path {path!r}: must begin with a slash and be of printable ASCII without"
            " blanks and #; write others as %20 or the like"
        )
    # It has the methods of a protocol, but not the base class.
    return cast(asyncio.Protocol, _ClientStream(inner, host, port, path, timeout_s))


class _ClientStream(WebSocketStream):
    def __init__(
        self, inner: asyncio.Protocol, host: str, port: int, path: str, timeout_s: float
    ) -> None:
        super().__init__(inner, is_client=True)
        self._timeout_s = timeout_s
        self._host = host
        self._port = port
        self._path = path
        self._upgrade: ClientProtocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        secure = transport.get_extra_info("sslcontext") is not None
        path, _, query = self._path.partition("?")
        upgrade = ClientProtocol(
            WebSocketURI(secure, self._host, self._port, path, query),
            subprotocols=[SUBPROTOCOL],  # [MQTT-6.0.0-3]
            logger=logger,
        )
        upgrade.send_request(upgrade.connect())
        self.socket.write(b"".join(upgrade.data_to_send()))
        self._upgrade = upgrade
        self._start_timer(self._timeout_s, self._too_late)

    def connection_lost(self, error: Exception | None) -> None:
        if self._upgrade is not None and self._error is None:
            text = "the connection was closed before the WebSocket was open"
            self._error = WebSocketError(text if error is None else f"{text}: {error}")
        super().connection_lost(error)

    def read_upgrade(self, head: bytes, rest: bytes) -> None:
        upgrade = self._upgrade
        assert upgrade is not None
        text = _refusal(head, rest)
        if not text:
            upgrade.receive_data(head)
            if upgrade.state is not OPEN:
                text = f"no answer to a WebSocket's request: {upgrade.handshake_exc}"
            elif upgrade.subprotocol != SUBPROTOCOL:
                text = "the server did not choose the subprotocol mqtt: there is no MQTT here"
        if text:
            self.refuse(WebSocketError(f"{self._path}: {text}"))
            return
        self._upgrade = None
        self._stop_timer()
        self.opened(rest)

    def refuse_upgrade(self, text: str, too_long: bool) -> None:
        self.refuse(WebSocketError(f"{text}: the server does not speak WebSocket"))

    def _too_late(self) -> None:
        text = f"no answer to the WebSocket's request in {self._timeout_s:g} s"
        self._error = WebSocketError(text)
        self.socket.abort()


def _refusal(head: bytes, rest: bytes) -> str:
    """The text of a reply other than 101, or ""."""
    status, _, _ = head.partition(b"\r\n")
    version, _, status = status.partition(b" ")
    if not version.startswith(b"HTTP/"):
        return "the server does not speak HTTP"
    if status.startswith(b"101"):
        return ""
    words = rest.decode(errors="replace")[:TEXT_CHARACTERS_MAX]
    plain = "".join(character if character.isprintable() else " " for character in words)
    text = f"the server answered with HTTP {status.decode(errors='replace')}"
    return f"{text}: {' '.join(plain.split())}" if plain.strip() else text
