"""Describes a node, or a member of a federation, in the handshake: its fields, their bytes, and the
range of wire versions that it speaks.
"""

import json
from functools import lru_cache
from re import fullmatch
from typing import Final

from msgspec import Struct
from msgspec.structs import asdict

WIRE_VERSION: Final = 1
"""The highest version that a node speaks, of the frames and their payloads together."""
WIRE_LOWEST: Final = 1
"""The lowest version that a node speaks: that of the release before, or a node could not be
replaced while the others run."""

TEXT_CHARACTERS_MAX: Final = 256
NODE_ID: Final = r"[A-Za-z0-9_-]{1,32}"
ZONE: Final = r"[A-Za-z0-9_.-]{0,64}"
CAPACITY: Final = r"([1-9][0-9]{0,3}|10000)?"
ROLES: Final = ("data", "witness", "gateway")
ANSWERS_APART: Final = "apart"
"""The feature of a node that replies to one that stands apart. Older versions would take its
connection for a link."""
STANDS_APART: Final = "stands-apart"
"""The feature of a node that was told that its disk is an older copy. It has no link until it is
started again."""
LEVELS: Final[tuple[tuple[str, ...], ...]] = (
    ("resize",),
    ("federation-records",),
    ("feeds",),
    ("relayed-links",),
    ("placement",),
    ("recorded-sessions",),
    ("retained-users",),
    ("shared-usage",),
    ("compared-marks",),
)
"""The features of each level, from level 1 on. The word of a level (`level_word`) stands for these
and those of all lower levels, because the text of all features has 256 characters at most. A
feature that a version before level 1 looks for has a word of its own as well."""
OF_LEVELS: Final = frozenset(name for level in LEVELS for name in level)
"""The features without a word of their own."""
PROGRAM: Final = "program="
"""The begin of the feature with the version of a node's program, for people. It is a feature, so
that the bytes of the handshake stay as older versions know them."""

JsonFields = dict[str, object]
_LEVEL: Final = "v"
NODES_REMEMBERED: Final = 256
"""The number of texts of features that are parsed once. The nodes of one version have the same."""
_OMITTED: Final = ("partitions", "zone", "capacity")
"""The fields of the identity that are not sent if they are empty."""
_LATER_FIELDS: Final = ("features", "disk", "site", *_OMITTED)
"""The fields of the identity that older versions do not send."""
_DISK_PARTS: Final = 3
"""The parts of a disk's position that older versions compare. Further parts are in a field of their
own, because those versions would compare nothing if there were more."""
_VERSIONS: Final = ("wire_version", "wire_lowest")
_VERSION_MAX: Final = 0xFFFF


def level_word(level: int = len(LEVELS)) -> str:
    """The word in `PeerIdentity.features` for a level, that of this version by default."""
    return f"{_LEVEL}{level}"


@lru_cache(maxsize=NODES_REMEMBERED)
def features_in(text: str) -> frozenset[str]:
    """The features in `PeerIdentity.features`, with those that its level stands for. A level above
    those of this version has at least their features."""
    words = text.split(",")
    found = set(words)
    for word in words:
        if fullmatch(rf"{_LEVEL}[0-9]{{1,3}}", word):
            for features in LEVELS[: int(word[len(_LEVEL) :])]:
                found.update(features)
    return frozenset(found)


class PeerIdentity(Struct, frozen=True):
    """The description of a node, for peers that have proved to belong to the cluster."""

    node_id: str
    incarnation: str
    """The random name made with the data directory. It distinguishes a wiped disk from a
    restart."""
    cluster_id: str = ""
    """The cluster's id; empty until the node belongs to one."""
    wire_version: int = WIRE_VERSION
    """The highest wire version of this node. Of a peer: the version that both use."""
    role: str = "data"
    peer_address: str = ""
    client_address: str = ""
    admin_address: str = ""
    process: str = ""
    """The random name made at every start of the process."""
    features: str = ""
    """The names of features that not every version supports, above all frames, separated by
    commas."""
    disk: str = ""
    """The position of its disk (`node.replicate.disk_position`), or ""."""
    site: str = ""
    """The name of a federation's member, for people, or ""."""
    partitions: str = ""
    """The number of partitions of its cluster, or "" from a node without one."""
    zone: str = ""
    """The zone of the node, or ""."""
    capacity: str = ""
    """The capacity of the node, in proportion to other nodes; "": that of most."""
    wire_lowest: int = 0
    """The lowest wire version of this node; 0: `wire_version` alone. Of a peer: its lowest."""

    @property
    def lowest(self) -> int:
        """The lowest wire version."""
        return self.wire_lowest or self.wire_version

    @property
    def program(self) -> str:
        """The version of the node's program, or "" from one that does not announce it."""
        names = self.features.split(",")
        return next((each.removeprefix(PROGRAM) for each in names if each.startswith(PROGRAM)), "")

    @property
    def answers_apart(self) -> bool:
        """Whether the node replies to one that stands apart."""
        return ANSWERS_APART in self.features.split(",")

    @property
    def stands_apart(self) -> bool:
        """Whether the node stands apart."""
        return STANDS_APART in self.features.split(",")


NO_REPLY: Final = (
    "gave no answer in time: it hangs, or the port is not a peer port (21883 by default), but that"
    " of MQTT or of the admin port"
)


class Refusal(Exception):
    """The reason for which a connection does not become a link. `reason` is a word for counters.
    `quiet`: it is no fault, so it needs no line in the log."""

    def __init__(self, reason: str, text: str, quiet: bool = False) -> None:
        super().__init__(text)
        self.reason = reason
        self.text = text
        self.quiet = quiet


def encode_identity(identity: PeerIdentity) -> bytes:
    fields = asdict(identity)
    del fields["wire_lowest"]
    for name in _OMITTED:
        if not fields[name]:
            del fields[name]
    parts = identity.disk.split(".")
    if len(parts) > _DISK_PARTS:
        fields["disk"], fields["disk_later"] = (
            ".".join(each) for each in (parts[:_DISK_PARTS], parts[_DISK_PARTS:])
        )
    return json.dumps(fields).encode()


def decode_identity(body: bytes, lowest: int) -> PeerIdentity:
    """The identity of a peer with this lowest wire version."""
    fields = json_object(body)
    texts = {
        name: fields.get(name, "" if name in _LATER_FIELDS else None)
        for name in PeerIdentity.__struct_fields__
        if name not in _VERSIONS
    }
    if "disk_later" in fields:
        texts["disk"] = f"{texts['disk']}.{fields['disk_later']}"
    for name, text in texts.items():
        if not is_short_text(text):
            raise Refusal("handshake", f"sent an identity whose {name} is no short text")
    highest = fields.get("wire_version")
    if type(highest) is not int or not lowest <= highest <= _VERSION_MAX:
        raise Refusal("handshake", f"sent an identity whose wire version is {str(highest)[:20]!r}")
    wire_lowest = 0 if lowest == highest else lowest
    versions = {"wire_version": highest, "wire_lowest": wire_lowest}
    identity = PeerIdentity(**texts, **versions)  # type: ignore[arg-type]
    if not fullmatch(NODE_ID, identity.node_id) or identity.role not in ROLES:
        raise Refusal(
            "handshake", f"sent the node id {identity.node_id!r} and the role {identity.role!r}"
        )
    if not fullmatch(ZONE, identity.zone) or not fullmatch(CAPACITY, identity.capacity):
        raise Refusal(
            "handshake", f"sent the zone {identity.zone!r} and the capacity {identity.capacity!r}"
        )
    return identity


def is_short_text(value: object) -> bool:
    return (
        isinstance(value, str)
        and len(value) <= TEXT_CHARACTERS_MAX
        and (not value or value.isprintable())
    )


def json_object(body: bytes) -> JsonFields:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise Refusal("handshake", "sent a message that is no JSON object")
    return fields
