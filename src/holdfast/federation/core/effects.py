"""What a member wants done. Its driver carries effects out in order."""

from dataclasses import dataclass

from holdfast.federation.core.identity import MessageId


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
    stamp: int = 0
    """The federation's, of a version of what is retained; of what is found in a broker, when it was
    published there, in microseconds of the wall clock, 0: not known."""
    is_known_again: bool = False
    """If this member dies before it is stored, it is handed over again, and where it comes a second
    time that is found out or does no harm: so it may be sent before it is stored."""
    done_may_wait: bool = False
    """Who hands it over does not wait for it to be stored, and goes on with others."""
    is_replaced: bool = False
    """It is retained, but the broker retains what the federation brought since, or nothing any more
    although it was published before this start: handed over only now, this is the newer version,
    which the broker is told."""
    missed_by: tuple[str, ...] = ()
    """`$share/group/filter` of groups of this member that began after it was published: another
    member's clients of the group may have it."""


@dataclass(frozen=True, slots=True)
class Send:
    """To a linked peer, in order."""

    peer: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class DeliverLocally:
    """To the clients of this member. At QoS 1 and 2, store it together with `position` and tell
    `stored(id)`; nothing is confirmed before that. A message whose `is_retained` is not set leaves
    what the broker has retained as it is."""

    id: MessageId
    message: Message
    place: int
    """In the stream from the origin; 0 at QoS 0. The position to begin with after a restart
    is (id.epoch, place + 1)."""
    hops: int
    is_plain: bool = True
    """False: for shared groups only."""
    granted: tuple[str, ...] | None = ()
    """`$share/group/filter`, as announced, of the groups here that get it; None: all do. Of the
    others another member's clients get it, or have it: a broker that cannot keep it from them lets
    a group have it twice."""
    is_regranted: bool = False
    """It is for these groups what another member was to have: new, even where the message itself
    has come before."""


@dataclass(frozen=True, slots=True)
class Store:
    """Into the custody of this member, in place of what was stored under this id; tell `stored(id)`
    when it is durable. All are made durable in this order."""

    id: MessageId
    data: bytes
    may_wait: bool = False
    """It is on its way, and will most likely be deleted soon."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Out of custody; need not be durable."""

    id: MessageId


@dataclass(frozen=True, slots=True)
class RetainLocally:
    """What the broker has retained under the topic becomes this, with an empty payload nothing. It
    is no publication: clients that subscribed before have it, or get it as retained. It comes to
    the broker in order with what is delivered. Doing it again does no harm."""

    id: MessageId
    message: Message
    may_wait: bool = False
    """For a while, in which a newer one for the topic, retained locally or delivered, takes its
    place: a client may have removed it, which is about to be handed over."""


@dataclass(frozen=True, slots=True)
class StoreRetained:
    """Durably, in place of what was stored for the topic; not before the broker has what was
    delivered or retained locally ahead of this. A publication is safe when it is durable."""

    topic: str
    data: bytes


@dataclass(frozen=True, slots=True)
class DeleteRetained:
    """What was stored for the topic; need not be durable."""

    topic: str


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


Effect = (
    Send
    | DeliverLocally
    | Store
    | Delete
    | RetainLocally
    | StoreRetained
    | DeleteRetained
    | Dial
    | CloseLink
    | Dropped
    | IdentityConflict
)
