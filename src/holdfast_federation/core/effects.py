"""Effects: the requests of a member to its driver, which carries them out in order."""

from dataclasses import dataclass

from holdfast_federation.core.identity import MessageId


@dataclass(frozen=True, slots=True)
class Message:
    """A publication as a client made it, without destinations and places."""

    topic: str
    payload: bytes
    qos: int
    is_retained: bool = False
    properties: bytes = b""
    """The properties in MQTT 5 encoding, without the message expiry."""
    expiry_s: float | None = None
    """The seconds until it expires, counted from the call that hands it over. None: never."""
    delivered_id: MessageId | None = None
    """The id of a message that the federation delivered here. The member never publishes such a
    message again: two members would otherwise send it back and forth for ever."""
    stamp: int = 0
    """The federation's stamp of a retained version. For a message found in a broker it is the time
    of its publication there, in microseconds of the wall clock. 0: not known."""
    is_repeatable: bool = False
    """True: the driver hands it over again if this member dies before it is stored, and a second
    arrival is detected or harmless. The member may therefore send it before it is stored."""
    done_may_wait: bool = False
    """True: the caller does not wait for the store and goes on with other messages."""
    is_replaced: bool = False
    """True: the message is retained and handed over late. The broker by now retains a message of
    the federation, or none although this one was published before the start. This message is the
    newer version, so the member has the broker retain it."""
    missed_by: tuple[str, ...] = ()
    """The groups of this member, as `$share/group/filter`, that began after it was published.
    Another member's clients in the group may receive it."""


@dataclass(frozen=True, slots=True)
class Send:
    """A frame to a linked peer. Frames to one peer stay in order."""

    peer: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class DeliverLocally:
    """A delivery to the clients of this member.

    At QoS 1 and 2 the driver stores the message together with the position after it, then calls
    `stored(id)`. The member confirms nothing before that call: a confirmed message that dies with
    its destination would be gone, because the origin deletes it. A message without `is_retained`
    leaves the broker's retained message as it is.
    """

    id: MessageId
    message: Message
    place: int
    """The place in the stream from the origin; 0 at QoS 0. After a restart the stream begins at
    the position (id.epoch, place + 1)."""
    hops: int
    is_plain: bool = True
    """True: plain subscribers receive it. False: only shared groups do."""
    granted: tuple[str, ...] | None = ()
    """The groups here that receive it, as `$share/group/filter` in the announcement. None: all do.
    For every other group another member's clients receive it. A broker that cannot withhold it
    from those groups delivers it to them a second time."""
    is_regranted: bool = False
    """True: the groups were first granted to another member. The message is new to these groups
    even if it has already come here for others."""


@dataclass(frozen=True, slots=True)
class Store:
    """A write into this member's custody, which replaces an earlier one under the same id.

    The driver calls `stored(id)` when it is durable. Stores become durable in the order of these
    effects, so a crash loses only the last ones (`custody`).
    """

    id: MessageId
    data: bytes
    may_wait: bool = False
    """True: the message is already sent and will probably be deleted soon."""


@dataclass(frozen=True, slots=True)
class Delete:
    """A removal from custody. It need not be durable: after a crash the message is sent again and
    its destination recognises the place."""

    id: MessageId


@dataclass(frozen=True, slots=True)
class RetainLocally:
    """A replacement of the broker's retained message of a topic; an empty payload removes it.

    It is no publication: present subscribers already have the message or receive it as retained.
    The driver keeps its order with deliveries. Doing it twice is harmless.
    """

    id: MessageId
    message: Message
    may_wait: bool = False
    """True: the driver may delay it. A newer message of the topic, delivered or retained locally,
    then replaces it: a client may just have removed the topic, and that is not handed over yet."""


@dataclass(frozen=True, slots=True)
class StoreRetained:
    """A durable write of the retained version of a topic, in place of the one before.

    The driver makes it only after the broker has every delivery and local retain ahead of it. A
    publication is safe when this write is durable.
    """

    topic: str
    data: bytes


@dataclass(frozen=True, slots=True)
class DeleteRetained:
    """A removal of the stored retained version of a topic. It need not be durable."""

    topic: str


@dataclass(frozen=True, slots=True)
class Dial:
    """A request for one attempt to connect to a member; the member repeats it when it fails."""

    node: bytes
    address: str


@dataclass(frozen=True, slots=True)
class CloseLink:
    """A request to close a connection. The member already counts the link as down, so the driver
    does not call `link_down`."""

    peer: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A report that a message did not reach a destination. None as destination: any."""

    reason: str
    id: MessageId | None
    destination: bytes | None


@dataclass(frozen=True, slots=True)
class IdentityConflict:
    """A report that another member has this id, or that this member's stored epoch was lost.

    The driver stops the member and starts it with an epoch above `epoch`, or with another id.
    """

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
