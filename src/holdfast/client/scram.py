"""SCRAM as a client's enhanced authentication."""

from holdfast.client.errors import AuthenticationFailed
from holdfast.protocol.mqtt import reasons
from holdfast.security.scram import ScramClient
from holdfast.security.scram_file import METHOD, ScramError


class ScramAuthentication:
    """SCRAM-SHA-256 (RFC 7677) or SCRAM-SHA-512: the password is not sent, and the server proves
    that it has its key."""

    def __init__(self, username: str, password: str, method: str = METHOD) -> None:
        self.method = method
        try:
            self._client = ScramClient(username, password, method=method)
        except ScramError as error:
            raise AuthenticationFailed(str(error), reasons.NOT_AUTHORIZED) from error

    def start(self) -> bytes:
        """The client's first message."""
        return self._client.first()

    def step(self, data: bytes | None) -> bytes:
        """The client's final message, in reply to the server's challenge."""
        try:
            return self._client.final(data or b"")
        except ScramError as error:
            raise AuthenticationFailed(str(error), reasons.NOT_AUTHORIZED) from error

    def finish(self, data: bytes | None) -> None:
        """Checks that the server has proved itself."""
        try:
            self._client.verify(data or b"")
        except ScramError as error:
            raise AuthenticationFailed(str(error), reasons.NOT_AUTHORIZED) from error
