"""An exactly-once sink: messages of a broker's log in a table of PostgreSQL.

    pip install 'psycopg[binary]'
    python examples/log_to_postgresql.py 127.0.0.1:18083 'plant/#' postgresql://user:pw@host/db

The rows and the position in the log are one transaction. So kill it at any time, and start it
again: each message has one row. It follows the log until it is stopped.
"""

import argparse
import sys

import psycopg

from holdfast.client.log import (
    AdminError,
    LogClient,
    LogGapError,
    LogOptionError,
    LogTruncatedError,
    OffsetConflict,
    OffsetTable,
)


def run(admin: str, topics: str, url: str) -> None:
    """Write rows until the process ends."""
    with psycopg.connect(url) as database:
        database.execute(
            "create table if not exists readings (topic text, time_us bigint, value bytea)"
        )
        offsets = OffsetTable(database, "readings")
        start = offsets.load() or "earliest"  # commits
        with LogClient(admin).read(topics, start=start, follow=True) as cursor:
            for messages in cursor.batches(1000):
                rows = [(each.topic, each.timestamp_us, each.payload) for each in messages]
                with database.transaction(), database.cursor() as writer:
                    writer.executemany("insert into readings values (%s, %s, %s)", rows)
                    offsets.store(cursor.position)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Write messages of a broker's log to a table of PostgreSQL."
    )
    parser.add_argument("admin", help="the broker's admin port: 127.0.0.1:18083")
    parser.add_argument("topics", help="an MQTT filter: 'plant/#'")
    parser.add_argument("url", help="the database: postgresql://user:pw@host/db")
    given = parser.parse_args()
    try:
        run(given.admin, given.topics, given.url)
    except KeyboardInterrupt:
        return 130
    except (psycopg.Error, OffsetConflict) as error:
        print(f"log_to_postgresql: {error}", file=sys.stderr)
    except (AdminError, LogGapError, LogOptionError, LogTruncatedError) as error:
        print(f"log_to_postgresql: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
