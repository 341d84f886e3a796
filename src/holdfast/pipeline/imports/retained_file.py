"""Keeps a broker's retained messages in a temporary file, by topic."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pyarrow as pa

from holdfast.pipeline.imports.errors import ImportFailed

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
        topics: list[str] = []
        payloads: list[bytes] = []
        size = 0
        with _explained():
            for topic, payload in self._db.execute("SELECT topic, payload FROM retained"):
                topics.append(topic)
                payloads.append(payload)
                size += len(payload)
                if len(topics) >= BATCH_ROWS or size >= BATCH_BYTES:
                    yield message_batch(topics, payloads)
                    topics, payloads, size = [], [], 0
        if topics:
            yield message_batch(topics, payloads)


def message_batch(topics: list[str], payloads: list[bytes]) -> pa.RecordBatch:
    """Returns messages as the rows of the sink."""
    columns = [pa.array(topics, pa.string()), pa.array(payloads, pa.binary())]
    return pa.RecordBatch.from_arrays(columns, names=["topic", "payload"])


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise ImportFailed(f"the temporary file of retained messages: {error}") from None
