"""One task of the sink: it takes rows and returns a commit message."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from holdfast.pipeline.sink.dialer import PublishError
from holdfast.pipeline.sink.identity import Origins, counted_producer, first_sequence
from holdfast.pipeline.sink.link import BrokerLink, link_options, tls_context
from holdfast.pipeline.sink.options import OFF, REQUIRE, SinkOptions
from holdfast.pipeline.sink.publisher import Publisher
from holdfast.pipeline.sink.rows import Counted, RowEncoder, RowError, ordered
from holdfast.protocol.mqtt.fields import read_varint

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
