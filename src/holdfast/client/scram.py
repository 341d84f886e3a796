"""SCRAM-SHA-256 as a client's enhanced authentication."""

from holdfast.client.errors import AuthenticationFailed
from holdfast.protocol.mqtt import reasons
from holdfast.security.scram import ScramClient, ScramError


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
