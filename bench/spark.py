"""How fast Spark reads the log, beside Parquet files with the same rows in the same session.

    python -m bench.spark [--json PATH] [--records 1000000] [--rounds 4]

The rows go to the `noop` sink, so reading is all that is timed. "http" reads the log of a
running node; "lake" reads the same rows in a lake, with the source and with `read_messages`; "small
batches" is
a journal of batches of a few records, as one broker under light load with fsync writes it;
"subscriber" is what one would write without a data source, a paho client that collects rows. Best
of some rounds, all columns unless said otherwise. About two minutes. What a replay costs live
clients is bench.replay.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.error import URLError
from urllib.request import urlopen

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion
from pyspark.sql import DataFrame, SparkSession

import holdfast
from bench.options import new_parser, write_json
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.files.data_directory import create
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import Manifest
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.partition import partition_of
from holdfast.log.record import MESSAGE, Record
from holdfast_lab.targets.target import free_port
from holdfast_lake import Lake, read_messages, spark_session

PARTITIONS: Final = 16
DEVICES: Final = 500
SEGMENT_BYTES: Final = 64 << 20
BATCH_RECORDS: Final = 200
SMALL_BATCH_RECORDS: Final = 4
SUBSCRIBER_RECORDS: Final = 20_000
NODE_START_S: Final = 30.0
WAIT_S: Final = 60.0

Figures = dict[str, float]


def write_log(directory: Path, records: int, batch_records: int) -> None:
    """A data directory as a node leaves it: about 100 bytes of JSON a message, each device's on a
    topic of its own, numbered, 50 ms after they were measured."""
    files = create(OsFileSystem(directory), Manifest("n1", PARTITIONS, ""))
    offsets = [0] * PARTITIONS
    written = 0
    # Of now: the node that serves it would remove old records.
    time_us = time.time_ns() // 1000
    while written < records:
        index = ActiveIndex(written, offsets)
        with open(directory / "journal" / f"{written:020d}.log", "wb") as segment:
            while written < records and segment.tell() < SEGMENT_BYTES:
                partition = written // batch_records % PARTITIONS
                count = min(batch_records, records - written)
                builder = build(partition, offsets[partition], count, time_us + written)
                data = builder.build(1)
                index.add_built(segment.tell(), len(data), builder)
                segment.write(data)
                offsets[partition] += count
                written += count
        if written < records:
            files.write_index(index.head.sequence, index.encode())


def topic_of(device: int) -> bytes:
    return b"telemetry/sensor-%04d/temperature" % device


DEVICES_OF: Final = [
    [device for device in range(DEVICES) if partition_of(topic_of(device), PARTITIONS) == partition]
    for partition in range(PARTITIONS)
]


def build(partition: int, base_offset: int, count: int, time_us: int) -> BatchBuilder:
    """The devices of the partition take turns. `time_us`: of the first record."""
    builder = BatchBuilder(partition, base_offset)
    devices = DEVICES_OF[partition]
    for number in range(base_offset, base_offset + count):
        device, sequence = devices[number % len(devices)], number // len(devices)
        stored_us = time_us + number - base_offset
        payload = (
            f'{{"device": "sensor-{device:04}", "seq": {sequence}, '
            f'"ts": {stored_us / 1e6 - 0.05:.3f}, '
            f'"value": {number % 977 / 7:.4f}, "unit": "celsius", "ok": true}}'
        )
        builder.add(
            Record(
                builder.partition,
                MESSAGE,
                flags=1,
                timestamp_us=stored_us,
                topic=topic_of(device),
                client_id=b"client-%04d" % device,
                payload=payload.encode(),
            )
        )
    return builder


@dataclass(frozen=True)
class Node:
    port: int
    admin_port: int
    pid: int


@contextmanager
def node(data: Path) -> Iterator[Node | None]:
    """A node that serves the directory; None if it does not start."""
    port, admin_port = free_port(), free_port()
    command = [sys.executable, "-m", "holdfast.cli.main", "serve", "--data", str(data)]
    command += ["-p", str(port), "--admin", f"127.0.0.1:{admin_port}"]
    environment = dict(os.environ, PYTHONPATH=str(Path(holdfast.__file__).parents[1]))
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        try:
            if _wait_until_ready(process, admin_port):
                yield Node(port, admin_port, process.pid)
            else:
                log.seek(0)
                print(log.read().decode(errors="replace")[-500:], file=sys.stderr)
                yield None
        finally:
            process.terminate()
            process.wait()


@contextmanager
def served(data: Path) -> Iterator[str]:
    """The admin port of a node that serves the directory. Raises SystemExit if it does not."""
    with node(data) as found:
        if found is None:
            raise SystemExit("the node did not start")
        yield f"127.0.0.1:{found.admin_port}"


def _wait_until_ready(process: "subprocess.Popen[bytes]", port: int) -> bool:
    deadline = time.monotonic() + NODE_START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1):
                return True
        except (URLError, OSError):
            time.sleep(0.1)
    return False


def measure(tables: dict[str, Callable[[], DataFrame]], records: int, rounds: int) -> Figures:
    """Rows per second of each table; the rounds take turns, so that noise hits all alike."""
    best = dict.fromkeys(tables, float("inf"))
    for _ in range(rounds):
        for name, load in tables.items():
            start = time.perf_counter()
            load().write.format("noop").mode("overwrite").save()
            best[name] = min(best[name], time.perf_counter() - start)
    return {name: round(records / seconds) for name, seconds in best.items()}


def write_lake(spark: SparkSession, place: Path, source: str, records: int) -> Path:
    """Writes a lake of a log."""
    report = Lake(place, spark=spark).run(["records"], source=source)
    if report.rows != {"records": records}:
        raise SystemExit(f"the lake has {report.rows} rows of {records}: {report.errors}")
    return place


def run(spark: SparkSession, folder: Path, records: int, rounds: int) -> Figures:
    large, small, parquet = folder / "large", folder / "small", str(folder / "parquet")
    write_log(large, records, BATCH_RECORDS)
    write_log(small, records, SMALL_BATCH_RECORDS)

    def log(**options: str) -> Callable[[], DataFrame]:
        return lambda: spark.read.format("holdfast").options(**options).load()

    with served(large) as source, served(small) as other:
        log(servers=source)().write.parquet(parquet)
        lake = {"lake": str(write_lake(spark, folder / "lake", source, records))}
        tables: dict[str, Callable[[], DataFrame]] = {
            "parquet": lambda: spark.read.parquet(parquet),
            "http": log(servers=source),
            "http, 3 columns": log(servers=source, columns="topic,payload,offset"),
            "http, small batches": log(servers=other),
            "lake": log(**lake),
            "read_messages": lambda: read_messages(spark, **lake),
            "parquet, 3 columns": lambda: spark.read.parquet(parquet).select(
                "topic", "payload", "offset"
            ),
            "read_messages, 3": lambda: read_messages(
                spark, **lake, columns="topic,payload,offset"
            ),
        }
        for name, load in tables.items():
            count = load().count()
            if count != records:
                raise SystemExit(f"{name}: {count} rows of {records}")
        figures = measure(tables, records, rounds)
    figures["subscriber"] = subscriber_rate(folder / "subscriber")
    return figures


def subscriber_rate(data: Path) -> float:
    """Rows a second of what one writes without a data source: a paho client with a durable session
    that collects what waits for it."""
    data.mkdir()
    with node(data) as found:
        if found is None:
            return 0.0
        rows: list[tuple[str, object, int, bool, float]] = []
        client = Client(CallbackAPIVersion.VERSION2, "collector", clean_session=False)
        client.connect("127.0.0.1", found.port)
        client.subscribe("telemetry/#", 1)
        client.loop_start()
        publisher = Client(CallbackAPIVersion.VERSION2, "publisher")
        publisher.max_inflight_messages_set(1000)
        publisher.connect("127.0.0.1", found.port)
        publisher.loop_start()
        _wait_for(lambda: client.is_connected() and publisher.is_connected())
        client.disconnect()
        client.loop_stop()
        sent = [
            publisher.publish(f"telemetry/sensor-{number % DEVICES:04}", bytes(100), 1)
            for number in range(SUBSCRIBER_RECORDS)
        ]
        _wait_for(lambda: all(each.is_published() for each in sent))
        publisher.disconnect()
        publisher.loop_stop()

        def collect(client: Client, userdata: object, message: MQTTMessage) -> None:
            rows.append(
                (message.topic, message.payload, message.qos, message.retain, message.timestamp)
            )

        client.on_message = collect
        client.connect("127.0.0.1", found.port)
        client.loop_start()
        _wait_for(lambda: bool(rows))
        start, before = time.perf_counter(), len(rows)
        _wait_for(lambda: len(rows) >= SUBSCRIBER_RECORDS)
        seconds = time.perf_counter() - start
        client.disconnect()
        client.loop_stop()
        return round((len(rows) - before) / seconds)


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"the subscriber did not get its messages in {WAIT_S:.0f} s")
        time.sleep(0.001)


def main(argv: list[str] | None = None) -> int:
    parser = new_parser("bench.spark", __doc__, "--directory")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args(argv)
    spark = spark_session("bench", **{"spark.log.level": "ERROR"})
    try:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
            figures = run(spark, Path(folder), arguments.records, arguments.rounds)
    finally:
        spark.stop()
    print(f"{'':22}{'rows/s':>12}{'of Parquet':>12}")
    for name, rate in figures.items():
        print(f"{name:22}{rate:>12,.0f}{rate / figures['parquet']:>12.2f}")
    write_json(arguments.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
