"""Frames between nodes in JSON: those about single sessions and replicated state.

A field that is not there has its default. `frame_kinds` says which frame is of which kind.
"""

from typing import Final, TypeVar

from msgspec import UNSET, Struct, UnsetType, json

from holdfast.node.frame_kinds import decode_json
from holdfast.node.state.session_records import SessionEntry, WillEntry

FrameT = TypeVar("FrameT", bound=Struct)

FRAME_BYTES_MAX: Final = 268_435_460 + (1 << 20)
"""The most bytes of any frame's payload: the largest MQTT packet as a record, with its frame."""


class LogEndFrame(Struct, frozen=True):
    """LOG_END: the end of the sender's metadata log, as it is on its disk."""

    term: int
    end: tuple[int, int]
    """The term and index of the last entry."""
    members: list[str]
    """The ids of the nodes by that log."""


class OpenFrame(Struct, omit_defaults=True):
    """SESSION_OPEN: the request of a node for a session."""

    request: int
    client: str
    clean: bool
    expiry_s: int
    username: str | None
    # The authenticated user, None for none. UNSET: the node does not report it, because it is older
    # or cannot authenticate users.
    user: str | UnsetType | None = UNSET
    gone: bool = False
    """True if the client has disconnected: the request is withdrawn."""
    will: WillEntry | None = None
    filters: str | None = None
    """See CloseFrame. None: every subscription of the session is accepted."""


class OpenedFrame(Struct, kw_only=True, omit_defaults=True):
    """SESSION_OPENED: the reply to OpenFrame. A `lost` session was closed again and its will
    published. `denied`: it belongs to another user. `kept`: its owner keeps it, see CloseFrame.
    `maybe_sent`: it was sent messages that its logged cursor does not cover. `session`: for a node
    without RECORDED_SESSIONS, which does not begin it from its own replicated state."""

    request: int
    client: str
    epoch: int
    present: bool
    lost: bool
    denied: bool = False
    kept: list[str] | None = None
    maybe_sent: bool = False
    session: SessionEntry | None


class CloseFrame(Struct, omit_defaults=True):
    """SESSION_CLOSE, the order to release a session, and SESSION_CLOSED, its confirmation."""

    client: str
    epoch: int
    filters: str | None = None
    """In an order: the checksum of the filters that the session may have (`checksum_of`). With
    others the owner keeps it. None: it may have any."""
    kept: list[str] | None = None
    """In a reply: the filters because of which the owner keeps the session. Only a node with the
    feature of `sessions.releases` receives it."""


class OwnedSessions(Struct, kw_only=True, omit_defaults=True):
    """SESSION_OWNED: a node's report of its sessions with these home partitions. With `ask` the
    sender, which leads them, requests the report.

    `asking` lists the clients that wait for a session at the node. `users` names the user of each
    session that belongs to one. `epochs`: those in which the sender leads the partitions. Older
    versions send neither. A report may come in several pieces (`sessions.reports`): `follows` says
    that one came before, `more` that another one comes.
    """

    ask: bool = False
    partitions: list[int]
    epochs: list[int] | None = None
    owned: list[tuple[str, int]]
    asking: list[str]
    users: dict[str, str | None] = {}
    follows: bool = False
    more: bool = False


class ImageRequest(Struct, omit_defaults=True):
    """IMAGE_REQUEST: the request for a piece of state. The first one has (partition, offset) of
    each wanted partition."""

    request: int
    piece: int
    partitions: list[tuple[int, int]] | None = None


encode_frame: Final = json.Encoder().encode
LOG_END: Final = json.Decoder(LogEndFrame)
OPEN: Final = json.Decoder(OpenFrame)
OPENED: Final = json.Decoder(OpenedFrame)
CLOSE: Final = json.Decoder(CloseFrame)
OWNED_DECODER: Final = json.Decoder(OwnedSessions)
IMAGE_REQUEST: Final = json.Decoder(ImageRequest)


def decode_frame(decoder: json.Decoder[FrameT], payload: bytes) -> FrameT:
    """Decodes a frame. Raises BadFrame when it is malformed."""
    return decode_json(decoder, payload, "a frame")
