"""Frames between members: one byte of version, one byte of kind, and a MessagePack array.

A member ignores a frame of an unknown kind, because newer members may have more. One of an unknown
version or a malformed one raises InvalidFrame. Other modules rely on the checks of content here.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from holdfast.protocol.topics.names import (
    TOPIC_BYTES_MAX,
    InvalidFilter,
    InvalidTopic,
    check_filter,
    decode_topic,
    is_shared,
)
from holdfast_federation.core.identity import EPOCH_MAX, NODE_BYTES, MessageId

VERSION: Final = 2
LOWEST: Final = 2  # Members speak the versions from here on.
HOPS_MAX: Final = 16
MEMBERS_MAX: Final = 4096
"""The most members of a federation. It bounds summaries and destinations."""
LINKS_MAX: Final = 256
FILTERS_MAX: Final = 500
"""The most filters of one announcement. More of them go into further versions or chunks."""
CHUNKS_MAX: Final = 400
"""The most chunks of one version, so a member's interest has at most 200,000 filters."""
PROPERTIES_BYTES_MAX: Final = 1 << 20
PATHS_MAX: Final = 3
"""The most paths by which a message is sent at once."""
SHARES_MAX: Final = 1024
"""The most shared groups that one message is granted to at one member."""
CERTIFICATE_BYTES_MAX: Final = 16 << 10
SIGNATURE_BYTES_MAX: Final = 1024
VOUCHERS_MAX: Final = 256
"""The most vouchers of one frame, which is also the most announcements that go into one."""
BUCKETS: Final = 64
"""The number of buckets of retained topics, by a hash of the topic. Buckets by prefix would be
uneven: nearly all topics may be below one prefix."""
RETAINED_PAGE_MAX: Final = 256
RETAINED_PAGE_BYTES: Final = 256 << 10
"""The most bytes of payloads and properties in one page; a larger message has its own page."""
FRAME_BYTES_MAX: Final = 300 << 20
"""The most bytes of a frame, above the largest MQTT packet (268,435,455 bytes of content)."""

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
"""The destinations, each with its place in the stream and the stream's lowest unconfirmed place.
Both are 0 at QoS 0, which has no places."""
Grant = tuple[Node, bool, Annotated[list[str], Meta(max_length=SHARES_MAX)]]
"""The audience at one destination: whether plain subscribers receive the message, and the shared
groups that do (`$share/group/filter`). Without a grant only plain subscribers receive it."""
Bucket = Annotated[int, Meta(ge=0, lt=BUCKETS)]
Version = tuple[Positive, Node, Positive, Positive]
"""The version of a retained message: its stamp, then the id of the publication."""


class InvalidFrame(ValueError):
    """Data that is not a valid frame of this protocol. The text says why."""


class Hello(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A heartbeat on one link, with a digest that shows whether the databases differ."""

    epoch: Positive
    digest: Annotated[bytes, Meta(min_length=8, max_length=8)]
    """The digest of the sender's database. If ours differs, one of the two lacks news."""
    wants_reply: bool
    """True: the sender requests a Hello at once."""


class Announcement(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One version of a member's links and interest. Other members flood it unchanged in meaning."""

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
    """The number of chunks of this version; above 1 only with base 0."""


class Announcements(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Announcements of one or more members, flooded over a link."""

    entries: Annotated[list[Announcement], Meta(max_length=MEMBERS_MAX)]


class Voucher(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The age and signature of one version of a member's announcement.

    They are in a frame of their own for compatibility. A member of the version before would reject
    further fields in `Announcement`, and ignores a frame of this kind.
    """

    origin: Node
    epoch: Positive
    version: Positive
    age_s: Annotated[float, Meta(ge=0, le=1e9)]
    """The seconds since any member first received this version."""
    certificate: Annotated[bytes, Meta(max_length=CERTIFICATE_BYTES_MAX)] = b""
    """The origin's certificate in PEM, with the intermediate ones up to the federation's
    authority. Empty: the version is not signed."""
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES_MAX)] = b""
    """The signature of `signing.statement` by the certificate's key."""


class Vouchers(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The vouchers of the announcements in the next frame."""

    entries: Annotated[list[Voucher], Meta(max_length=VOUCHERS_MAX)]


class Memory(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The end of a member's stored memory, after the announcements. No peer sends it."""

    wall_s: float
    """The time of the store, in seconds since 1970."""
    forgotten: Annotated[list[tuple[Node, Positive, Positive]], Meta(max_length=MEMBERS_MAX)]
    """The members that are forgotten, each with its last epoch and version."""


class Clock(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The wall clock of the sender."""

    wall_s: Annotated[float, Meta(ge=-1e12, le=1e12)]


class AnnouncementRequest(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A request for all announcements that are newer than the ones known."""

    known: Annotated[list[tuple[Node, Positive, Positive]], Meta(max_length=MEMBERS_MAX)]
    """The members that the sender knows, each with epoch and version."""


class Data(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A message on its way to one or more destinations."""

    node: Node
    epoch: Positive
    sequence: Positive
    hops: Hops
    """The number of links that it has crossed."""
    hops_max: Annotated[int, Meta(ge=1, le=HOPS_MAX)]
    qos: Annotated[int, Meta(ge=0, le=2)]
    is_retained: bool
    topic: Topic
    payload: bytes
    properties: Properties
    """The properties in MQTT 5 encoding, without the message expiry. Members do not read them."""
    expiry_s: Annotated[float, Meta(ge=0)] | None
    """The seconds that remain until it expires. None: never."""
    destinations: Destinations
    path: Annotated[int, Meta(ge=0, lt=PATHS_MAX)] = 0
    """The number of its path. 0 is a shortest path; the others avoid it where they can."""
    stamp: Number = 0
    """The stamp of the retained version. 0: the message has no version."""
    grants: Annotated[list[Grant], Meta(max_length=MEMBERS_MAX)] = []
    is_regranted: bool = False
    """True: the groups granted here were first granted to another member. The id is new at this
    destination, even if plain subscribers here have already received the message."""

    @property
    def id(self) -> MessageId:
        return MessageId(self.node, self.epoch, self.sequence)


class StreamAck(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The confirmation that `destination` has stored its stream from `origin` up to `place`."""

    origin: Node
    epoch: Positive
    destination: Node
    place: Number
    hops: Hops


class RetainedRequest(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A request by `source` for versions that `destination` has retained and `source` lacks.

    It covers topics after `after` up to `end_topic`, in string order. The reply has the versions
    that are newer than the known ones, and those of unknown topics.
    """

    source: Node
    destination: Node
    hops: Hops
    number: Positive
    """The number of the request at its source; the reply repeats it."""
    filter: str
    bucket: Bucket | None
    """The bucket to compare, restricted to topics that concern both members. None: all topics that
    the filter matches."""
    after: Topic
    end_topic: Topic | None
    known: Annotated[list[tuple[Topic, Version]], Meta(max_length=FILTERS_MAX)]
    """With a bucket: all versions that the source has in this range."""


class RetainedMessage(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One version of the retained message of a topic."""

    topic: Topic
    payload: bytes
    """The payload; an empty one makes this version a tombstone."""
    qos: Annotated[int, Meta(ge=0, le=2)]
    properties: Properties
    expires_us: Number | None
    """The time of expiry in microseconds of the wall clock. None: never."""
    version: Version

    @property
    def size(self) -> int:
        return len(self.topic) + len(self.payload) + len(self.properties)


class Retained(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Retained versions for `destination`, as a reply or because it probably lacks them."""

    source: Node
    destination: Node
    hops: Hops
    number: Number
    """The number of the request. 0: this is no reply."""
    messages: Annotated[list[RetainedMessage], Meta(max_length=RETAINED_PAGE_MAX)]
    end_topic: Topic | None
    """The last topic that this reply covers. None: it covers the whole request."""


class RetainedDigest(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A summary of the versions that `source` has retained and that concern `destination` too."""

    source: Node
    destination: Node
    hops: Hops
    buckets: Annotated[list[tuple[Bucket, Number]], Meta(max_length=BUCKETS)]
    """The buckets that are not empty, each with the sum of its versions' hashes."""


class Skip(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A substitute for a message that a link's policy withholds.

    The destination passes over the message's place. Without it the stream would wait for that
    place for ever, and every later message with it.
    """

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
    """The last frame on a link that its sender ends."""

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
_NUMBERS: Final = {kind: number for number, kind in KINDS.items()}
_DECODERS: Final = {number: msgspec.msgpack.Decoder(kind) for number, kind in KINDS.items()}
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(frame: Frame) -> bytes:
    """Encodes a frame: version, kind, then its fields."""
    return bytes((VERSION, _NUMBERS[type(frame)])) + _ENCODER.encode(frame)


def decode(data: bytes) -> Frame | None:
    """Decodes and checks a frame. Returns None for a kind that this version does not know. Raises
    InvalidFrame when the data is of another version or malformed."""
    if len(data) < 2:
        raise InvalidFrame(f"a frame of {len(data)} bytes, the least is 2")
    if len(data) > FRAME_BYTES_MAX:
        raise InvalidFrame(f"a frame of {len(data)} bytes, the maximum is {FRAME_BYTES_MAX}")
    if not LOWEST <= data[0] <= VERSION:
        raise InvalidFrame(f"federation protocol {data[0]}, known are {LOWEST} to {VERSION}")
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
    """Checks the destinations of a message. `origin` is None for a group's share that came back to
    the origin, the only message that names its own origin."""
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
