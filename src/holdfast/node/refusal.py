"""Refuses a client's message or CONNECT: the value that a rule makes.

`publish.acceptance`, `publish.completion` and `connections.close` encode it.
"""

from typing import Final

from holdfast.protocol.mqtt import reasons


class Rejection:
    """The reason why a message, or a change of a session, is not stored, or a CONNECT is refused:
    reason code and text. `servers`: other servers for the client, in the form of MQTT.

    `is_for_now`: the client should send a message again, and before its later ones. That is so with
    QUOTA_EXCEEDED, by default. Every other reason gets a line in the log.
    """

    def __init__(
        self,
        text: str,
        reason: int = reasons.QUOTA_EXCEEDED,
        servers: str = "",
        *,
        may_pass: bool = False,
    ) -> None:
        """`may_pass`: later messages of the client may be stored before it."""
        self.text = text
        self.reason = reason
        self.servers = servers
        self.is_for_now = reason == reasons.QUOTA_EXCEEDED and not may_pass


NOT_PERMITTED: Final = Rejection("", reasons.NOT_AUTHORIZED)
"""The refusal of a topic that the client may not write. The line in the log names the rule."""
QUOTA_USED_UP: Final = Rejection("the user's quota of bytes is used up")
EARLIER_REFUSED: Final = Rejection("an earlier message was refused: send that first")
TOO_FAST: Final = Rejection("more messages or bytes a second than allowed: send it again later")
