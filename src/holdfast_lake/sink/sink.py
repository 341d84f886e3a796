"""The Spark sink: `df.write.format("holdfast")` and `df.writeStream.format("holdfast")`.

The options are in options.py, the columns in rows.py, and the numbering that makes a repeated task
take effect once in identity.py. A task takes rows and returns a commit message. Subscribers get its
messages at once, and messages cannot be withdrawn. So `commit` and `abort` only report.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
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

from holdfast.protocol.mqtt.fields import read_varint
from holdfast_lake.sink.identity import (
    Origins,
    check_overlap,
    counted_producer,
    first_sequence,
    stream_job,
    write_job,
)
from holdfast_lake.sink.link import BrokerLink, PublishError, link_options, tls_context
from holdfast_lake.sink.options import OFF, REQUIRE, SinkOptions, parse
from holdfast_lake.sink.publisher import Publisher
from holdfast_lake.sink.rows import Counted, RowEncoder, RowError, check_columns, ordered
from holdfast_lake.source.options import OptionError

logger = logging.getLogger("holdfast.pipeline")

EXAMPLES_MAX: Final = 3
"""The most rejected rows of a task that are reported one by one."""


@dataclass(frozen=True)
class Task:
    """The part of a job that is the same in every attempt. `job` comes from identity.py."""

    job: str
    batch: int
    partition: int


@dataclass
class SinkCommit(WriterCommitMessage):
    """The result of one task."""

    rows: int = 0
    refused: int = 0
    examples: list[str] = field(default_factory=list)
    resent: int = 0
    """The number of messages that were sent again, after a refusal or a lost connection."""
    connections: int = 0
    at_least_once: str = ""
    """The reason why the broker does not recognise repetitions. Empty if it does."""
    origins: dict[int | str, tuple[int, int]] = field(default_factory=dict)
    """The first and the last offset per origin partition."""


class TaskWriter:
    """One attempt of a task. `done` is valid after `write` has returned."""

    def __init__(self, options: SinkOptions, task: Task) -> None:
        self.done = SinkCommit()
        self._options = options
        self._task = task

    def write(self, batches: Iterator[pa.RecordBatch]) -> SinkCommit:
        """Publishes the rows, and returns when the server has everything.

        A task without rows makes no connection. Raises PublishError, RowError and IdentityError.
        """
        options = self._options
        if options.order_by:
            batches = ordered(batches, options.order_by)
        publisher = self._publisher()
        encoder: RowEncoder | None = None
        try:
            for batch in batches:
                if encoder is None:
                    encoder = RowEncoder(options, self._numbering(batch.schema), self._refuse)
                self.done.rows += batch.num_rows
                for first, topic, tail in encoder.messages(batch):
                    publisher.publish(first, topic, tail)
                publisher.push()
            publisher.finish()
        finally:
            publisher.close()
        if encoder is not None and encoder.unnumbered and not self.done.at_least_once:
            self.done.at_least_once = (
                f"{encoder.unnumbered} rows were not QoS 1, the only one with producer sequences"
            )
        self.done.resent = publisher.window.resent
        self.done.connections = publisher.connections
        return self.done

    def _numbering(self, schema: pa.Schema) -> Counted | Origins | None:
        task = self._task
        if self._options.exactly_once == OFF:
            return None
        if "offset" in schema.names:
            origins = Origins(task.job)
            self.done.origins = origins.ranges
            return origins
        return Counted(counted_producer(task.job, task.partition), first_sequence(task.batch))

    def _publisher(self) -> Publisher:
        options = self._options
        task = self._task
        client_id = f"{options.client_id_prefix}-{task.job[:8]}-{task.partition}-{token_hex(4)}"
        # Each task begins with another server, which spreads the load.
        start = task.partition % len(options.servers)
        tls = None
        if any(server.is_secure for server in options.servers):
            tls = tls_context(options.ca_file, options.certificate_file, options.key_file)
        return Publisher(
            options.servers[start:] + options.servers[:start],
            link_options(
                options.level,
                client_id,
                options.username,
                options.password,
                asks=options.exactly_once != OFF,
            ),
            tls=tls,
            server_name=options.server_name,
            inflight_max=options.inflight_max,
            retry_timeout_s=options.retry_timeout_s,
            on_connected=self._connected,
            on_refused=self._refuse_frame,
        )

    def _connected(self, link: BrokerLink) -> None:
        if link.supports_sequences or self._options.exactly_once == OFF:
            return
        text = f"{link.server.address} does not say that it knows producer sequences"
        if self._options.exactly_once == REQUIRE:
            raise PublishError(
                f"{text}, so a repeated task would publish its messages twice: publish to a "
                "Holdfast broker, or set exactlyOnce=prefer"
            )
        self.done.at_least_once = text

    def _refuse_frame(self, frame: bytes, why: str) -> None:
        position = read_varint(frame, 1, len(frame))[1]
        length = frame[position] << 8 | frame[position + 1]
        topic = frame[position + 2 : position + 2 + length].decode()
        self._refuse(f"the broker does not take a message to {topic!r}: {why}")

    def _refuse(self, why: str) -> None:
        """Counts a row that cannot be a message, or ends the task (failOnRefused)."""
        if self._options.fail_on_refused:
            raise RowError(f"{why} (failOnRefused=false leaves such rows out)")
        self.done.refused += 1
        if self.done.refused <= EXAMPLES_MAX:
            self.done.examples.append(why)
            logger.warning("left out: %s", why)


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
