"""Imports the retained messages of another broker.

A message is published only if this broker retains another one or none for its topic. So an import
that is repeated, or was killed, publishes no message twice.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from threading import Event
from typing import Final

from holdfast.client.blocking import Client
from holdfast.client.errors import ClientError
from holdfast.client.options import Options
from holdfast.client.protocol.effects import Message
from holdfast.client.servers import Server
from holdfast.pipeline.imports.errors import ImportFailed
from holdfast.pipeline.imports.retained_file import RetainedFile
from holdfast.pipeline.sink.dialer import PublishError
from holdfast.pipeline.sink.identity import write_job
from holdfast.pipeline.sink.link import tls_context
from holdfast.pipeline.sink.options import SinkOptions, parse
from holdfast.pipeline.sink.rows import RowError
from holdfast.pipeline.sink.task import Task, TaskWriter

LEVELS: Final = (5, 4)
"""The protocol levels that are tried. Mosquitto before 1.6 has no MQTT 5."""

Take = Callable[[str, bytes], None]
"""A call with the topic and the payload of a retained message."""


@dataclass
class RetainedImport:
    """The result of an import."""

    found: int
    """The retained messages of the other broker."""
    published: int


class RetainedSubscriber:
    """One connection that reads retained messages. Its callbacks run in the client's thread.

    MQTT does not say which retained message is the last. The end is `quiet_s` without another one.
    Messages that are published meanwhile do not count: on a busy broker there is no silence.
    """

    def __init__(self, take: Take, quiet_s: float) -> None:
        self._take = take
        self._quiet_s = quiet_s
        self._last_at = 0.0
        self._failure: Exception | None = None
        self._has_failed = Event()

    def on_message(self, message: Message) -> None:
        """Takes a message. A list of those that wait would need a bound, and a client that stops to
        read at its bound never sees the SUBACK behind them."""
        if not message.retain or not message.payload or self._failure is not None:
            return
        try:
            self._take(message.topic, message.payload)
        except ImportFailed as error:
            self.fail(error)
        self._last_at = time.monotonic()

    def fail(self, error: Exception) -> None:
        """Ends the wait with an error."""
        self._failure = self._failure or error
        self._has_failed.set()

    def read(self, client: Client, filters: Sequence[str]) -> None:
        """Subscribes and returns after the last retained message. Raises ClientError and
        ImportFailed."""
        for each in filters:
            client.subscribe((each, 1))
        self._last_at = max(self._last_at, time.monotonic())
        while (left_s := self._last_at + self._quiet_s - time.monotonic()) > 0:
            self._has_failed.wait(left_s)
            if self._failure is not None:
                raise self._failure


def read_retained(
    sink: SinkOptions, filters: Sequence[str], quiet_s: float, take: Take, clear: Callable[[], None]
) -> None:
    """Calls `take` for each retained message of the first server of some options. `clear` begins
    another attempt.

    Raises ImportFailed.
    """
    server = sink.servers[0]
    errors: list[ClientError] = []
    for level in LEVELS:
        clear()
        reader = RetainedSubscriber(take, quiet_s)
        try:
            with _client(sink, server, level, reader) as client:
                return reader.read(client, filters)
        except ClientError as error:
            errors.append(error)
    raise ImportFailed(f"{server.address}: {errors[0]}")


def _client(sink: SinkOptions, server: Server, level: int, reader: RetainedSubscriber) -> Client:
    options = Options(
        level=level,
        client_id=f"import-{token_hex(6)}",
        username=sink.username,
        password=sink.password.encode() if sink.password is not None else None,
    )
    tls = None
    if server.is_secure:
        tls = tls_context(sink.ca_file, sink.certificate_file, sink.key_file)
    return Client(
        servers=[server],
        options=options,
        tls=tls,
        on_message=reader.on_message,
        on_connection_lost=reader.fail,
    )


def import_retained(
    source: Mapping[str, str], target: Mapping[str, str], filters: list[str], quiet_s: float
) -> RetainedImport:
    """Publishes the retained messages of one broker at another, both given by options of the sink.

    Raises ImportFailed.
    """
    sink = parse({"clientIdPrefix": "import", **target, "retain": "true"}, streaming=False)
    with RetainedFile() as messages:
        theirs = parse(source, streaming=False)
        read_retained(theirs, filters, quiet_s, messages.put, messages.clear)
        found = len(messages)
        read_retained(sink, filters, quiet_s, messages.drop, lambda: None)
        new = len(messages)
        try:
            writer = TaskWriter(sink, Task(write_job(token_hex(16)), 0, 0))
            writer.write(messages.batches())
        except (PublishError, RowError) as error:
            raise ImportFailed(
                f"{error}. A part of the {new:,} messages may be there: import again, and only "
                "the others are published"
            ) from None
    return RetainedImport(found, new)
