"""What members say to each other: one byte of version, one of kind, and a MessagePack array.

A frame of an unknown kind is ignored (a newer member may say more), one of an unknown version or a
malformed one is BadFrame and costs the link. Everything that a peer says is checked here, so the
rest may rely on valid ids, topics and filters.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from holdfast.federation.identity import EPOCH_MAX, NODE_BYTES, MessageId
from holdfast.topics.names import (
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
FRAME_BYTES_MAX: Final = 300 << 20
"""Above the largest MQTT packet."""

Node = Annotated[bytes, Meta(min_length=NODE_BYTES, max_length=NODE_BYTES)]
Number = Annotated[int, Meta(ge=0, le=EPOCH_MAX)]
Positive = Annotated[int, Meta(ge=1, le=EPOCH_MAX)]
Filters = Annotated[list[str], Meta(max_length=FILTERS_MAX)]


class BadFrame(ValueError):
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


class AnnouncementRequest(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Whatever is newer than this, please."""

    known: Annotated[list[tuple[Node, Positive, Positive]], Meta(max_length=MEMBERS_MAX)]
    """Of members: epoch and version."""


class Data(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    node: Node
    epoch: Positive
    sequence: Positive
    hops: Annotated[int, Meta(ge=0, le=HOPS_MAX)]
    """Links behind it."""
    hops_max: Annotated[int, Meta(ge=1, le=HOPS_MAX)]
    qos: Annotated[int, Meta(ge=0, le=2)]
    is_retained: bool
    topic: Annotated[str, Meta(max_length=TOPIC_BYTES_MAX)]
    payload: bytes
    properties: Annotated[bytes, Meta(max_length=PROPERTIES_BYTES_MAX)]
    """As MQTT 5 encodes them, without the expiry; carried unread."""
    expiry_s: Annotated[float, Meta(ge=0)] | None
    """What is left of it."""
    destinations: Annotated[
        list[tuple[Node, Number, Number]], Meta(min_length=1, max_length=MEMBERS_MAX)
    ]
    """Members, the place in the stream to each, and the lowest place that is not confirmed yet; 0
    and 0 at QoS 0, which has no places."""

    @property
    def id(self) -> MessageId:
        return MessageId(self.node, self.epoch, self.sequence)


class Ack(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """`destination` has stored all of the stream up to `place`; on its way to `origin`."""

    origin: Node
    epoch: Positive
    destination: Node
    place: Number
    hops: Annotated[int, Meta(ge=0, le=HOPS_MAX)]


class Goodbye(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    reason: Annotated[str, Meta(max_length=256)]


Frame = Hello | Announcements | AnnouncementRequest | Data | Ack | Goodbye

KINDS: Final[dict[int, type[Frame]]] = {
    1: Hello,
    2: Announcements,
    3: AnnouncementRequest,
    4: Data,
    5: Ack,
    8: Goodbye,
}
CONTROL: Final = frozenset((1, 2, 3, 8))
_NUMBERS: Final = {kind: number for number, kind in KINDS.items()}
_DECODERS: Final = {number: msgspec.msgpack.Decoder(kind) for number, kind in KINDS.items()}
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(frame: Frame) -> bytes:
    return bytes((VERSION, _NUMBERS[type(frame)])) + _ENCODER.encode(frame)


def decode(data: bytes) -> Frame | None:
    """None: of a kind that this version does not know. Raises BadFrame."""
    if len(data) < 2:
        raise BadFrame(f"a frame of {len(data)} bytes, the least is 2")
    if len(data) > FRAME_BYTES_MAX:
        raise BadFrame(f"a frame of {len(data)} bytes, the maximum is {FRAME_BYTES_MAX}")
    if data[0] != VERSION:
        raise BadFrame(f"federation protocol {data[0]}, this member speaks {VERSION}")
    decoder = _DECODERS.get(data[1])
    if decoder is None:
        return None
    try:
        frame: Frame = decoder.decode(memoryview(data)[2:])
        _check(frame)
    except (msgspec.DecodeError, InvalidTopic, InvalidFilter, UnicodeError) as error:
        raise BadFrame(f"a malformed {KINDS[data[1]].__name__}: {error}") from None
    except RecursionError:
        raise BadFrame(f"a {KINDS[data[1]].__name__} that is nested too deeply") from None
    return frame


def _check(frame: Frame) -> None:
    if isinstance(frame, Data):
        decode_topic(frame.topic.encode())
        _check_places(frame)
    elif isinstance(frame, Announcements):
        for entry in frame.entries:
            _check_announcement(entry)


def _check_places(frame: Data) -> None:
    nodes = {node for node, _, _ in frame.destinations}
    if len(nodes) < len(frame.destinations) or frame.node in nodes:
        raise BadFrame("a message that names a destination twice, or its own origin")
    for _, place, base in frame.destinations:
        if (place == 0) != (frame.qos == 0) or base > place or (place > 0 and base == 0):
            raise BadFrame(f"place {place} of a stream that begins at {base}, QoS {frame.qos}")


def _check_announcement(entry: Announcement) -> None:
    if entry.chunk >= entry.chunks:
        raise BadFrame(f"chunk {entry.chunk} of {entry.chunks}")
    if entry.base >= entry.version or (entry.base and entry.chunks > 1):
        raise BadFrame(f"version {entry.version} in {entry.chunks} chunks upon {entry.base}")
    if entry.removed and not entry.base:
        raise BadFrame("a full announcement that removes filters")
    for filter in entry.added:
        check_filter(filter)
        if is_shared(filter):
            raise BadFrame("a shared subscription in an announcement, which has plain filters")
