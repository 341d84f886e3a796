"""The Spark sink: `df.write.format("holdfast")` and `df.writeStream.format("holdfast")`.

The options are in options.py, the columns in rows.py, and the numbering that makes a repeated task
take effect once in identity.py. Subscribers get a task's messages at once, and messages cannot be
withdrawn. So `commit` and `abort` only report.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from holdfast.pipeline.sink.identity import check_overlap, stream_job, write_job
from holdfast.pipeline.sink.options import OFF, parse
from holdfast.pipeline.sink.rows import RowError, check_columns
from holdfast.pipeline.sink.task import SinkCommit, Task, TaskWriter
from holdfast.pipeline.source.options import OptionError

logger = logging.getLogger("holdfast.pipeline")

QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"
"""The local properties in which Spark gives the tasks of a stream their query and batch."""

_warned: set[str] = set()
"""The warnings that this process has logged."""
TOLD_MAX: Final = 100
"""The most different warnings that this process logs."""


class HoldfastWriter(DataSourceArrowWriter):
    """The writer of a batch write. It is made once, on the driver; the tasks have copies."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise OptionError("a broker's log has no overwrite: use mode('append')")
        self.options = parse(options, streaming=False)
        check_columns(schema, self.options)
        self.job = write_job(self.options.write_id or uuid4().hex)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SinkCommit:
        """Publishes the rows of one task."""
        task = Task(self.job, self.options.write_version, _context().partitionId())
        return TaskWriter(self.options, task).write(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Reports the write."""
        report(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Reports the failure."""
        report_abort(messages)


class HoldfastStreamWriter(DataSourceStreamArrowWriter):
    """The writer of a streaming query. Spark makes a new one whenever it needs one."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise OptionError("messages can only be added: use outputMode('append') or 'update'")
        self.options = parse(options, streaming=True)
        check_columns(schema, self.options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SinkCommit:
        """Publishes the rows of one task."""
        context = _context()
        query_id = context.getLocalProperty(QUERY_ID)
        batch = context.getLocalProperty(BATCH_ID)
        if query_id is None or batch is None:
            if self.options.exactly_once != OFF:
                raise RowError(
                    "this Spark does not tell its tasks the query and the batch, so the rows "
                    "cannot be numbered: set exactlyOnce=off"
                )
            query_id, batch = uuid4().hex, "0"
        task = Task(stream_job(query_id), int(batch), context.partitionId())
        return TaskWriter(self.options, task).write(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Reports one micro-batch."""
        report(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Reports the failure of one micro-batch."""
        report_abort(messages)


def report(messages: Sequence[WriterCommitMessage | None]) -> None:
    """Reports a write on the driver after all tasks have succeeded.

    Raises IdentityError if rows may be missing after all, so that Spark does not count the batch as
    done.
    """
    done = [message for message in messages if isinstance(message, SinkCommit)]
    check_overlap([one.origins for one in done])
    refused = sum(one.refused for one in done)
    if refused:
        examples = "; ".join(example for one in done for example in one.examples)
        logger.warning("%d rows were left out, such as: %s", refused, examples)
    for reason in {one.at_least_once for one in done} - {""}:
        _warn_once(f"published at least once, not exactly once: {reason}")


def report_abort(messages: Sequence[WriterCommitMessage | None]) -> None:
    """Reports a failed write. Its published messages stay published."""
    rows = sum(message.rows for message in messages if isinstance(message, SinkCommit))
    logger.warning(
        "the write failed; what its tasks have published (%d rows by those that ended well) stays "
        "published",
        rows,
    )


def _warn_once(text: str) -> None:
    if text not in _warned and len(_warned) < TOLD_MAX:
        _warned.add(text)
        logger.warning("%s", text)


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None
    return context
