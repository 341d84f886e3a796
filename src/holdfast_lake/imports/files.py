"""Imports files, the retained messages of another broker, and messages of a lake once more.

Of a file, every row is one message, exactly once. It is read twice. The first time every row is
checked and the content is hashed, and nothing is sent. The second time the rows are published with
producer sequences: the producer is the hash of the content and of the rule, and the sequence is the
number of the row. So the broker drops what an earlier or killed import of the same file has stored.

A retained message is published only if this broker retains another one or none for its topic. So an
import that is repeated, or was killed, publishes no message twice.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date, timedelta
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from threading import Event
from typing import Final

import pyarrow as pa

from holdfast.client.blocking import Client
from holdfast.client.errors import ClientError
from holdfast.client.log import LogClient, LogGapError, LogMessage, LogOptionError
from holdfast.client.log.position import EARLIEST, LATEST, resolve_place
from holdfast.client.options import Options
from holdfast.client.protocol.effects import Message
from holdfast.client.servers import Server
from holdfast.protocol.mqtt.properties import USER_PROPERTY, encode_block
from holdfast_lake.imports.rows import (
    CSV_FORMAT,
    BadRow,
    CsvFormat,
    ImportFailed,
    ImportRule,
    kind_of,
    read_rows,
)
from holdfast_lake.sink.identity import write_job
from holdfast_lake.sink.link import PublishError, tls_context
from holdfast_lake.sink.options import SinkOptions, parse
from holdfast_lake.sink.rows import RowError
from holdfast_lake.sink.sink import Task, TaskWriter

BYTES_MAX: Final = 1 << 30
"""The most bytes of topics and payloads of one import. They are on disk."""
BATCH_ROWS: Final = 1000
BATCH_BYTES: Final = 4 << 20
"""The bytes of payloads after which a batch is published."""


class RetainedFile:
    """Retained messages on disk, so that their number costs no memory.

    The file has no name and disappears with the process. Any thread may use it, but never two at
    once. Each method raises ImportFailed if the disk fails or is full.
    """

    def __init__(self) -> None:
        self.bytes_left = BYTES_MAX
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("CREATE TABLE retained (topic TEXT PRIMARY KEY, payload BLOB)")

    def __enter__(self) -> "RetainedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def __len__(self) -> int:
        [(count,)] = self._db.execute("SELECT count(*) FROM retained")
        return int(count)

    def put(self, topic: str, payload: bytes) -> None:
        """Adds a message, or replaces that of its topic. Raises ImportFailed if there are too many
        bytes."""
        self.bytes_left -= len(topic) + len(payload)
        if self.bytes_left < 0:
            raise ImportFailed(
                f"the retained messages are more than {BYTES_MAX >> 20} MiB: import them in parts, "
                "with --filter"
            )
        with _explained():
            self._db.execute("INSERT OR REPLACE INTO retained VALUES (?, ?)", (topic, payload))

    def drop(self, topic: str, payload: bytes) -> None:
        """Removes the message of a topic if it has this payload."""
        with _explained():
            self._db.execute(
                "DELETE FROM retained WHERE topic = ? AND payload = ?", (topic, payload)
            )

    def clear(self) -> None:
        """Removes all messages."""
        self.bytes_left = BYTES_MAX
        with _explained():
            self._db.execute("DELETE FROM retained")

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields all messages in batches with the columns of the sink."""
        with _explained():
            yield from batched(self._db.execute("SELECT topic, payload FROM retained"))


def batched(messages: Iterable[tuple[str, bytes]]) -> Iterator[pa.RecordBatch]:
    """Yields messages as rows of the sink, in batches."""
    rows: list[tuple[str, bytes]] = []
    size = 0
    for message in messages:
        rows.append(message)
        size += len(message[1])
        if len(rows) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield _batch(rows)
            rows, size = [], 0
    if rows:
        yield _batch(rows)


def _batch(rows: list[tuple[str, bytes]]) -> pa.RecordBatch:
    topics, payloads = zip(*rows, strict=True)
    columns = [pa.array(topics, pa.string()), pa.array(payloads, pa.binary())]
    return pa.RecordBatch.from_arrays(columns, names=["topic", "payload"])


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise ImportFailed(f"the temporary file of retained messages: {error}") from None


BAD_SHOWN: Final = 5
"""The bad rows that an error names."""
TOPICS_MAX: Final = 100_000
"""The most topics that are counted one by one."""


class TopicCount:
    """The number of different topics, without their names: a topic has up to 65,535 bytes. A
    collision of two hashes of 64 bits would count one topic less."""

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def add(self, topic: str) -> None:
        """Counts a topic, if it is new and there are few."""
        if len(self._hashes) <= TOPICS_MAX:
            self._hashes.add(hash(topic))

    def __str__(self) -> str:
        count = len(self._hashes)
        return f"{count:,}" if count <= TOPICS_MAX else f"more than {TOPICS_MAX:,}"


@dataclass
class FileImport:
    """One file and its rule. `check` comes before `publish`."""

    path: Path
    rule: ImportRule
    kind: str = ""
    """The format. Empty: by the file's name."""
    form: CsvFormat = CSV_FORMAT
    good: int = 0
    bad: int = 0
    examples: list[str] = field(default_factory=list)
    """The first bad rows, with their places."""
    topics: TopicCount = field(default_factory=TopicCount)
    names_no_zone: bool = False
    """Whether the time of the first row is a text without a zone."""
    _newly_good: int = 0
    _digest: str = ""
    _stamp: tuple[int, int] = (0, 0)

    def check(self) -> None:
        """Reads the file without sending anything. Raises ImportFailed if it cannot be read."""
        self.kind = self.kind or kind_of(self.path)
        self._stamp = self._stat()
        self._newly_good = 0
        for number, message in self._messages():
            if isinstance(message, BadRow):
                self.bad += 1
                if self.bad <= BAD_SHOWN:
                    self.examples.append(f"{self.path}:{number}: {message}")
            else:
                self.good += 1
                self.topics.add(message[0])
        self._digest = self._hash()

    def publish(self, options: Mapping[str, str]) -> int:
        """Publishes the good rows, and returns their number when the broker has them all.

        `options` are those of the sink. Raises ImportFailed.
        """
        wanted = {**options, "exactlyOnce": "require", "writeId": self._digest}
        sink = parse({"clientIdPrefix": "import", **wanted}, streaming=False)
        writer = TaskWriter(sink, Task(write_job(self._digest), 0, 0))
        try:
            writer.write(self._batches())
        except (PublishError, RowError) as error:
            raise ImportFailed(
                f"{self.path}: {error}. A part of its {self.good:,} rows may be in the log. Import "
                "the unchanged file again: the rows that are there are not stored twice"
            ) from None
        return writer.done.rows

    def _batches(self) -> Iterator[pa.RecordBatch]:
        yield from batched(each for _, each in self._messages() if not isinstance(each, BadRow))
        if self._stat() != self._stamp:
            raise ImportFailed(
                f"{self.path} was written to while it was imported: import a file that is complete"
            )

    def _messages(self) -> Iterator[tuple[int, tuple[str, bytes] | BadRow]]:
        for number, row in read_rows(self.path, self.kind, self.form):
            found: tuple[str, bytes] | BadRow
            if isinstance(row, BadRow):
                found = row
            else:
                try:
                    found = self.rule.message(row)
                    if self.good == 0:
                        self.names_no_zone = self.rule.names_no_zone(row)
                    self._newly_good += self.rule.is_newly_good(row)
                except BadRow as error:
                    found = error
            yield number, found

    def _hash(self) -> str:
        digest = sha256(repr((self.kind, self.rule)).encode())
        later = (self.form, self.rule.zone, self.rule.time_format, self._newly_good > 0)
        if later != (CSV_FORMAT, None, None, False):  # else the producer is that of 0.1
            digest.update(repr(later).encode())
        try:
            with open(self.path, "rb") as file:
                while part := file.read(1 << 20):
                    digest.update(part)
        except OSError as error:
            raise ImportFailed(f"{self.path} cannot be read: {error.strerror}") from None
        return digest.hexdigest()

    def _stat(self) -> tuple[int, int]:
        with suppress(OSError):
            found = self.path.stat()
            return found.st_size, found.st_mtime_ns
        return 0, 0


LEVELS: Final = (5, 4)
"""The protocol levels that are tried. Mosquitto before 1.6 has no MQTT 5."""

Take = Callable[[str, bytes], None]
"""A call with the topic and the payload of a retained message."""


@dataclass
class RetainedImport:
    """The result of an import."""

    found: int
    """The retained messages of the other broker."""
    published: int


class RetainedSubscriber:
    """One connection that reads retained messages. Its callbacks run in the client's thread.

    MQTT does not say which retained message is the last. The end is `quiet_s` without another one.
    Messages that are published meanwhile do not count: on a busy broker there is no silence.
    """

    def __init__(self, take: Take, quiet_s: float) -> None:
        self._take = take
        self._quiet_s = quiet_s
        self._last_at = 0.0
        self._failure: Exception | None = None
        self._has_failed = Event()

    def on_message(self, message: Message) -> None:
        """Takes a message. A list of those that wait would need a bound, and a client that stops to
        read at its bound never sees the SUBACK behind them."""
        if not message.retain or not message.payload or self._failure is not None:
            return
        try:
            self._take(message.topic, message.payload)
        except ImportFailed as error:
            self.fail(error)
        self._last_at = time.monotonic()

    def fail(self, error: Exception) -> None:
        """Ends the wait with an error."""
        self._failure = self._failure or error
        self._has_failed.set()

    def read(self, client: Client, filters: Sequence[str]) -> None:
        """Subscribes and returns after the last retained message. Raises ClientError and
        ImportFailed."""
        for each in filters:
            client.subscribe((each, 1))
        self._last_at = max(self._last_at, time.monotonic())
        while (left_s := self._last_at + self._quiet_s - time.monotonic()) > 0:
            self._has_failed.wait(left_s)
            if self._failure is not None:
                raise self._failure


def read_retained(
    sink: SinkOptions, filters: Sequence[str], quiet_s: float, take: Take, clear: Callable[[], None]
) -> None:
    """Calls `take` for each retained message of the first server of some options. `clear` begins
    another attempt.

    Raises ImportFailed.
    """
    server = sink.servers[0]
    errors: list[ClientError] = []
    for level in LEVELS:
        clear()
        reader = RetainedSubscriber(take, quiet_s)
        try:
            with _client(sink, server, level, reader) as client:
                return reader.read(client, filters)
        except ClientError as error:
            errors.append(error)
    raise ImportFailed(f"{server.address}: {errors[0]}")


def _client(sink: SinkOptions, server: Server, level: int, reader: RetainedSubscriber) -> Client:
    options = Options(
        level=level,
        client_id=f"import-{token_hex(6)}",
        username=sink.username,
        password=sink.password.encode() if sink.password is not None else None,
    )
    tls = None
    if server.is_secure:
        tls = tls_context(sink.ca_file, sink.certificate_file, sink.key_file)
    return Client(
        servers=[server],
        options=options,
        tls=tls,
        on_message=reader.on_message,
        on_connection_lost=reader.fail,
    )


def import_retained(
    source: Mapping[str, str], target: Mapping[str, str], filters: list[str], quiet_s: float
) -> RetainedImport:
    """Publishes the retained messages of one broker at another, both given by options of the sink.

    Raises ImportFailed.
    """
    sink = parse({"clientIdPrefix": "import", **target, "retain": "true"}, streaming=False)
    with RetainedFile() as messages:
        theirs = parse(source, streaming=False)
        read_retained(theirs, filters, quiet_s, messages.put, messages.clear)
        found = len(messages)
        read_retained(sink, filters, quiet_s, messages.drop, lambda: None)
        new = len(messages)
        try:
            writer = TaskWriter(sink, Task(write_job(token_hex(16)), 0, 0))
            writer.write(messages.batches())
        except (PublishError, RowError) as error:
            raise ImportFailed(
                f"{error}. A part of the {new:,} messages may be there: import again, and only "
                "the others are published"
            ) from None
    return RetainedImport(found, new)


ORIGIN_TIME: Final = "hf-origin-time"
"""The user property of a message that a replay publishes: when the broker stored the first one, in
microseconds since 1970."""


def replay_lake(
    lake: str,
    filters: Sequence[str],
    start: str | None,
    end: str | None,
    options: Mapping[str, str],
) -> int:
    """Publishes messages of a lake again, and returns their number when the broker has them all.

    A message keeps its properties and gets ORIGIN_TIME. It is not retained, whatever it was: the
    past would replace the present. Its partition and offset in the lake number it, so the same
    replay stores nothing twice, also after the lake has grown. Raises ImportFailed and LakeError.
    """
    digest = sha256(repr((str(lake), list(filters), start, end)).encode()).hexdigest()
    wanted = {"clientIdPrefix": "replay", **options, "exactlyOnce": "require", "writeId": digest}
    sink = parse(wanted, streaming=False)
    try:
        first = resolve_place("--from", start or EARLIEST)
        after = resolve_place("--to", _end_of(end) or LATEST)
        if isinstance(first, int) and isinstance(after, int) and after <= first:
            raise ImportFailed(f"no time is from --from {start} to --to {end}")
        reading = LogClient.offline(lake=lake).read(filters, start=start, end=_end_of(end))
    except LogOptionError as error:
        raise ImportFailed(str(error)) from None
    try:
        with reading as cursor:
            writer = TaskWriter(sink, Task(write_job(digest), 0, 0))
            writer.write(map(_replayed, cursor.batches(BATCH_ROWS)))
    except (LogGapError, PublishError, RowError) as error:
        raise ImportFailed(
            f"{error}. A part of the messages may be in the log. The same replay again publishes "
            "only the others"
        ) from None
    return writer.done.rows


def _end_of(end: str | None) -> str | None:
    """Returns the end of a day, which is included as in a backfill, or another time as it is."""
    with suppress(ValueError, TypeError, OverflowError):
        return (date.fromisoformat(end or "") + timedelta(days=1)).isoformat()
    return end


def _replayed(messages: Sequence[LogMessage]) -> pa.RecordBatch:
    """Returns messages of a lake as the rows of the sink."""
    blocks = []
    for message in messages:
        time = encode_block({USER_PROPERTY: [(ORIGIN_TIME, str(message.timestamp_us))]})
        blocks.append(message.encoded_properties + time)
    columns = {
        "topic": pa.array([each.topic for each in messages], pa.string()),
        "payload": pa.array([each.payload for each in messages], pa.binary()),
        "properties": pa.array(blocks, pa.binary()),
        "partition": pa.array([each.partition for each in messages], pa.int32()),
        "offset": pa.array([each.offset for each in messages], pa.int64()),
    }
    return pa.RecordBatch.from_pydict(columns)
