"""Messages of the published protocol, as JSON in MQTT messages.

Field names are the published ones. Their case does not matter, and unknown ones are ignored.
`Epoch` and `Hops` are Holdfast's; a published federator sends neither, which reads as 0.
"""

from binascii import Error as Base64Error
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from holdfast.protocol.topics import names

FEDERATED: Final = "federated/"
"""The topic prefix of the applications' publications, on every broker."""
BEACON: Final = "federator/beacon/"
CORE_ANN: Final = "federator/core_ann/"
MEMB_ANN: Final = "federator/memb_ann/"
ROUTING: Final = "federator/routing/"
TOPOLOGY_ANN: Final = ("federator/topology_ann", "federated_topology_ann")
"""The topic as the published code has it, then as the paper has it."""
SUBSCRIPTIONS: Final = (
    FEDERATED + "#", BEACON + "#", CORE_ANN + "#", MEMB_ANN + "#", ROUTING + "#", *TOPOLOGY_ANN,
)  # fmt: skip
"""The subscriptions of a federator on its own broker. None overlap, so no message comes twice."""

CONTROL_BYTES_MAX: Final = 4096
ADDRESS_CHARACTERS_MAX: Final = 300
TOPIC_BYTES_MAX: Final = names.TOPIC_BYTES_MAX - len(MEMB_ANN)
LEVELS_MAX: Final = names.LEVELS_MAX - 2
"""The most levels, as TOPIC_BYTES_MAX of a topic without prefix. With the longest prefix it must
still be a valid topic."""
ROUTING_OVERHEAD_BYTES: Final = 1024
"""The most bytes of a routed publication beside its payload, which grows by a third in Base64."""

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class BadMessage(Exception):
    """A malformed message. `reason` is one of few, for counting; the text says what is wrong."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class CoreAnnouncement(
    Struct, frozen=True, omit_defaults=True,
    rename={"root": "CoreId", "sender": "SenderId", "number": "Seqn", "distance": "Dist",
            "epoch": "Epoch"},
):  # fmt: skip
    root: Number
    sender: Number
    number: Number
    """Higher than that of any announcement of the root before it, in this epoch."""
    distance: Number
    """Hops from the root to the sender."""
    epoch: Number = 0
    """The epoch of the root."""


class MembershipAnnouncement(
    Struct, frozen=True, omit_defaults=True,
    rename={"root": "CoreId", "sender": "SenderId", "number": "Seqn", "epoch": "Epoch"},
):  # fmt: skip
    """The answer to an announcement: the sender is below."""

    root: Number
    sender: Number
    number: Number
    epoch: Number = 0


class PublicationId(
    Struct, frozen=True, omit_defaults=True,
    rename={"origin": "OriginId", "number": "Seqn", "epoch": "Epoch"},
):  # fmt: skip
    origin: Number
    number: Number
    """From 1, over all topics of the origin in this epoch; without an epoch, as published: of
    each topic."""
    epoch: Number = 0


class RoutedPublication(
    Struct, frozen=True, omit_defaults=True,
    rename={"id": "PubId", "sender": "SenderId", "payload": "Payload", "hops": "Hops"},
):  # fmt: skip
    id: PublicationId
    sender: Number
    payload: bytes | None
    """None where a published federator routes an empty one."""
    hops: Number = 0
    """That it has made when it arrives."""


class Neighbour(Struct, frozen=True):
    id: Number
    ip: Annotated[str, Meta(min_length=1, max_length=ADDRESS_CHARACTERS_MAX)]
    """The URL of its broker."""


class TopologyAnnouncement(Struct, frozen=True):
    neighbor: Neighbour
    action: Literal["NEW", "REMOVE"]


Wire = CoreAnnouncement | MembershipAnnouncement | RoutedPublication | TopologyAnnouncement
W = TypeVar("W", bound=Wire)

_NAMES: Final = {
    field.lower(): field
    for kind in (
        CoreAnnouncement, MembershipAnnouncement, PublicationId, RoutedPublication, Neighbour,
        TopologyAnnouncement,
    )
    for field in kind.__struct_encode_fields__
}  # fmt: skip
"""By their small letters; no two differ in capitals alone."""

encode: Final = msgspec.json.Encoder().encode


def decode(payload: bytes, kind: type[W], bytes_max: int) -> W:
    """Decodes a message of at most `bytes_max` bytes. Raises BadMessage when it is malformed."""
    if len(payload) > bytes_max:
        raise BadMessage("too large", f"{len(payload)} bytes, at most {bytes_max} are read")
    try:
        message = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadMessage("no JSON", str(error)) from None
    except RecursionError:
        raise BadMessage("no JSON", "nested too deeply") from None
    try:
        return msgspec.convert(_named(message), kind)
    except (msgspec.ValidationError, Base64Error) as error:
        raise BadMessage("wrong fields", str(error)) from None


def _named(message: object, depth: int = 2) -> object:
    """The message with its fields' names as they are published, whatever their capitals. No message
    has fields below `depth`."""
    if not depth or not isinstance(message, dict):
        return message
    return {
        _NAMES.get(name.lower(), name): _named(value, depth - 1) for name, value in message.items()
    }


def topic_below(topic: str, prefix: str) -> str:
    """The application's topic in a topic below `prefix`. Raises BadMessage when it has none or is
    above a limit."""
    name = topic.removeprefix(prefix)
    if not name:
        raise BadMessage("no topic", f"{topic} names no topic behind {prefix}")
    # A character has at most four bytes, so most need no counting.
    if len(name) > TOPIC_BYTES_MAX // 4 and len(name.encode()) > TOPIC_BYTES_MAX:
        raise BadMessage("topic too long", f"a topic of more than {TOPIC_BYTES_MAX} bytes")
    if name.count("/") >= LEVELS_MAX:
        raise BadMessage("topic too long", f"a topic of more than {LEVELS_MAX} levels")
    return name
