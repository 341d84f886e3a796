"""An exactly-once sink: messages of a broker's log in a table of PostgreSQL.

    pip install 'psycopg[binary]'
    python examples/log_to_postgresql.py 127.0.0.1:18083 'plant/#' postgresql://user:pw@host/db

The rows and the position in the log are one transaction. So kill it at any time, and start it
again: each message has one row. It follows the log until it is stopped.
"""

import sys

import psycopg

from holdfast.client.log import LogClient, OffsetTable


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


if __name__ == "__main__":
    run(*sys.argv[1:4])
