"""What a member wants done. Its driver carries effects out in order."""

from dataclasses import dataclass

from holdfast.federation.identity import MessageId


@dataclass(frozen=True, slots=True)
class Message:
    """A publication, without the bounds of its journey."""

    topic: str
    payload: bytes
    qos: int
    is_retained: bool = False
    properties: bytes = b""
    """As MQTT 5 encodes them, without the expiry."""
    expiry_s: float | None = None
    """From when it is handed over."""
    came_from: MessageId | None = None
    """Set on what the federation delivered: it is not sent out again."""


@dataclass(frozen=True, slots=True)
class Send:
    """To a linked peer, in order."""

    peer: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class DeliverLocally:
    """To the clients of this member. At QoS 1 and 2, store it together with `position` and tell
    `stored(id)`; nothing is confirmed before that."""

    id: MessageId
    message: Message
    place: int
    """In the stream from the origin; 0 at QoS 0. The position to begin with after a restart
    is (id.epoch, place + 1)."""
    hops: int


@dataclass(frozen=True, slots=True)
class Store:
    """Into the custody of this member; tell `stored(id)` when it is durable."""

    id: MessageId
    data: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    """Out of custody; need not be durable."""

    id: MessageId


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect to a member; again whenever this is asked again."""

    node: bytes
    address: str


@dataclass(frozen=True, slots=True)
class CloseLink:
    """The member counts it as down already: no `link_down` is needed."""

    peer: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A message did not go to a destination, or to any (None)."""

    reason: str
    id: MessageId | None
    destination: bytes | None


@dataclass(frozen=True, slots=True)
class IdentityConflict:
    """Another member has this id, or this one's epoch was lost: stop, and start with an epoch
    above `epoch` or with another id."""

    epoch: int


Effect = Send | DeliverLocally | Store | Delete | Dial | CloseLink | Dropped | IdentityConflict
