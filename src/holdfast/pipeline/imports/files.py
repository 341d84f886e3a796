"""Imports files: every row is one message, exactly once.

A file is read twice. The first time every row is checked and the content is hashed, and nothing is
sent. The second time the rows are published with producer sequences: the producer is the hash of
the content and of the rule, and the sequence is the number of the row. So the broker drops
what an earlier or killed import of the same file has stored.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final

import pyarrow as pa

from holdfast.pipeline.imports.errors import BadRow, ImportFailed
from holdfast.pipeline.imports.retained_file import BATCH_BYTES, BATCH_ROWS, message_batch
from holdfast.pipeline.imports.rows import kind_of, read_rows
from holdfast.pipeline.imports.rule import ImportRule
from holdfast.pipeline.sink.dialer import PublishError
from holdfast.pipeline.sink.identity import write_job
from holdfast.pipeline.sink.options import parse
from holdfast.pipeline.sink.rows import RowError
from holdfast.pipeline.sink.task import Task, TaskWriter

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
    good: int = 0
    bad: int = 0
    examples: list[str] = field(default_factory=list)
    """The first bad rows, with their places."""
    topics: TopicCount = field(default_factory=TopicCount)
    _digest: str = ""
    _stamp: tuple[int, int] = (0, 0)

    def check(self) -> None:
        """Reads the file without sending anything. Raises ImportFailed if it cannot be read."""
        self.kind = self.kind or kind_of(self.path)
        self._stamp = self._stat()
        self._digest = self._hash()
        for number, message in self._messages():
            if isinstance(message, BadRow):
                self.bad += 1
                if self.bad <= BAD_SHOWN:
                    self.examples.append(f"{self.path}:{number}: {message}")
            else:
                self.good += 1
                self.topics.add(message[0])

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
        topics: list[str] = []
        payloads: list[bytes] = []
        size = 0
        for _, message in self._messages():
            if isinstance(message, BadRow):
                continue
            topics.append(message[0])
            payloads.append(message[1])
            size += len(message[1])
            if len(topics) >= BATCH_ROWS or size >= BATCH_BYTES:
                yield message_batch(topics, payloads)
                topics, payloads, size = [], [], 0
        if topics:
            yield message_batch(topics, payloads)
        if self._stat() != self._stamp:
            raise ImportFailed(
                f"{self.path} was written to while it was imported: import a file that is complete"
            )

    def _messages(self) -> Iterator[tuple[int, tuple[str, bytes] | BadRow]]:
        for number, row in read_rows(self.path, self.kind):
            found: tuple[str, bytes] | BadRow
            if isinstance(row, BadRow):
                found = row
            else:
                try:
                    found = self.rule.message(row)
                except BadRow as error:
                    found = error
            yield number, found

    def _hash(self) -> str:
        digest = sha256(repr((self.kind, self.rule)).encode())
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
