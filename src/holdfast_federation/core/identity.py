"""Identity of a member: an id for life, and an epoch that grows with every start.

Both are in a file of one line. A driver stores `restarted()` durably before it starts a member.
Smallest counter-example: a member publishes (epoch 5, sequence 1), crashes, and starts with epoch 5
again. Its next message is (5, 1) too, and every other member drops it as a duplicate.

A start after a while takes a step at random, up to EPOCH_RANDOM_STEP. Otherwise a directory that is
put back to an earlier copy starts with an epoch that it has used. The others see a lower epoch, and
report it, but not the same one.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

NODE_BYTES: Final = 16
EPOCH_MAX: Final = 2**63 - 1
EPOCH_COUNTED_MAX: Final = 2**48
"""The highest epoch that a member may have counted: one start a second for nine million years."""
EPOCH_STEP_MAX: Final = 2**24
"""The longest step between two epochs that others receive: 8,000 starts, a minute apart, of which
they receive none."""
EPOCH_RANDOM_STEP: Final = 2**12
STEADY_S: Final = 60.0
"""The age in seconds of the last start from which on a step is random. A member that keeps
failing counts by one, or the others would believe it no more."""


RESTORED_STARTS: Final = 2**20
"""The epochs that a restore adds: more than a member has used since its backup, and a sixteenth of
what others believe at once."""


class BadIdentity(ValueError):
    """A stored identity that is damaged. The text says what to do."""


class MessageId(NamedTuple):
    """The id of a message, unique in the federation because no two starts share an epoch."""

    node: bytes
    """The id of the origin."""
    epoch: int
    sequence: int
    """The number of the message among all of the origin in this epoch, from 1."""


@dataclass(frozen=True)
class Identity:
    """The id and the epoch of one start of a member."""

    node: bytes
    epoch: int = 0
    """A number that grows with each start; 0 has never run."""

    def __post_init__(self) -> None:
        if len(self.node) != NODE_BYTES:
            raise BadIdentity(f"a member's id has {NODE_BYTES} bytes, not {len(self.node)}")
        if not 0 <= self.epoch <= EPOCH_MAX:
            raise BadIdentity(f"an epoch is between 0 and {EPOCH_MAX}, not {self.epoch}")

    def restarted(self, step: int = 1) -> "Identity":
        return Identity(self.node, self.epoch + step)

    def skipped(self, starts: int) -> "Identity":
        """The identity after starts that are not made. A fresh member has none to skip."""
        return Identity(self.node, self.epoch + starts) if self.epoch else self

    def encode(self) -> bytes:
        return f"{self.node.hex()} {self.epoch}\n".encode()


def decode_identity(data: bytes) -> Identity:
    """Decodes a stored identity. Raises BadIdentity when the data is damaged."""
    try:
        node, epoch = data.decode("ascii").split()
        return Identity(bytes.fromhex(node), int(epoch))
    except ValueError as error:
        raise BadIdentity(
            f"not a member's identity ({error}); restore it from a copy, or delete it and "
            "the member's federation store, and the member joins as a new one"
        ) from None
