"""What members say to each other: one byte of version, one of kind, and a MessagePack array.

A frame of an unknown kind is ignored (a newer member may say more), one of an unknown version or a
malformed one is BadFrame and costs the link. Everything that a peer says is checked here, so the
rest may rely on valid ids, topics and filters.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from holdfast.federation.core.identity import EPOCH_MAX, NODE_BYTES, MessageId
from holdfast.protocol.topics.names import (
    TOPIC_BYTES_MAX,
    InvalidFilter,
    InvalidTopic,
    check_filter,
    decode_topic,
    is_shared,
)

VERSION: Final = 2
HOPS_MAX: Final = 16
MEMBERS_MAX: Final = 4096
"""Of a federation; bounds summaries and destinations."""
LINKS_MAX: Final = 256
FILTERS_MAX: Final = 500
"""Of one announcement: more go in further ones, or in further chunks."""
CHUNKS_MAX: Final = 400
"""So a member's interest has at most 200,000 filters."""
PROPERTIES_BYTES_MAX: Final = 1 << 20
PATHS_MAX: Final = 3
"""By which a message is sent at once."""
SHARES_MAX: Final = 1024
"""Of one message to one member."""
CERTIFICATE_BYTES_MAX: Final = 16 << 10
SIGNATURE_BYTES_MAX: Final = 1024
VOUCHERS_MAX: Final = 256
"""Of one frame: as many as announcements go in one."""
BUCKETS: Final = 64
"""Of retained topics, by a hash of the topic: topics below one prefix may be nearly all."""
RETAINED_PAGE_MAX: Final = 256
RETAINED_PAGE_BYTES: Final = 256 << 10
"""Of payloads and properties; a message that has more goes alone."""
FRAME_BYTES_MAX: Final = 300 << 20
"""Above the largest MQTT packet."""

Node = Annotated[bytes, Meta(min_length=NODE_BYTES, max_length=NODE_BYTES)]
Number = Annotated[int, Meta(ge=0, le=EPOCH_MAX)]
Positive = Annotated[int, Meta(ge=1, le=EPOCH_MAX)]
Hops = Annotated[int, Meta(ge=0, le=HOPS_MAX)]
Filters = Annotated[list[str], Meta(max_length=FILTERS_MAX)]
Topic = Annotated[str, Meta(max_length=TOPIC_BYTES_MAX)]
Properties = Annotated[bytes, Meta(max_length=PROPERTIES_BYTES_MAX)]
Destinations = Annotated[
    list[tuple[Node, Number, Number]], Meta(min_length=1, max_length=MEMBERS_MAX)
]
"""Members, the place in the stream to each, and the lowest place that is not confirmed yet; 0 and 0
at QoS 0, which has no places."""
Grant = tuple[Node, bool, Annotated[list[str], Meta(max_length=SHARES_MAX)]]
"""To a destination: is the message for its plain subscribers, and for which shared groups there
(`$share/group/filter`)? Without a grant it is for its plain subscribers and for no group."""
Bucket = Annotated[int, Meta(ge=0, lt=BUCKETS)]
Version = tuple[Positive, Node, Positive, Positive]
"""Of a retained message: its stamp, and the id of the publication."""


class InvalidFrame(ValueError):
    """Not a frame of this protocol. The text says why."""


class Hello(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    epoch: Positive
    digest: Annotated[bytes, Meta(min_length=8, max_length=8)]
    """Of the sender's database; another one has news for us, or lacks some."""
    asks: bool
    """An answer is wanted at once."""


class Announcement(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What one member said of itself; passed on unchanged in meaning by all others."""

    origin: Node
    epoch: Positive
    version: Positive
    base: Number
    """The version that `added` and `removed` are relative to; 0: all filters are in `added`."""
    links: Annotated[list[Node], Meta(max_length=LINKS_MAX)]
    address: Annotated[str, Meta(max_length=512)]
    is_leaving: bool
    added: Filters
    removed: Filters
    chunk: Annotated[int, Meta(ge=0, lt=CHUNKS_MAX)] = 0
    chunks: Annotated[int, Meta(ge=1, le=CHUNKS_MAX)] = 1
    """Of a version with base 0 and many filters."""


class Announcements(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    entries: Annotated[list[Announcement], Meta(max_length=MEMBERS_MAX)]


class Voucher(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Of one version of a member's announcement, beside it: members of the version before do not
    take further fields there, and ignore this."""

    origin: Node
    epoch: Positive
    version: Positive
    age_s: Annotated[float, Meta(ge=0, le=1e9)]
    """Since somebody heard it first."""
    certificate: Annotated[bytes, Meta(max_length=CERTIFICATE_BYTES_MAX)] = b""
    """Of the origin, PEM, with those in between up to the federation's authority. Empty: the
    version is not signed."""
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES_MAX)] = b""
    """By the certificate's key, of `signing.statement`."""


class Vouchers(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Of announcements in the frame behind this one."""

    entries: Annotated[list[Voucher], Meta(max_length=VOUCHERS_MAX)]


class Memory(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """In a member's own memory, behind the announcements; no peer says it."""

    wall_s: float
    """When it was stored, in seconds since 1970."""
    forgotten: Annotated[list[tuple[Node, Positive, Positive]], Meta(max_length=MEMBERS_MAX)]
    """Members, and the epoch and version that they had."""


class Clock(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Of the peer itself, on the wall."""

    wall_s: Annotated[float, Meta(ge=-1e12, le=1e12)]


class AnnouncementRequest(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Whatever is newer than this, please."""

    known: Annotated[list[tuple[Node, Positive, Positive]], Meta(max_length=MEMBERS_MAX)]
    """Of members: epoch and version."""


class Data(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    node: Node
    epoch: Positive
    sequence: Positive
    hops: Hops
    """Links behind it."""
    hops_max: Annotated[int, Meta(ge=1, le=HOPS_MAX)]
    qos: Annotated[int, Meta(ge=0, le=2)]
    is_retained: bool
    topic: Topic
    payload: bytes
    properties: Properties
    """As MQTT 5 encodes them, without the expiry; carried unread."""
    expiry_s: Annotated[float, Meta(ge=0)] | None
    """What is left of it."""
    destinations: Destinations
    path: Annotated[int, Meta(ge=0, lt=PATHS_MAX)] = 0
    """0 is the shortest; the others keep off it where they can."""
    stamp: Number = 0
    """Of the version of a retained message; 0: it has none."""
    grants: Annotated[list[Grant], Meta(max_length=MEMBERS_MAX)] = []
    is_regranted: bool = False
    """Groups are given here what another member was given before: under this id it comes for the
    first time, even where the message has come for plain subscribers."""

    @property
    def id(self) -> MessageId:
        return MessageId(self.node, self.epoch, self.sequence)


class StreamAck(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """`destination` has stored all of the stream up to `place`; on its way to `origin`."""

    origin: Node
    epoch: Positive
    destination: Node
    place: Number
    hops: Hops


class RetainedRequest(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What `destination` has retained beyond `after` in string order, up to `upto`, please: what is
    newer than what is known, or unknown."""

    source: Node
    destination: Node
    hops: Hops
    number: Positive
    """Of the source's; the answer has it."""
    filter: str
    bucket: Bucket | None
    """None: all that the filter matches. Else what concerns both members, of one bucket."""
    after: Topic
    upto: Topic | None
    known: Annotated[list[tuple[Topic, Version]], Meta(max_length=FILTERS_MAX)]
    """All that the source has in this range, with a bucket."""


class RetainedMessage(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    topic: Topic
    payload: bytes
    """Empty: it is a tombstone."""
    qos: Annotated[int, Meta(ge=0, le=2)]
    properties: Properties
    expires_us: Number | None
    """By the wall clock."""
    version: Version

    @property
    def size(self) -> int:
        return len(self.topic) + len(self.payload) + len(self.properties)


class Retained(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """An answer to a request, or what somebody is believed to lack."""

    source: Node
    destination: Node
    hops: Hops
    number: Number
    """Of the request; 0: nobody asked."""
    messages: Annotated[list[RetainedMessage], Meta(max_length=RETAINED_PAGE_MAX)]
    upto: Topic | None
    """All up to here is answered; None: all that was asked for."""


class RetainedDigest(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What `source` has retained that concerns `destination`, too."""

    source: Node
    destination: Node
    hops: Hops
    buckets: Annotated[list[tuple[Bucket, Number]], Meta(max_length=BUCKETS)]
    """And the sum of the hashes of the versions in each; those that are not named are empty."""


class Skip(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """In place of a message that a link's policy holds back: its places are to be passed over."""

    node: Node
    epoch: Positive
    sequence: Positive
    hops: Hops
    hops_max: Annotated[int, Meta(ge=1, le=HOPS_MAX)]
    destinations: Destinations
    path: Annotated[int, Meta(ge=0, lt=PATHS_MAX)] = 0

    @property
    def id(self) -> MessageId:
        return MessageId(self.node, self.epoch, self.sequence)


class Goodbye(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    reason: Annotated[str, Meta(max_length=256)]


Frame = (
    Hello
    | Announcements
    | AnnouncementRequest
    | Data
    | StreamAck
    | RetainedRequest
    | Retained
    | Goodbye
    | RetainedDigest
    | Skip
    | Vouchers
    | Memory
    | Clock
)

KINDS: Final[dict[int, type[Frame]]] = {
    1: Hello,
    2: Announcements,
    3: AnnouncementRequest,
    4: Data,
    5: StreamAck,
    6: RetainedRequest,
    7: Retained,
    8: Goodbye,
    9: RetainedDigest,
    10: Skip,
    11: Vouchers,
    12: Memory,
    13: Clock,
}
CONTROL: Final = frozenset((1, 2, 3, 6, 8, 9, 11, 13))
_NUMBERS: Final = {kind: number for number, kind in KINDS.items()}
_DECODERS: Final = {number: msgspec.msgpack.Decoder(kind) for number, kind in KINDS.items()}
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(frame: Frame) -> bytes:
    return bytes((VERSION, _NUMBERS[type(frame)])) + _ENCODER.encode(frame)


def decode(data: bytes) -> Frame | None:
    """None: of a kind that this version does not know. Raises BadFrame."""
    if len(data) < 2:
        raise InvalidFrame(f"a frame of {len(data)} bytes, the least is 2")
    if len(data) > FRAME_BYTES_MAX:
        raise InvalidFrame(f"a frame of {len(data)} bytes, the maximum is {FRAME_BYTES_MAX}")
    if data[0] != VERSION:
        raise InvalidFrame(f"federation protocol {data[0]}, this member speaks {VERSION}")
    decoder = _DECODERS.get(data[1])
    if decoder is None:
        return None
    try:
        frame: Frame = decoder.decode(memoryview(data)[2:])
        _check(frame)
    except (msgspec.DecodeError, InvalidTopic, InvalidFilter, UnicodeError) as error:
        raise InvalidFrame(f"a malformed {KINDS[data[1]].__name__}: {error}") from None
    except RecursionError:
        raise InvalidFrame(f"a {KINDS[data[1]].__name__} that is nested too deeply") from None
    return frame


def _check(frame: Frame) -> None:
    if isinstance(frame, Data):
        decode_topic(frame.topic.encode())
        is_back = frame.is_regranted and len(frame.destinations) == 1
        _check_places(None if is_back else frame.node, frame.destinations, frame.qos > 0)
        _check_grants(frame)
    elif isinstance(frame, Announcements):
        for entry in frame.entries:
            _check_announcement(entry)
    elif isinstance(frame, RetainedRequest):
        check_filter(frame.filter)
        if is_shared(frame.filter):
            raise InvalidFrame("a request for what a shared subscription has retained")
    elif isinstance(frame, Retained):
        for message in frame.messages:
            decode_topic(message.topic.encode())
    elif isinstance(frame, Skip):
        _check_places(frame.node, frame.destinations, True)


def _check_places(
    origin: bytes | None, destinations: list[tuple[bytes, int, int]], has_places: bool
) -> None:
    """`origin`: None for what its origin keeps for its own clients."""
    nodes = {node for node, _, _ in destinations}
    if len(nodes) < len(destinations) or origin in nodes:
        raise InvalidFrame("a message that names a destination twice, or its own origin")
    for _, place, base in destinations:
        if (place > 0) != has_places or base > place or (place > 0 and base == 0):
            raise InvalidFrame(f"place {place} of a stream that begins at {base}")


def _check_grants(frame: Data) -> None:
    nodes = {node for node, _, _ in frame.grants}
    if len(nodes) < len(frame.grants):
        raise InvalidFrame("a message with two grants to one destination")
    for _, _, shares in frame.grants:
        for share in shares:
            check_filter(share)
            if not is_shared(share):
                raise InvalidFrame("a grant that is for no shared group")


def _check_announcement(entry: Announcement) -> None:
    if entry.chunk >= entry.chunks:
        raise InvalidFrame(f"chunk {entry.chunk} of {entry.chunks}")
    if entry.base >= entry.version or (entry.base and entry.chunks > 1):
        raise InvalidFrame(f"version {entry.version} in {entry.chunks} chunks upon {entry.base}")
    if entry.removed and not entry.base:
        raise InvalidFrame("a full announcement that removes filters")
    for filter in entry.added:
        check_filter(filter)
