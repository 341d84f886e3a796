"""A day of 200 devices at 1 Hz through all tables: time, processor time and memory.

    python -m bench.pipeline_day [--json PATH] [--devices 200] [--hours 24] [--directory PATH]
        [--cpus 0,1]

The log is written by the storage's own writer, not over MQTT: in each second one batch in each
partition, with a message of each of its devices (a number, a time and a value: one row of
`readings`). Then `holdfast pipeline run` makes all tables, once, as a process with its own start of
Java. "seconds of a table" are those of its steps. Two tables are made at a time, so the sum is
larger than the run. Memory is the largest sum of the resident pages of all its processes; pages
that two processes share count twice. The default day is yesterday.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.options import new_parser, write_json
from bench.process import descendants, process_cpu_s, rss_bytes
from bench.spark import PARTITIONS, SEGMENT_BYTES, Figures, served
from holdfast.client.log.lake.commits import CommitLog
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.files.data_directory import create
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import Manifest
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.partition import partition_of
from holdfast.log.record import MESSAGE, Record

DAY_S: Final = 86_400
SAMPLE_S: Final = 0.1
Device = tuple[bytes, bytes]
"""Topic and client id."""


def write_day(directory: Path, devices: int, seconds: int, begin_s: int) -> int:
    """Write the data directory of a day as a node leaves it, and return its number of messages."""
    files = create(OsFileSystem(directory), Manifest("n1", PARTITIONS, ""))
    of_partition = _devices(devices)
    offsets = [0] * PARTITIONS
    written = 0
    batches = _batches(of_partition, offsets, seconds, begin_s)
    batch = next(batches, None)
    while batch is not None:
        index = ActiveIndex(written, offsets)
        with open(directory / "journal" / f"{written:020d}.log", "wb") as segment:
            while batch is not None and segment.tell() < SEGMENT_BYTES:
                data = batch.build(1)
                index.add_built(segment.tell(), len(data), batch)
                segment.write(data)
                offsets[batch.partition] += batch.count
                written += batch.count
                batch = next(batches, None)
        if batch is not None:
            files.write_index(index.head.sequence, index.encode())
    return written


def _devices(count: int) -> list[list[Device]]:
    found: list[list[Device]] = [[] for _ in range(PARTITIONS)]
    for number in range(count):
        topic = b"plant/line-%02d/press-%04d" % (number % 20, number)
        found[partition_of(topic, PARTITIONS)].append((topic, b"client-%04d" % number))
    return found


def _batches(
    devices: list[list[Device]], offsets: list[int], seconds: int, begin_s: int
) -> Iterator[BatchBuilder]:
    """Yield the batches in the order of the log. Each begins at its partition's offset of then."""
    for second in range(seconds):
        for partition, own in enumerate(devices):
            if not own:
                continue
            builder = BatchBuilder(partition, offsets[partition])
            at_us = (begin_s + second) * 1_000_000
            for number, (topic, client_id) in enumerate(own):
                value = (second * (7 + number)) % 977 / 7
                payload = b'{"seq": %d, "ts": %d.%03d, "value": %.4f}' % (
                    second, begin_s + second, number, value,
                )  # fmt: skip
                stored_us = at_us + 1000 * number + 50_000
                builder.add(
                    Record(
                        partition,
                        MESSAGE,
                        flags=1,
                        timestamp_us=stored_us,
                        topic=topic,
                        client_id=client_id,
                        payload=payload,
                    )
                )
            yield builder


def make_tables(source: str, lake: Path, messages: int, cpus: str) -> Figures:
    """Run the pipeline over the log. Raises SystemExit if a row lacks."""
    command = [sys.executable, "-m", "holdfast.cli.main", "pipeline", "run"]
    command += ["--from", source, "--lake", str(lake), "--quiet"]
    cpu: dict[int, tuple[str, float]] = {}
    peak = 0
    start = time.perf_counter()
    with subprocess.Popen(["taskset", "-c", cpus, *command]) as process:
        while process.poll() is None:
            for pid in descendants(process.pid):
                try:
                    cpu[pid] = _kind(pid), process_cpu_s(pid)
                except OSError:
                    continue  # it has ended, and its last sample counts
            try:
                peak = max(peak, rss_bytes(process.pid))
            except OSError:
                break
            time.sleep(SAMPLE_S)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}")
    figures = {
        "messages": float(messages),
        "run, s": seconds,
        "run, CPU s": sum(used_s for _, used_s in cpu.values()),
        "of it Java, CPU s": sum(used_s for kind, used_s in cpu.values() if kind == "java"),
        "peak of memory, GiB": peak / 2**30,
    }
    for table in sorted(each.name for each in lake.iterdir() if each.is_dir()):
        log_of = CommitLog(lake, table)
        last = log_of.last()
        if last is None:
            continue
        commits = [log_of.read(version) for version in range(1, last.version + 1)]
        figures[f"{table}, s"] = sum(each.took_s for each in commits)
        if table in ("records", "readings") and last.rows_total != messages:
            raise SystemExit(f"{table}: {last.rows_total} rows of {messages}")
    return figures


def _kind(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def main(argv: list[str] | None = None) -> int:
    parser = new_parser("bench.pipeline_day", __doc__, "--directory")
    parser.add_argument("--devices", type=int, default=200)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--cpus", default="0,1", help="the cores of the run, as of taskset")
    arguments = parser.parse_args(argv)
    begin_s = int(time.time()) // DAY_S * DAY_S - DAY_S
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=arguments.directory) as folder:
        log = Path(folder) / "log"
        start = time.perf_counter()
        seconds = round(arguments.hours * 3600)
        messages = write_day(log, arguments.devices, seconds, begin_s)
        figures = {"writing of the log, s": time.perf_counter() - start}
        with served(log) as source:
            figures |= make_tables(source, Path(folder) / "lake", messages, arguments.cpus)
    for name, value in figures.items():
        print(f"{name:28} {value:>14,.2f}")
    write_json(arguments.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
