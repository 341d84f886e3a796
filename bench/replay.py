"""What a reader of the whole log costs the clients of the node that it reads from.

    python -m bench.replay [--json PATH] [--records 1000000] [--rounds 4]
        [--seconds 4] [--readers 2]

One publisher and one subscriber at QoS 1 and 2,000 messages/s, fdatasync before PUBACK, without
and with readers that go through the whole log again and again, in turns. The readers ask as a Spark
task does, for 2 million rows/s together, and have the kernel throw away what comes: a pipeline
computes on another machine. `--here` has them check each batch, as a task on this machine does
before it makes rows: then all share its cores, and p99 is as long as the kernel lets a process
compute that others wait for (a tick, 4 ms). Medians over the rounds. About a minute.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

from bench.measurement import percentile
from bench.options import new_parser, write_json
from bench.paced import Probe
from bench.process import cpu_s
from bench.spark import BATCH_RECORDS, Node, node, write_log
from holdfast.client.admin_connection import TIMEOUT_S, Server
from holdfast.client.log.reading import offsets
from holdfast.client.log.reading.offsets import OffsetRange
from holdfast.client.log.reading.reader_http import FETCH_BYTES, PATH, read_ranges
from holdfast.client.log.reading.scan import Coverage
from holdfast.client.log.reading.servers import Servers

RATE: Final = 2000.0
PROCESSES: Final = 2
"""The readers are threads of them."""
ROWS_PER_S: Final = 2_000_000.0
"""All readers together."""
READER_START_S: Final = 30.0
QUANTILES: Final = (0.5, 0.99)

Figures = dict[str, float]


def read_for_ever(
    admin_port: int, computes: bool, readers: int, tell: Callable[[str], object] = print
) -> None:
    """Says how many rows a chunk had. `readers`: all, each of which has a share of the rate."""
    server = ("127.0.0.1", admin_port)
    bounds = Servers([server]).bounds()
    ends = {partition: bound.end for partition, bound in bounds.items()}
    ranges = offsets.ranges_to_read({}, ends, bounds)
    read = _checking if computes else _discarding
    due = time.monotonic()
    while True:
        for before, now in pairwise(read(server, ranges)):
            tell(str(now - before))
            due = max(due, time.monotonic() - 0.1) + (now - before) * readers / ROWS_PER_S
            time.sleep(max(0.0, due - time.monotonic()))


def _checking(server: Server, ranges: list[OffsetRange]) -> Iterator[int]:
    """How far it has come after each answer, in rows; begins with where it begins."""
    coverage = Coverage(ranges, fail_on_data_loss=True)
    yield sum(coverage.next.values())
    for _ in read_ranges([server], ranges, coverage):
        yield sum(coverage.next.values())


def _discarding(server: Server, ranges: list[OffsetRange]) -> Iterator[int]:
    """As `_checking`."""
    at = {each.partition: each.start for each in ranges}
    yield sum(at.values())
    buffer = bytearray(FETCH_BYTES)
    with socket.create_connection(server, TIMEOUT_S) as connection:
        while wanted := [
            (each.partition, at[each.partition], each.end)
            for each in ranges
            if at[each.partition] < each.end
        ]:
            body = json.dumps({"ranges": wanted, "bytes": FETCH_BYTES}).encode()
            connection.sendall(
                b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
                % (PATH.encode(), len(body), body)
            )
            head, left, told = _answer(connection)
            at.update(told)
            left -= head
            while left:
                # The kernel discards: nothing is copied.
                size = connection.recv_into(buffer, min(left, FETCH_BYTES), socket.MSG_TRUNC)
                if not size:
                    raise SystemExit("the node has closed a reader's connection")
                left -= size
            yield sum(at.values())


def _answer(connection: socket.socket) -> tuple[int, int, dict[int, int]]:
    """How much of its body has come already, how long that is, and how far it goes."""
    received = b""
    while b"\r\n\r\n" not in received:
        data = connection.recv(4096)
        if not data:
            raise SystemExit("the node has closed a reader's connection")
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    if " 200 " not in status:
        raise SystemExit(f"a reader was refused: {status}")
    fields = {name.lower(): text for name, _, text in (line.partition(": ") for line in lines)}
    told = {int(p): int(offset) for p, offset in json.loads(fields["holdfast-log"])["next"]}
    return len(body), int(fields["content-length"]), told


def latencies(found: Node, seconds: float) -> Figures:
    probe = Probe(found.port, RATE)
    probe.run_for(seconds)
    probe.drain()
    missing = probe.sent - min(len(probe.delivery_ms), probe.acked)
    if missing:
        raise SystemExit(f"{missing} of {probe.sent} messages were not delivered or acknowledged")
    probe.sink.socket.close()
    probe.source.socket.close()
    return {
        f"{name}_p{round(quantile * 100)}_ms": percentile(sorted(values), quantile)
        for name, values in (("delivery", probe.delivery_ms), ("puback", probe.puback_ms))
        for quantile in QUANTILES
    }


def with_readers(found: Node, seconds: float, computes: bool, count: int) -> Figures:
    command = [sys.executable, "-m", "bench.replay", "--reader", str(found.admin_port)]
    command += ["--readers", str(count), *["--here"] * computes]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(number) for number in range(PROCESSES)]
        readers = []
        try:
            for output in outputs:
                with output.open("wb") as file:
                    readers.append(subprocess.Popen(command, stdout=file))
            deadline = time.monotonic() + READER_START_S
            while not all(output.stat().st_size for output in outputs):
                if time.monotonic() > deadline:
                    raise SystemExit("the readers do not get anything")
                time.sleep(0.05)
            before, start = _rows(outputs), time.perf_counter()
            figures = latencies(found, seconds)
            rate = (_rows(outputs) - before) / (time.perf_counter() - start)
        finally:
            for reader in readers:
                reader.kill()
                reader.wait()
    return {**figures, "rows_per_s": round(rate)}


def _rows(outputs: list[Path]) -> int:
    return sum(int(line) for output in outputs for line in output.read_text().split("\n")[:-1])


def run(
    folder: Path, records: int, rounds: int, seconds: float, computes: bool, readers: int
) -> dict[str, Figures]:
    write_log(folder / "data", records, BATCH_RECORDS)
    alone: list[Figures] = []
    beside: list[Figures] = []
    with node(folder / "data") as found:
        if found is None:
            raise SystemExit("the node did not start")
        latencies(found, 1.0)
        for _ in range(rounds):
            cpu = cpu_s(found.pid)
            alone.append(latencies(found, seconds))
            alone[-1]["node_cpu_s"] = cpu_s(found.pid) - cpu
            cpu = cpu_s(found.pid)
            beside.append(with_readers(found, seconds, computes, readers))
            beside[-1]["node_cpu_s"] = cpu_s(found.pid) - cpu
    return {"alone": _medians(alone), "with readers": _medians(beside)}


def _print_line(text: str) -> None:
    """Prints the line in one call, because the readers of a process share the output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _medians(rounds: list[Figures]) -> Figures:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def main(argv: list[str] | None = None) -> int:
    parser = new_parser("bench.replay", __doc__, "--directory")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument(
        "--here", action="store_true", help="the readers check what they read, on this machine"
    )
    parser.add_argument("--readers", type=int, default=PROCESSES, help="in two processes")
    parser.add_argument("--reader", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.reader:
        readers = [
            threading.Thread(
                target=read_for_ever,
                args=(arguments.reader, arguments.here, arguments.readers, _print_line),
            )
            for _ in range(max(1, arguments.readers // PROCESSES))
        ]
        for each in readers:
            each.start()
        for each in readers:
            each.join()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        figures = run(
            Path(folder),
            arguments.records,
            arguments.rounds,
            arguments.seconds,
            arguments.here,
            arguments.readers,
        )
    alone, beside = figures["alone"], figures["with readers"]
    print(f"{'':18}{'alone':>10}{'readers':>10}{'ratio':>8}")
    for name, value in alone.items():
        print(f"{name:18}{value:>10.2f}{beside[name]:>10.2f}{beside[name] / value:>8.2f}")
    print(f"rows read meanwhile: {beside['rows_per_s']:,.0f}/s")
    write_json(arguments.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
