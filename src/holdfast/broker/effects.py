"""What the node asks its driver to do. Results come back through `Node`."""

from holdfast.broker.session.connection import Connection
from holdfast.broker.session.cursor import Cursor
from holdfast.broker.session.session import Inflight
from holdfast.storage.reading.interest import ReadInterest


class Effect:
    """Base of all effects; the driver dispatches on the class."""


class ReadLog(Effect):
    """Read for a reader that is behind; answer with Node.handle_read."""

    def __init__(
        self,
        cursor: Cursor,
        connection: Connection | None,
        positions: list[int],
        limits: list[int],
        interests: list[ReadInterest],
        records_max: int,
        bytes_max: int,
    ) -> None:
        self.cursor = cursor
        # Who asked; a result for a connection that has gone is void.
        self.connection = connection
        self.positions = positions
        self.limits = limits
        self.interests = interests
        self.records_max = records_max
        self.bytes_max = bytes_max


class FetchInflight(Effect):
    """Read the records of unfinished deliveries; answer with Node.handle_fetched. Once `bytes_max`
    of them are read the rest may be left out."""

    def __init__(
        self,
        reader: Cursor,
        connection: Connection | None,
        wanted: list[tuple[int, int, int]],
        bytes_max: int,
        entries: list[Inflight] | None = None,
    ) -> None:
        """`entries`: of a group, those that are wanted."""
        self.reader = reader
        self.connection = connection
        # (packet id of the session, or index of the group's entry; partition, offset)
        self.wanted = wanted
        self.bytes_max = bytes_max
        self.entries = [] if entries is None else entries


class CheckPassword(Effect):
    """Verify credentials off the loop; answer with Node.handle_password_checked."""

    def __init__(self, connection: Connection, username: str, password: bytes) -> None:
        self.connection = connection
        self.username = username
        self.password = password


class ResumeInput(Effect):
    """The connection may be read again; what its reader holds is processed first."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection


class Cut(Effect):
    """Close the socket at once: its descriptor is needed, and nothing waits to be sent."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection


class Note(Effect):
    """A line for the log. `level`: logging's names in lower case."""

    def __init__(self, level: str, event: str, fields: dict[str, object]) -> None:
        self.level = level
        self.event = event
        self.fields = fields
