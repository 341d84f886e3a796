"""The newest messages of a log, read by the driver without Spark's Java."""

import pyarrow as pa

from holdfast.client.log.reading.offsets import OffsetRange
from holdfast.log.columns.decode import SCHEMA
from holdfast.pipeline.source.options import SourceOptions
from holdfast.pipeline.source.source import LogAccess, read_work


def newest_messages(options: SourceOptions, count: int) -> list[tuple[str, bytes]]:
    """Return topic and payload of the last messages, about `count`, an equal share per partition.

    Raises the errors of the source.
    """
    schema = pa.schema([SCHEMA.field(name) for name in ("topic", "payload")])
    access = LogAccess(options)
    try:
        bounds = access.bounds()
        share = -(-count // max(1, len(bounds)))
        ranges = [
            OffsetRange(partition, max(bound.first, bound.end - share), bound.end)
            for partition, bound in bounds.items()
            if bound.end > bound.first
        ]
        found: list[tuple[str, bytes]] = []
        for work in access.plan_tasks(ranges, options.topics, tasks=1):
            for batch in read_work(options, work, schema):
                topics, payloads = (batch.column(name).to_pylist() for name in schema.names)
                found += zip(topics, payloads, strict=True)
        return found
    finally:
        access.close()
