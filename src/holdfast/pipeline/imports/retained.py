"""The import of the retained messages of another broker.

A message is published only if this broker retains another one or none for its topic. So an import
that is repeated, or was killed, publishes no message twice.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import Final

import pyarrow as pa

from holdfast.client.blocking import Client
from holdfast.client.errors import ClientError
from holdfast.client.options import Options
from holdfast.client.servers import Server
from holdfast.pipeline.imports.errors import ImportFailed
from holdfast.pipeline.sink.dialer import PublishError
from holdfast.pipeline.sink.identity import write_job
from holdfast.pipeline.sink.link import tls_context
from holdfast.pipeline.sink.options import SinkOptions, parse
from holdfast.pipeline.sink.rows import RowError
from holdfast.pipeline.sink.task import Task, TaskWriter

BYTES_MAX: Final = 1 << 30
"""The most bytes of topics and payloads that are read from a broker. They are in memory."""
LEVELS: Final = (5, 4)
"""The protocol levels that are tried. Mosquitto before 1.6 has no MQTT 5."""

RetainedMessages = dict[str, bytes]
"""The retained payload per topic."""


@dataclass
class RetainedImport:
    """The result of an import."""

    found: int
    """The retained messages of the other broker."""
    published: int


def read_retained(sink: SinkOptions, filters: list[str], quiet_s: float) -> RetainedMessages:
    """Return the retained messages of the first server of some options.

    MQTT does not say which retained message is the last. The end is `quiet_s` without another one.
    Raises ImportFailed.
    """
    server = sink.servers[0]
    errors: list[ClientError] = []
    for level in LEVELS:
        try:
            return _read(sink, server, level, filters, quiet_s)
        except ClientError as error:
            errors.append(error)
    raise ImportFailed(f"{server.address}: {errors[0]}")


def _read(
    sink: SinkOptions, server: Server, level: int, filters: list[str], quiet_s: float
) -> RetainedMessages:
    found: RetainedMessages = {}
    size = 0
    options = Options(
        level=level,
        client_id=f"import-{token_hex(6)}",
        username=sink.username,
        password=sink.password.encode() if sink.password is not None else None,
    )
    tls = None
    if server.is_secure:
        tls = tls_context(sink.ca_file, sink.certificate_file, sink.key_file)
    with Client(servers=[server], options=options, tls=tls) as client:
        for each in filters:
            client.subscribe((each, 1))
        for message in client.messages(timeout_s=quiet_s):
            if not message.retain or not message.payload:
                continue
            found[message.topic] = message.payload
            size += len(message.topic) + len(message.payload)
            if size > BYTES_MAX:
                raise ImportFailed(
                    f"{server.address} retains more than {BYTES_MAX >> 20} MiB: import them in "
                    "parts, with --filter"
                )
    return found


def import_retained(
    source: Mapping[str, str], target: Mapping[str, str], filters: list[str], quiet_s: float
) -> RetainedImport:
    """Publish the retained messages of one broker at another, both given by options of the sink.

    Raises ImportFailed.
    """
    theirs = read_retained(parse(source, streaming=False), filters, quiet_s)
    job = token_hex(16)
    sink = parse({"clientIdPrefix": "import", **target, "retain": "true"}, streaming=False)
    ours = read_retained(sink, filters, quiet_s)
    new = {topic: each for topic, each in theirs.items() if ours.get(topic) != each}
    try:
        TaskWriter(sink, Task(write_job(job), 0, 0)).write(_batches(new))
    except (PublishError, RowError) as error:
        raise ImportFailed(
            f"{error}. A part of the {len(new):,} messages may be there: import again, and only "
            "the others are published"
        ) from None
    return RetainedImport(len(theirs), len(new))


def _batches(messages: RetainedMessages) -> Iterator[pa.RecordBatch]:
    items = list(messages.items())
    for at in range(0, len(items), 1000):
        part = items[at : at + 1000]
        columns = [
            pa.array([topic for topic, _ in part], pa.string()),
            pa.array([payload for _, payload in part], pa.binary()),
        ]
        yield pa.RecordBatch.from_arrays(columns, names=["topic", "payload"])
