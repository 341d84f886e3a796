"""A message in custody, and the frame of which its store and its links get the bytes."""

from dataclasses import dataclass, field

from holdfast.federation.core.effects import Message
from holdfast.federation.core.frames import Data
from holdfast.federation.core.identity import MessageId

Place = tuple[bytes, int, int]
"""A destination, the message's place in its stream, and the stream's lowest unconfirmed place."""
Grants = dict[bytes, tuple[bool, tuple[str, ...]]]
"""The audience per destination: whether plain subscribers receive it, and the shared groups."""


@dataclass(slots=True, eq=False)
class CustodyEntry:
    """A message in custody. It is deleted when `places` is empty."""

    id: MessageId
    message: Message
    accepted_at: float
    places: dict[bytes, int]
    """The places at the destinations that have not confirmed it."""
    grants: Grants = field(default_factory=dict)
    """The grants of those destinations that have one. The others serve plain subscribers only."""
    waits_for: frozenset[MessageId] = frozenset()
    """The entries to be stored before it is sent: itself, unless it is stored or may be sent
    before, and those that have its reclaimed grants. A copy of before the reclaim may be in flight.
    """
    is_regranted: bool = False
    """True: its grants were reclaimed from an earlier entry."""

    @property
    def may_send(self) -> bool:
        return not self.waits_for

    @property
    def size(self) -> int:
        message = self.message
        return len(message.topic) + len(message.payload) + len(message.properties)

    def remaining_s(self, now: float) -> float | None:
        expiry_s = self.message.expiry_s
        return None if expiry_s is None else max(0.0, expiry_s - (now - self.accepted_at))


def frame_of(entry: CustodyEntry, destinations: list[Place], hops_max: int, now: float) -> Data:
    id, message = entry.id, entry.message
    return Data(
        id.node,
        id.epoch,
        id.sequence,
        0,
        hops_max,
        message.qos,
        message.is_retained,
        message.topic,
        message.payload,
        message.properties,
        entry.remaining_s(now),
        destinations,
        0,
        message.stamp,
        [
            (node, entry.grants[node][0], list(entry.grants[node][1]))
            for node, _, _ in destinations
            if node in entry.grants
        ],
        entry.is_regranted,
    )


def message_of(frame: Data) -> Message:
    return Message(
        frame.topic,
        frame.payload,
        frame.qos,
        frame.is_retained,
        frame.properties,
        frame.expiry_s,
        None,
        frame.stamp,
    )
