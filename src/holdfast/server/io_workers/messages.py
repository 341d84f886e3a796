"""The messages from the broker to an I/O worker beside the stream, each with sockets."""

from typing import Final

import msgspec

from holdfast.config.listener import Listener

MESSAGE_BYTES_MAX: Final = 131_072
"""The most bytes of a message."""
SOCKETS_MAX: Final = 64
"""The most sockets with a message: one for each address of a listener."""


class ListenerChange(msgspec.Struct, frozen=True):
    """The listening sockets of a listener with its settings, or its end: `settings` None."""

    number: int
    settings: Listener | None = None
    connect_timeout_s: float = 20.0
