"""Received messages in their producers' order, without repetitions, with any broker in between."""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from holdfast.client.client import Client
from holdfast.client.identity import ProducerIdentity, identity_of
from holdfast.client.protocol.effects import Message
from holdfast.client.pubqueue.format import parse_paper

PRODUCERS_MAX: Final = 1_000
REMEMBERED_MAX: Final = 256
"""The most ids per producer that distinguish a repetition from a late message."""

NEW: Final = 0
DUPLICATE: Final = 1
LATE: Final = 2


@dataclass
class OrderCounts:
    """The messages so far by verdict."""

    ordered: int = 0
    duplicates: int = 0
    late: int = 0


class Deduplicate:
    """A filter that passes each producer's messages in ascending order only, by epoch and sequence.

    It never waits: a producer's sequences run over all its topics, so a subscriber to some of them
    sees gaps although no message is missing. It remembers a limited number of producers, and
    forgets the longest silent.
    """

    def __init__(
        self, producers_max: int = PRODUCERS_MAX, remembered_max: int = REMEMBERED_MAX
    ) -> None:
        self._producers_max = producers_max
        self._remembered_max = remembered_max
        # Per producer, the last ids that passed, ascending.
        self._seen: OrderedDict[str, deque[tuple[int, int]]] = OrderedDict()
        self.counts = OrderCounts()

    def judge(self, identity: ProducerIdentity) -> int:
        """NEW; DUPLICATE; or LATE: older than the newest, and not seen. A message older than all
        that are remembered counts as a duplicate."""
        key = (identity.epoch, identity.sequence)
        seen = self._seen.get(identity.producer)
        if seen is None:
            seen = self._seen[identity.producer] = deque(maxlen=self._remembered_max)
            if len(self._seen) > self._producers_max:
                self._seen.popitem(last=False)
        else:
            self._seen.move_to_end(identity.producer)
        if not seen or key > seen[-1]:
            seen.append(key)
            self.counts.ordered += 1
            return NEW
        position = bisect_left(seen, key)
        is_forgotten = position == 0 and len(seen) == self._remembered_max
        if seen[position] == key or is_forgotten:
            self.counts.duplicates += 1
            return DUPLICATE
        # Remembered, so that it is late once and a duplicate after that.
        if len(seen) == self._remembered_max:
            seen.popleft()
            position -= 1
        seen.insert(position, key)
        self.counts.late += 1
        return LATE


PAPER_EPOCH: Final = 0


def identify(message: Message) -> ProducerIdentity | None:
    """The identity in the property, otherwise in a payload of the paper's form. None: the message
    has neither."""
    try:
        identity = identity_of(message.properties)
    except ValueError:
        return None
    return identity if identity is not None else identify_paper(message)


def identify_paper(message: Message) -> ProducerIdentity | None:
    """The identity in the payload's id and sender, or None if it is not in the paper's form."""
    try:
        sequence, _, sender = parse_paper(message.payload)
    except ValueError:
        return None
    return ProducerIdentity(sender, PAPER_EPOCH, sequence)


async def ordered_messages(
    client: Client,
    *,
    identify: Callable[[Message], ProducerIdentity | None] = identify,
    on_late: Callable[[Message], None] | None = None,
) -> AsyncIterator[Message]:
    """`client.messages()` with each producer's messages ascending and without repetitions.

    Messages without an identity pass. `on_late` gets a message whose position has passed.
    """
    deduplicate = Deduplicate()
    async for message in client.messages():
        identity = identify(message)
        verdict = NEW if identity is None else deduplicate.judge(identity)
        if verdict == NEW:
            yield message
        elif verdict == LATE and on_late is not None:
            on_late(message)
