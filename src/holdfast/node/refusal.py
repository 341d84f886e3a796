"""Refuses a client's message: the value that a rule makes, and `publish.acceptance` encodes."""

from typing import Final

from holdfast.protocol.mqtt import reasons


class Rejection:
    """The reason why a message, or a change of a session, is not stored: reason code and text.

    With QUOTA_EXCEEDED the client should send it again later. Every other reason gets a line in the
    log.
    """

    def __init__(self, text: str, reason: int = reasons.QUOTA_EXCEEDED) -> None:
        self.text = text
        self.reason = reason


NOT_PERMITTED: Final = Rejection("", reasons.NOT_AUTHORIZED)
"""The refusal of a topic that the client may not write. The line in the log names the rule."""
QUOTA_USED_UP: Final = Rejection("the user's quota of bytes is used up")
TOO_FAST: Final = Rejection("more messages or bytes a second than allowed: send it again later")
