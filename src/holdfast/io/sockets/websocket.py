"""WebSocket connections: the framing in front of `TcpConnection`.

The node has the connection from the moment its socket is accepted. Its limits on connections and on
the time to CONNECT therefore include the upgrade.
"""

import asyncio
import logging
import re
from http import HTTPStatus
from typing import Final

from websockets.exceptions import InvalidOrigin, NegotiationError
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol
from websockets.typing import Origin, Subprotocol

from holdfast.config.listener import LOOPBACK_ORIGINS, Listener
from holdfast.io.sockets.reception import Reception
from holdfast.io.sockets.tcp import TcpConnection
from holdfast.protocol.websocket.errors import WebSocketError
from holdfast.protocol.websocket.stream import OPENING, WebSocketStream

SUBPROTOCOLS: Final = [Subprotocol("mqtt"), Subprotocol("mqttv3.1")]
"""The accepted subprotocols: [MQTT-6.0.0-4], and the one of MQTT 3.1 clients."""

TEXT_CHARACTERS_MAX: Final = 200
"""The most characters of a refusal in the log, because the client chooses parts of the text."""

# The library's lines about single connections do not belong in the broker's log.
_library_logger = logging.getLogger("holdfast.websocket")
_library_logger.setLevel(logging.ERROR)


_LOOPBACK: Final = re.compile(
    r"https?://(localhost|[a-z0-9.-]+\.localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?"
)
"""The origins of the pages that a browser gets from its own machine. RFC 6761 reserves localhost,
so no page of another machine has such an origin, whatever its name resolves to."""


class UpgradeAdmission:
    """The required path and origins of an upgrade, see `Listener.allowed_origins`."""

    def __init__(self, listener: Listener) -> None:
        self.path = listener.path
        self.origins: list[Origin | re.Pattern[str] | None] | None = None
        if not listener.is_open_to_pages():
            # None admits requests without an Origin. Only browsers send one, and they always do.
            self.origins = [
                None,
                *(
                    _LOOPBACK if one == LOOPBACK_ORIGINS else Origin(one)
                    for one in listener.allowed_origins
                ),
            ]


class WebSocketConnection(WebSocketStream):
    """A client connection whose bytes travel in WebSocket frames."""

    def __init__(
        self,
        connection: TcpConnection,
        admission: UpgradeAdmission,
        reception: Reception,
    ) -> None:
        super().__init__(connection, is_client=False)  # type: ignore[arg-type]
        self._connection = connection
        self._reception = reception
        self._admission = admission

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._inner.connection_made(self)  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._state == OPENING:
            self._connection.buffer_upgrade(len(self._head))

    def connection_lost(self, error: Exception | None) -> None:
        if self._error is not None:
            remote = self._connection.find_remote()
            self._reception.note_failure("websocket_error", remote, str(self._error))
        super().connection_lost(error)

    def read_upgrade(self, head: bytes, rest: bytes) -> None:
        """Checks the complete upgrade request, and accepts or refuses it."""
        upgrade = ServerProtocol(
            origins=self._admission.origins,
            subprotocols=SUBPROTOCOLS,
            logger=_library_logger,
        )
        upgrade.receive_data(head)
        events = upgrade.events_received()
        if not events:
            self.refuse_upgrade(f"{upgrade.handshake_exc}: {_cause(upgrade)}", False)
            return
        (request,) = events
        assert isinstance(request, Request)
        response = self._answer(upgrade, request)
        if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            text = bytes(response.body).decode().partition("\n")[0]
            self._refuse(_error(response.status_code, text), response)
            return
        self.socket.write(response.serialize())
        self.opened(rest)

    def refuse_upgrade(self, text: str, too_long: bool) -> None:
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE if too_long else HTTPStatus.BAD_REQUEST
        response = ServerProtocol(logger=_library_logger).reject(
            status, f"{text}. This is a WebSocket listener for MQTT.\n"
        )
        self._refuse(_error(status, text), response)

    def _refuse(self, error: WebSocketError, response: Response) -> None:
        self._reception.count_failure()
        self.refuse(error, response.serialize())

    def _answer(self, upgrade: ServerProtocol, request: Request) -> Response:
        path = self._admission.path
        asked = request.path.partition("?")[0]
        if path not in ("*", asked):
            text = f"There is nothing at {asked}; MQTT over WebSocket is at {path}.\n"
            return upgrade.reject(HTTPStatus.NOT_FOUND, text)
        response = upgrade.accept(request)
        if isinstance(upgrade.handshake_exc, InvalidOrigin):
            page = upgrade.handshake_exc.value or ""
            # The page's name is last, because its length is cut in the log.
            text = f"allowed_origins of the listener does not admit the page {page}\n"
            return upgrade.reject(HTTPStatus.FORBIDDEN, text)
        if isinstance(upgrade.handshake_exc, NegotiationError):
            return upgrade.reject(
                HTTPStatus.BAD_REQUEST, f"{upgrade.handshake_exc}: offer the subprotocol mqtt.\n"
            )
        return response


def _error(status: int, text: str) -> WebSocketError:
    return WebSocketError(f"HTTP {int(status)}: {text[:TEXT_CHARACTERS_MAX]}")


def _cause(upgrade: ServerProtocol) -> str:
    error = upgrade.handshake_exc
    return str(error.__cause__) if error is not None else ""
