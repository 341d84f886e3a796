"""What the node asks its driver to do. Results come back through `Node`."""

from holdfast.log.interest import Interest
from holdfast.session.connection import Connection
from holdfast.session.cursor import Cursor
from holdfast.session.session import Session


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
        interests: list[Interest],
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
    """Read the records of unfinished deliveries; answer with Node.handle_fetched."""

    def __init__(
        self, session: Session, connection: Connection, wanted: list[tuple[int, int, int]]
    ) -> None:
        self.session = session
        self.connection = connection
        # (packet id, partition, offset)
        self.wanted = wanted


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


class Note(Effect):
    """A line for the log. `level`: logging's names in lower case."""

    def __init__(self, level: str, event: str, fields: dict[str, object]) -> None:
        self.level = level
        self.event = event
        self.fields = fields
