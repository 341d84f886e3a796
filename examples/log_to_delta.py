"""An exactly-once sink: messages of a broker's log in a Delta table, without Spark.

    pip install '.[arrow]' deltalake
    python examples/log_to_delta.py 127.0.0.1:18083 'plant/#' lake/messages

The rows and the position in the log are one commit of the table. Delta keeps a number for each
application beside the rows; here that is the next offset of each log partition. So kill it at any
time, and start it again: each message has one row. Delta refuses the commit of a second process
with the same position.

It commits every 10 seconds (`--every-s`) what has arrived. delta-rs does not sync files to a local
disk, so a power cut can damage the last commits there. On an object store it cannot.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError

from holdfast.client.log import (
    AdminError,
    LogClient,
    LogCursor,
    LogGapError,
    LogOptionError,
    LogTruncatedError,
    Position,
)

COLUMNS = "topic,payload,timestamp,partition,offset"
GENERATION = "holdfast/generation"
"""The name under which Delta keeps the generation of the log."""
COMMIT_BYTES_MAX = 64 << 20
"""About the most bytes of rows in one commit."""


class DeltaSink:
    """A Delta table, and the position in the log behind its rows.

    The table is opened once. A commit therefore conflicts with each commit of another process since
    then, and both cannot store the same messages.
    """

    def __init__(self, path: str, schema: pa.Schema) -> None:
        """Open the table, or make it."""
        self._table = DeltaTable.create(path, schema, mode="ignore")

    def load(self, partitions: Iterable[int]) -> Position:
        """Return the stored position. It has no offset of a partition before its first commit."""
        found = {each: self._table.transaction_version(_application(each)) for each in partitions}
        offsets = {each: offset for each, offset in found.items() if offset is not None}
        return Position(offsets, self._table.transaction_version(GENERATION) or 0)

    def append(self, rows: pa.Table, position: Position) -> None:
        """Commit rows and the position behind them. Raises CommitFailedError if another process
        has committed a position meanwhile."""
        numbers = [Transaction(_application(p), at) for p, at in position.offsets.items()]
        numbers.append(Transaction(GENERATION, position.generation or 0))
        properties = CommitProperties(app_transactions=numbers)
        write_deltalake(self._table, rows, mode="append", commit_properties=properties)


def _application(partition: int) -> str:
    """The name under which Delta keeps the offset of a partition."""
    return f"holdfast/{partition}"


def tables(cursor: LogCursor) -> Iterator[pa.Table]:
    """Yield the rows of a read, about COMMIT_BYTES_MAX at a time."""
    found: list[pa.RecordBatch] = []
    for batch in cursor.arrow(COLUMNS):
        found.append(batch)
        if sum(each.nbytes for each in found) >= COMMIT_BYTES_MAX:
            yield pa.Table.from_batches(found)
            found = []
    if found:
        yield pa.Table.from_batches(found)


def run(admin: str, topics: str, path: str, every_s: float = 10.0) -> None:
    """Write rows until the process ends."""
    log = LogClient(admin)
    with log.read(topics) as cursor:
        sink = DeltaSink(path, cursor.arrow_reader(COLUMNS).schema)
        position = sink.load(cursor.position.offsets)
    while True:
        with log.read(topics, start=position) as cursor:
            for rows in tables(cursor):
                sink.append(rows, cursor.position)
            position = cursor.position
        time.sleep(every_s)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Write messages of a broker's log to a Delta table, each once."
    )
    parser.add_argument("admin", help="the broker's admin port: 127.0.0.1:18083")
    parser.add_argument("topics", help="an MQTT filter: 'plant/#'")
    parser.add_argument(
        "table", help="a directory, or a URL that delta-rs takes: s3://bucket/table"
    )
    parser.add_argument("--every-s", type=float, default=10.0, help="seconds between commits (10)")
    given = parser.parse_args()
    try:
        run(given.admin, given.topics, given.table, given.every_s)
    except KeyboardInterrupt:
        return 130
    except CommitFailedError as error:
        print(f"log_to_delta: {error} Does another process write {given.table}?", file=sys.stderr)
    except (AdminError, LogGapError, LogOptionError, LogTruncatedError) as error:
        print(f"log_to_delta: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
