"""Errors of a client. Each has the MQTT 5 reason code if there is one; return codes of MQTT 3 are
translated.
"""

from holdfast.protocol.mqtt import reasons


class ClientError(Exception):
    """The base of all errors of a client.

    `reason` is a reason code, or -1 if the protocol gave none. `detail` is the server's reason
    string, or "". `server_reference` are the servers it named instead of itself (MQTT 5, section
    4.13), or "".
    """

    def __init__(
        self, text: str, reason: int = -1, detail: str = "", server_reference: str = ""
    ) -> None:
        super().__init__(f"{text}: {detail}" if detail else text)
        self.reason = reason
        self.detail = detail
        self.server_reference = server_reference


class ConnectionRefused(ClientError):
    """A refusal of CONNECT by the server."""


class ConnectionLost(ClientError):
    """The end of a connection that the client did not ask for: closed by the peer, aborted, or
    silent for too long. `reason` is that of the server's DISCONNECT (MQTT 5), or Keep Alive timeout
    if the server was silent."""


class ProtocolError(ClientError):
    """A violation of the protocol by the server; `reason` is the kind."""


class AuthenticationFailed(ClientError):
    """A failure of enhanced authentication on the client's side: the server did not prove
    itself."""


class PublishRefused(ClientError):
    """A message that the server refused, or that its announced limits do not allow."""


class SubscribeRefused(ClientError):
    """A SUBSCRIBE or UNSUBSCRIBE of which the server refused at least one filter. `reasons` has one
    reason code per filter, in order."""

    def __init__(self, text: str, reason: int, detail: str, reason_codes: list[int]) -> None:
        super().__init__(text, reason, detail)
        self.reasons = reason_codes


class QueueFull(ClientError):
    """A message without room: as many wait for acknowledgements as the limit allows."""


class NotConnected(ClientError):
    """An operation without the connection that it needs."""


class TimedOut(ClientError):
    """A reply that did not come within the configured time."""


def reason_text(reason: int) -> str:
    """The name of a reason code."""
    return reasons.NAMES.get(reason, f"reason 0x{reason:02x}")
