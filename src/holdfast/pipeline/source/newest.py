"""Reads a log's newest messages in the driver, without Spark's Java."""

import pyarrow as pa

from holdfast.client.log.reading.offsets import OffsetRange
from holdfast.log.columns.decode import SCHEMA
from holdfast.pipeline.source.options import SourceOptions
from holdfast.pipeline.source.source import LogAccess, read_work


def newest_messages(options: SourceOptions, count: int) -> tuple[list[tuple[str, bytes, int]], str]:
    """Returns topic, payload and time of the last messages, about `count`, an equal share per
    partition, and a hint if messages are not stored. The time is that of storing, in microseconds
    since 1970.

    Raises the errors of the source.
    """
    schema = pa.schema([SCHEMA.field(name) for name in ("topic", "payload", "timestamp")])
    access = LogAccess(options)
    try:
        bounds = access.bounds()
        share = -(-count // max(1, len(bounds)))
        ranges = [
            OffsetRange(partition, max(bound.first, bound.end - share), bound.end)
            for partition, bound in bounds.items()
            if bound.end > bound.first
        ]
        found: list[tuple[str, bytes, int]] = []
        for work in access.plan_tasks(ranges, options.topics, tasks=1):
            for batch in read_work(options, work, schema):
                times = batch.column("timestamp").cast(pa.int64()).to_pylist()
                topics, payloads = (batch.column(name).to_pylist() for name in schema.names[:2])
                found += zip(topics, payloads, times, strict=True)
        return found, access.qos0_hint()
    finally:
        access.close()
