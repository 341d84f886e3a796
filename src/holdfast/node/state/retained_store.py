"""Keeps the retained messages of a broker, and the share of each owner.

The owner of a message is the user who published it, or the client if it has no user. Messages of
the broker and of a federation count for the whole store, and for no owner.

Invariant: no owner gets more of the store than it leaves to all others (`Shares`). So the owner
with most gives way: its new messages are refused. Counter-example without shares: a device names
its topics after the time and fills the store, and no other client can retain anything.

A message that takes no more of its owner's share than the one that it replaces is never refused for
the share. Counter-example: two owners each have the half of the store that was left to them. Others
fill the rest, and no status of these two could change any more.
"""

from typing import Final

from holdfast.node.admission.shares import Shares
from holdfast.node.config import NodeConfig
from holdfast.node.session.message import Message, retained_size
from holdfast.node.session.session import FEDERATION_KEY
from holdfast.protocol.topics.retained import RetainedTrie

Amount = tuple[int, int]
"""Bytes of memory and topics."""
NOTHING: Final[Amount] = (0, 0)
Retained = tuple[int, str]
"""The bytes and the owner of a topic's message."""
NO_MESSAGE: Final[Retained] = (0, "")


def add(one: Amount, other: Amount) -> Amount:
    """The sum of two amounts."""
    return one[0] + other[0], one[1] + other[1]


def retained_owner(message: Message) -> str:
    """The owner of a message; "": the broker or a federation."""
    if message.user:
        return message.user.decode("utf-8", "replace")
    publisher = message.publisher
    if not publisher or publisher == FEDERATION_KEY:
        return ""
    # No user name of MQTT contains U+0000. [MQTT-1.5.4-2]
    return "\0" + publisher.decode("utf-8", "replace")


def retained_of(message: Message) -> Retained:
    """The bytes and the owner of a message."""
    return retained_size(message), retained_owner(message)


class RetainedTable(RetainedTrie[Message]):
    """The retained message of each topic. The topics of $SYS, which are in no partition, are not
    counted."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = Shares()
        self.topics = Shares()

    def set(self, topic: str, entry: Message) -> None:
        before = self.entries.get(topic)
        if before is not None:
            self._count(before, -1)
        super().set(topic, entry)
        self._count(entry, 1)

    def remove(self, topic: str) -> Message | None:
        entry = super().remove(topic)
        if entry is not None:
            self._count(entry, -1)
        return entry

    def _count(self, message: Message, sign: int) -> None:
        owner = retained_owner(message)
        self.bytes.change(owner, sign * retained_size(message))
        if message.partition >= 0:
            self.topics.change(owner, sign)

    def check(self) -> None:
        super().check()
        self.bytes.check()
        self.topics.check()
        assert self.bytes.total == sum(map(retained_size, self.entries.values()))

    def refusal(
        self, config: NodeConfig, owner: str, more: Amount, own: Amount, pending: Amount
    ) -> str:
        """The reason why the store may not grow by `more`; "": it may. `own`: by how much the share
        of `owner` grows. `pending`: its growth by earlier messages, which `more` contains."""
        left_bytes = config.retained_bytes_max - self.bytes.total - more[0]
        left_topics = config.retained_max - self.topics.total - more[1]
        if left_bytes < 0 or (more[1] > 0 and left_topics < 0):
            return "the retained store is full"
        text = "this user or client has as many retained messages as there is room for all others"
        if owner and own[0] > 0 and self.bytes.of(owner) + own[0] + pending[0] > left_bytes:
            return text
        if owner and own[1] > 0 and self.topics.of(owner) + own[1] + pending[1] > left_topics:
            return text
        return ""
