"""Who a member is: an id for life, and an epoch that grows with every start.

Both are kept in a file of one line; a driver stores `restarted()` durably before it starts a
member, so that nothing said in this life can be taken for something said before.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

NODE_BYTES: Final = 16
EPOCH_MAX: Final = 2**63 - 1
EPOCH_COUNTED_MAX: Final = 2**48
"""Starts that a member may have counted: one each second for nine million years."""
EPOCH_STEP_MAX: Final = 2**24
"""Starts between two that others hear of: one each second for half a year."""


class BadIdentity(ValueError):
    """The stored identity is not one. The text says what to do."""


class MessageId(NamedTuple):
    node: bytes
    """The origin."""
    epoch: int
    sequence: int
    """From 1, over all messages of the origin in this epoch."""


@dataclass(frozen=True)
class Identity:
    node: bytes
    epoch: int = 0
    """0 has never run."""

    def __post_init__(self) -> None:
        if len(self.node) != NODE_BYTES:
            raise BadIdentity(f"a member's id has {NODE_BYTES} bytes, not {len(self.node)}")
        if not 0 <= self.epoch <= EPOCH_MAX:
            raise BadIdentity(f"an epoch is between 0 and {EPOCH_MAX}, not {self.epoch}")

    def restarted(self) -> "Identity":
        return Identity(self.node, self.epoch + 1)

    def encode(self) -> bytes:
        return f"{self.node.hex()} {self.epoch}\n".encode()


def decode_identity(data: bytes) -> Identity:
    """Raises BadIdentity."""
    try:
        node, epoch = data.decode("ascii").split()
        return Identity(bytes.fromhex(node), int(epoch))
    except ValueError as error:
        raise BadIdentity(
            f"not a member's identity ({error}); restore it from a copy, or delete it and "
            "the member's federation store, and the member joins as a new one"
        ) from None
