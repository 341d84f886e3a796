"""`holdfast cluster diverged`: the records that a node has set aside, because the others went on
without them.

A node keeps its former directory as `DIR/diverged-N` then. The log in `DIR` is the one that the
cluster has. A record of the former log is missing in it from the first batch on in which the two
differ: two logs with an equal batch are equal up to it.
"""

import argparse
import asyncio
import sys
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.cli.pubsub import run as client_run
from holdfast.cli.pubsub.options import ClientParser
from holdfast.cli.text import count_text, table
from holdfast.client.client import Client
from holdfast.client.connection import PublishResult
from holdfast.client.errors import ClientError
from holdfast.client.identity import IDENTITY_PROPERTY, ProducerIdentity
from holdfast.io.disk.quarantine import KEPT
from holdfast.log import record as log_record
from holdfast.log.batch import Batch
from holdfast.log.files.data_directory import DataDirectoryError, open_to_read
from holdfast.log.journal.recovery import open_journal
from holdfast.log.reading.cursor import LogReader
from holdfast.log.record import Record
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.packets import PUBLISH

READ_BYTES: Final = 4 << 20
WINDOW: Final = 1000
"""The most messages that wait for their PUBACK."""
PUBLISHED_AT: Final = "published-at"
"""The user property with the time in ISO 8601 at which a message was published first."""


class SetAside(NamedTuple):
    """The records of one partition that only the set-aside log has."""

    partition: int
    start: int
    end: int
    messages: int
    """Those that `publish` publishes."""
    others: int
    """Sessions, positions, and messages of topics that begin with $."""
    size_bytes: int


class LogDirectory:
    """The log of a directory, also while a node serves it. Raises `OSError` or
    `DataDirectoryError`."""

    def __init__(self, path: Path) -> None:
        directory = open_to_read(path)
        opened = open_journal(directory, writes=False)
        self.path = path
        self.incarnation = directory.manifest.incarnation or directory.manifest.node_id
        self.journal = opened.journal
        self._reader = LogReader(opened.journal, opened.store)

    def batches(self, partition: int, start: int) -> Iterator[Batch]:
        """Yields the batches with offsets from `start` on."""
        end = self.journal.next_offset[partition]
        while start < end:
            found = self._reader.read_batches(partition, start, end, READ_BYTES)
            for data in found:
                batch = Batch(data)
                yield batch
                start = batch.end_offset
            if not found:
                return


def diverges_at(kept: LogDirectory, present: LogDirectory, partition: int) -> int:
    """Returns the offset from which the records of `kept` are missing in `present`. What retention
    has removed from either cannot be compared, and counts as equal."""
    starts = kept.journal.start_offsets[partition], present.journal.start_offsets[partition]
    start = max(starts)
    pairs = zip(kept.batches(partition, start), present.batches(partition, start), strict=False)
    for ours, theirs in pairs:
        if ours.data != theirs.data:
            return max(start, ours.base_offset)
        start = ours.end_offset
    return start


def missing_records(kept: LogDirectory, partition: int, start: int) -> Iterator[Record]:
    for batch in kept.batches(partition, start):
        yield from (record for record in batch.records() if record.offset >= start)


def is_published(record: Record) -> bool:
    """Whether `publish` publishes the record. A delayed message has a topic that begins with $."""
    return record.kind == log_record.MESSAGE and not record.topic.startswith(b"$")


def set_aside(kept: LogDirectory, present: LogDirectory) -> list[SetAside]:
    """Returns the missing records of each partition that has some."""
    found = []
    for partition, end in enumerate(kept.journal.next_offset):
        start = diverges_at(kept, present, partition)
        records = [(is_published(each), len(each.topic) + len(each.payload))
                   for each in missing_records(kept, partition, start)]  # fmt: skip
        messages = sum(each for each, _ in records)
        size_bytes = sum(size for _, size in records)
        if records:
            others = len(records) - messages
            found.append(SetAside(partition, start, end, messages, others, size_bytes))
    return found


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "diverged", help="list or publish the records that a node has set aside"
    )
    parser.description = (
        "List the records in DIR/diverged-N that the log of the cluster does not have, or publish"
        " their messages again. It may be repeated: brokers drop what they have received already."
    )
    parser.add_argument("action", nargs="?", choices=("list", "publish"), default="list")
    parser.add_argument("--data", type=Path, metavar="DIR", required=True, help="data directory")
    parser.add_argument("--server", metavar="URL", default="localhost", help="of publish")
    parser.add_argument("--username", metavar="NAME", help="user that publishes")
    parser.add_argument("--password-file", type=Path, metavar="FILE", help="its first line")
    parser.add_argument("--cafile", metavar="FILE", help="CA certificates, for TLS")


def run(args: argparse.Namespace) -> int:
    """Lists or publishes. Returns 1 if that is not possible."""
    try:
        client = _client(args) if args.action == "publish" else None
    except (OSError, ValueError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 1
    try:
        present = LogDirectory(args.data)
        logs = [LogDirectory(path) for path in sorted(args.data.glob(f"{KEPT}-*"))]
        for kept in logs:
            _show(kept, present)
        if not logs:
            print(f"{args.data} has set nothing aside")
        if client is not None:
            return asyncio.run(_publish(client, logs, present))
    except (OSError, DataDirectoryError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
    except ClientError as error:
        print(f"holdfast: {error}. Not all is published: run it again", file=sys.stderr)
    else:
        return 0
    return 1


def _show(kept: LogDirectory, present: LogDirectory) -> None:
    found = set_aside(kept, present)
    print(f"{kept.path}: {count_text(sum(each.messages for each in found), 'message')}")
    names = {"size_bytes": "bytes"}
    rows = [
        {names.get(name, name): str(value) for name, value in each._asdict().items()}
        for each in found
    ]
    for line in table(rows, {name for row in rows for name in row}):
        print(line)
    ends, starts = kept.journal.next_offset, present.journal.start_offsets
    gone = [number for number, end in enumerate(ends) if 0 < end < starts[number]]
    if gone:
        print(f"not compared, because retention has removed them from the log: partitions {gone}")


def _client(args: argparse.Namespace) -> Client:
    given = ["-V", "5", "--server", args.server]
    if args.username is not None:
        given += ["-u", args.username]
    if args.password_file is not None:
        given += ["-P", args.password_file.read_text().partition("\n")[0]]
    if args.cafile is not None:
        given += ["--cafile", args.cafile]
    parsed = ClientParser("cluster diverged", "", ()).parse(given)
    return client_run.new_client(parsed, client_run.AGAIN_BOUNDED)


async def _publish(client: Client, logs: list[LogDirectory], present: LogDirectory) -> int:
    """Publishes the missing messages at QoS 1, not retained, in the order of each partition."""
    await client.connect(client_run.first_policy(client))
    waiting: deque[asyncio.Future[PublishResult]] = deque()
    for kept in logs:
        count = expired = 0
        for partition in range(kept.journal.partitions):
            start = diverges_at(kept, present, partition)
            for record in missing_records(kept, partition, start):
                if not is_published(record):
                    continue
                properties = properties_of(kept, record)
                if properties is None:
                    expired += 1
                    continue
                topic, payload = record.topic.decode(), record.payload
                waiting.append(await client.submit(topic, payload, qos=1, properties=properties))
                if len(waiting) > WINDOW:
                    await waiting.popleft()
                count += 1
        while waiting:
            await waiting.popleft()
        print(
            f"{kept.path}: {count_text(count, 'message')} published, {expired} have expired."
            " Remove the directory when you need it no longer"
        )
    await client.disconnect()
    return 0


def properties_of(kept: LogDirectory, record: Record) -> pr.Properties | None:
    """The properties of the message, or None if it has expired."""
    found = pr.decode_block(record.properties, 0, len(record.properties), PUBLISH)
    age_s = datetime.now(UTC).timestamp() - record.timestamp_us / 1e6
    expiry_s = found.get(pr.MESSAGE_EXPIRY_INTERVAL)
    if isinstance(expiry_s, int):
        if expiry_s <= age_s:
            return None
        found[pr.MESSAGE_EXPIRY_INTERVAL] = int(expiry_s - age_s)
    pairs = found.get(pr.USER_PROPERTY, [])
    assert isinstance(pairs, list)
    others = [each for each in pairs if isinstance(each, tuple) and each[0] != IDENTITY_PROPERTY]
    producer = f"{KEPT}-{kept.incarnation}-{record.partition}"
    published_at = datetime.fromtimestamp(record.timestamp_us / 1e6, UTC).isoformat()
    found[pr.USER_PROPERTY] = [
        *others,
        (PUBLISHED_AT, published_at),
        (IDENTITY_PROPERTY, str(ProducerIdentity(producer, 1, record.offset + 1))),
    ]
    return found
