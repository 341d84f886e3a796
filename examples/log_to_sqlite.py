"""An exactly-once sink: messages of a broker's log in a table of SQLite.

    python examples/log_to_sqlite.py 127.0.0.1:18083 'plant/#' readings.db

The rows and the position in the log are one transaction. So kill it at any time, and start it
again: each message has one row. It follows the log until it is stopped.
"""

import argparse
import sqlite3
import sys

from holdfast.client.log import (
    AdminError,
    LogClient,
    LogGapError,
    LogOptionError,
    LogTruncatedError,
    OffsetConflict,
    OffsetTable,
)


def run(admin: str, topics: str, path: str) -> None:
    """Write rows until the process ends."""
    with sqlite3.connect(path) as database:
        database.execute(
            "create table if not exists readings (topic text, time_us int, value blob)"
        )
    offsets = OffsetTable(database, "readings")
    start = offsets.load() or "earliest"
    with LogClient(admin).read(topics, start=start, follow=True) as cursor:
        for messages in cursor.batches(1000):
            rows = [(each.topic, each.timestamp_us, each.payload) for each in messages]
            with database:  # one transaction
                database.executemany("insert into readings values (?, ?, ?)", rows)
                offsets.store(cursor.position)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Write messages of a broker's log to a table of SQLite."
    )
    parser.add_argument("admin", help="the broker's admin port: 127.0.0.1:18083")
    parser.add_argument("topics", help="an MQTT filter: 'plant/#'")
    parser.add_argument("path", help="the database: readings.db")
    given = parser.parse_args()
    try:
        run(given.admin, given.topics, given.path)
    except KeyboardInterrupt:
        return 130
    except (sqlite3.Error, OffsetConflict) as error:
        print(f"log_to_sqlite: {given.path}: {error}", file=sys.stderr)
    except (AdminError, LogGapError, LogOptionError, LogTruncatedError) as error:
        print(f"log_to_sqlite: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
