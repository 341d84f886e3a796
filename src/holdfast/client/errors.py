"""What can go wrong for a client. Each error carries the MQTT 5 reason code where there is one;
return codes of MQTT 3 are translated."""

from holdfast.protocol.mqtt import reasons


class ClientError(Exception):
    """Base of all errors here. `reason` is a reason code, -1 where the protocol gave none;
    `detail` the server's reason string, "" without one; `server_reference` the servers it named
    instead of itself (MQTT 5, section 4.13), "" without any."""

    def __init__(
        self, text: str, reason: int = -1, detail: str = "", server_reference: str = ""
    ) -> None:
        super().__init__(f"{text}: {detail}" if detail else text)
        self.reason = reason
        self.detail = detail
        self.server_reference = server_reference


class ConnectionRefused(ClientError):
    """The server answered CONNECT with a refusal."""


class ConnectionLost(ClientError):
    """The connection ended without our wish: closed by the peer, cut, or silent for too long.
    `reason` comes from the server's DISCONNECT (MQTT 5), or is Keep Alive timeout where we found
    the server silent."""


class ProtocolError(ClientError):
    """The server broke the protocol; `reason` says how."""


class AuthenticationFailed(ClientError):
    """The enhanced authentication exchange failed on our side: the server did not prove itself."""


class PublishRefused(ClientError):
    """The server refused a message, or its announced limits do not allow it."""


class SubscribeRefused(ClientError):
    """The server refused at least one filter of a SUBSCRIBE or UNSUBSCRIBE. `reasons` has one
    reason code per filter, in order."""

    def __init__(self, text: str, reason: int, detail: str, reason_codes: list[int]) -> None:
        super().__init__(text, reason, detail)
        self.reasons = reason_codes


class QueueFull(ClientError):
    """As many messages wait for acknowledgements as the configured bound allows."""


class NotConnected(ClientError):
    """The operation needs a connection."""


class TimedOut(ClientError):
    """No answer within the configured time."""


def reason_text(reason: int) -> str:
    return reasons.NAMES.get(reason, f"reason 0x{reason:02x}")
