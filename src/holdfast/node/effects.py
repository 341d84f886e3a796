"""Requests of the node to its driver. Results come back through `Node`."""

from collections.abc import Callable

from holdfast.log.reading.cursor import ReadResult
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.reading.starts import FoundStart, StartQuery
from holdfast.log.record import Record
from holdfast.node.session.connection import Connection
from holdfast.node.session.cursor import LiveLane
from holdfast.node.session.session import Group, Inflight, Session
from holdfast.protocol.mqtt.packets import Connect, Properties


class Effect:
    """The base of all effects; the driver dispatches on the class."""


Found = list[tuple[int, Record | None]]
"""The records of a FetchInflight by their packet ids or indexes; None: the log has no record."""


class ReadLog(Effect):
    """A read of the log for a reader that is behind; the driver replies with Node.handle_read.

    `done` of a read receives the result in place of the node; None: the disk here is damaged, or a
    partition is not stored here any more. Such a read is for another node, or the local part of
    one, and has no cursor.
    """

    done: Callable[[ReadResult | None], None] | None = None

    def __init__(
        self,
        cursor: Session | Group | None,
        connection: Connection | None,
        positions: list[int],
        limits: list[int],
        interests: list[ReadInterest],
        records_max: int,
        bytes_max: int,
    ) -> None:
        self.cursor = cursor
        # The lane that reads, in place of the cursor.
        self.lane: LiveLane | None = None
        self.number = 0 if cursor is None else cursor.read_number
        # The connection that the read is for. A result for a connection that is closed is ignored.
        self.connection = connection
        self.positions = positions
        self.limits = limits
        self.interests = interests
        self.records_max = records_max
        self.bytes_max = bytes_max


class FetchInflight(Effect):
    """A read of the records of unfinished deliveries; the driver replies with Node.handle_fetched.
    It may leave out the rest once it has read `bytes_max` of them. `done`: see ReadLog."""

    done: Callable[[Found | None], None] | None = None

    def __init__(
        self,
        reader: Session | Group | None,
        connection: Connection | None,
        wanted: list[tuple[int, int, int]],
        bytes_max: int,
        entries: list[Inflight] | None = None,
    ) -> None:
        """`entries`: for a group, the wanted entries in the order of their index."""
        self.reader = reader
        self.connection = connection
        # (packet id of the session, or index of the group's entry; partition, offset)
        self.wanted = wanted
        self.bytes_max = bytes_max
        self.entries = [] if entries is None else entries


class FindStarts(Effect):
    """A search for the offsets at which subscriptions begin; the driver replies with
    Node.handle_starts. At most one is under way for a connection. `done`: see ReadLog."""

    done: Callable[[list[FoundStart] | None], None] | None = None

    def __init__(
        self,
        connection: Connection | None,
        plan: object,
        wanted: list[StartQuery],
        limits: list[int],
    ) -> None:
        self.connection = connection
        # broker.delivery.replay.StartPlan
        self.plan = plan
        self.wanted = wanted
        self.limits = limits


AnyRead = ReadLog | FetchInflight | FindStarts


class CheckPassword(Effect):
    """A verification of credentials off the event loop; the driver replies with
    Node.handle_password_checked."""

    def __init__(self, connection: Connection, username: str, password: bytes) -> None:
        self.connection = connection
        self.username = username
        self.password = password


class AskSources(Effect):
    """The question to the sources of identity who the client of a CONNECT is; the driver replies
    with Node.handle_answer."""

    def __init__(self, connection: Connection, connect: Connect) -> None:
        self.connection = connection
        self.client_id = connect.client_id
        self.username = connect.username
        self.password = connect.password


class AskRights(Effect):
    """The question to the hooks which rights an authenticated client has; the driver replies with
    Node.handle_rights. `extra`: properties for its CONNACK."""

    def __init__(self, connection: Connection, extra: Properties | None) -> None:
        self.connection = connection
        self.extra = extra


Proceed = Callable[[object, Connection], None]
"""The continuation of what waits for answers. The first argument is the NodeState."""


class AskTopics(Effect):
    """The question to a service whether a client may publish or subscribe to topics; the driver
    replies with `topic_rights.questions.handle_topics`."""

    def __init__(
        self, connection: Connection, action: str, topics: list[str], proceed: Proceed | None
    ) -> None:
        """`proceed` is called after the answers; None: the packet is in the connection's input."""
        self.connection = connection
        self.action = action
        self.topics = topics
        self.proceed = proceed


class RunCommands(Effect):
    """The commands of a message to `$CONTROL`, to be run off the event loop; the driver replies
    with `control.finish_commands`."""

    def __init__(self, connection: Connection, payload: bytes, qos: int, packet_id: int) -> None:
        self.connection = connection
        self.payload = payload
        self.qos = qos
        self.packet_id = packet_id


class ResumeInput(Effect):
    """The permission to read from the connection again. The driver first processes the bytes that
    its reader has buffered."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection


class Cut(Effect):
    """The order to close the socket at once. Its descriptor is needed, and no bytes wait to be
    sent."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection


class Note(Effect):
    """A line for the log of the process. `level` is a name of logging's, in lower case."""

    def __init__(self, level: str, event: str, fields: dict[str, object]) -> None:
        self.level = level
        self.event = event
        self.fields = fields
