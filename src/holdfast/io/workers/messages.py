"""Messages between the broker and an I/O worker that are more than bytes of clients."""

from typing import Annotated, Final

import msgspec

from holdfast.config.listener import Listener
from holdfast.protocol.relay.frames import RelayError

MESSAGE_BYTES_MAX: Final = 131_072
"""The most bytes of a message."""
BEHIND: Final = "io_worker_behind"
"""The event of the note with the sockets that a worker has closed, because too many frames waited
for the broker."""
SOCKETS_MAX: Final = 64
"""The most sockets with a message: one for each address of a listener."""


class ListenerChange(msgspec.Struct, frozen=True):
    """A message beside the stream: the listening sockets of a listener with its settings, or its
    end: `settings` None."""

    number: int
    settings: Listener | None = None
    connect_timeout_s: float = 20.0


class WorkerNote(msgspec.Struct, frozen=True):
    """The content of a NOTE: a line for the broker's log. Level 0: only count the event.

    `count`: how often the event happened."""

    level: int
    event: str
    fields: dict[str, str | int]
    count: Annotated[int, msgspec.Meta(ge=0)] = 1


def decode_note(content: bytes) -> WorkerNote:
    """Decodes a note of a worker. Raises `RelayError` when it is malformed.

    A worker speaks with strangers, so its notes are not trusted.
    """
    try:
        note = msgspec.json.decode(content, type=WorkerNote)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RelayError(f"a note that is none: {error}") from error
    # They become parts of a format.
    if not all(name.isidentifier() for name in (note.event, *note.fields)):
        raise RelayError(f"a note with a name like {note.event[:40]!r}")
    return note
