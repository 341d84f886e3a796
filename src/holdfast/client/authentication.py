"""Enhanced authentication (MQTT 5, section 4.12) from the client's side."""

from typing import Protocol

from holdfast.client.errors import AuthenticationFailed
from holdfast.mqtt import reasons
from holdfast.security.scram import ScramClient, ScramError


class Authentication(Protocol):
    """One exchange. The methods raise AuthenticationFailed."""

    method: str

    def start(self) -> bytes | None:
        """Authentication data for CONNECT (or for the AUTH that starts over)."""

    def step(self, data: bytes | None) -> bytes | None:
        """Answer to the data of an AUTH packet."""

    def finish(self, data: bytes | None) -> None:
        """Check the data that came with success."""


class ScramAuthentication:
    """SCRAM-SHA-256 (RFC 7677): the password is not sent; the server proves that it knows it."""

    method = "SCRAM-SHA-256"

    def __init__(self, username: str, password: str) -> None:
        try:
            self._client = ScramClient(username, password)
        except ScramError as error:
            raise AuthenticationFailed(str(error), reasons.NOT_AUTHORIZED) from error

    def start(self) -> bytes:
        return self._client.first()

    def step(self, data: bytes | None) -> bytes:
        try:
            return self._client.final(data or b"")
        except ScramError as error:
            raise AuthenticationFailed(str(error), reasons.NOT_AUTHORIZED) from error

    def finish(self, data: bytes | None) -> None:
        try:
            self._client.verify(data or b"")
        except ScramError as error:
            raise AuthenticationFailed(str(error), reasons.NOT_AUTHORIZED) from error
