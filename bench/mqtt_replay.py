"""The speed and cost of subscriptions that begin in the past.

    python -m bench.mqtt_replay [--json PATH] [--records 500000] [--seconds 4] [--clients 1000]

Each figure has its target:

- one subscriber at QoS 0 reads the whole log over a raw socket: messages/s, and how many times as
  fast as paho receives the same (paho reads a tenth of it);
- one publisher and one subscriber at QoS 1 with 2,000 messages/s: the p99 of PUBACK with a raw
  subscriber that replays the whole log again and again, and without one;
- clients that all ask for `last:10` of a topic at once: the time until each has its messages, and
  the longest wait of the live publisher meanwhile;
- the search for a time in the index of 100 GB of log, of segments that have no data.

A minute and a half.
"""

import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import paho.mqtt.client as paho

from bench.measurement import percentile
from bench.options import new_parser, write_json
from bench.paced import Probe
from bench.spark import (
    BATCH_RECORDS,
    DEVICES,
    SEGMENT_BYTES,
    Node,
    node,
    topic_of,
    write_log,
)
from bench.wire import connect, text
from holdfast.log.files.data_directory import read_manifest
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import DataDirectory
from holdfast.log.journal.recovery import open_journal
from holdfast.log.journal.segment import Segment
from holdfast.log.reading.cursor import LogReader
from holdfast.log.reading.index import IndexHead
from holdfast.log.reading.starts import StartQuery

ALL: Final = "$stream/@earliest/telemetry/#"
RATE: Final = 2000.0
READ_BYTES: Final = 1 << 20
TIMEOUT_S: Final = 120.0
LAST: Final = 10

RAW_TARGET: Final = 300_000.0
PAHO_TARGET: Final = 10.0
P99_TARGET: Final = 1.5
ALL_SERVED_TARGET_S: Final = 5.0
LIVE_TARGET_MS: Final = 100.0
START_TARGET_MS: Final = 20.0
LOG_BYTES: Final = 100 << 30

Figures = dict[str, float]


def subscribe(filter: str, qos: int) -> bytes:
    """A SUBSCRIBE of MQTT 3.1.1 with one filter."""
    body = struct.pack("!H", 1) + text(filter) + bytes([qos])
    return bytes([0x82, len(body)]) + body


def raw_client(port: int, client_id: str) -> socket.socket:
    """A connected client, whose CONNACK was read."""
    made = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.sendall(connect(client_id))
    assert made.recv(4, socket.MSG_WAITALL) == b"\x20\x02\x00\x00"
    return made


def count_messages(connection: socket.socket, wanted: int) -> int:
    """Read frames until `wanted` messages were there. Returns their bytes, SUBACK included."""
    rest, total, count = b"", 0, 0
    while count < wanted:
        data = connection.recv(READ_BYTES)
        if not data:
            raise SystemExit("the node has closed the subscriber's connection")
        total += len(data)
        rest += data
        at, end = 0, len(rest)
        while end - at >= 5:
            length, shift, head = 0, 0, at + 1
            while True:
                byte = rest[head]
                length |= (byte & 0x7F) << shift
                head, shift = head + 1, shift + 7
                if byte < 0x80:
                    break
            if head + length > end:
                break
            count += rest[at] >> 4 == 3
            at = head + length
        rest = rest[at:]
    return total


def discard(connection: socket.socket, size: int) -> float:
    """Let the kernel throw away so many bytes. Returns the seconds."""
    buffer = bytearray(READ_BYTES)
    start = time.perf_counter()
    left = size
    while left > 0:
        received = connection.recv_into(buffer, READ_BYTES, socket.MSG_TRUNC)
        if not received:
            raise SystemExit("the node has closed the subscriber's connection")
        left -= received
    return time.perf_counter() - start


def raw_rate(found: Node, records: int) -> tuple[float, int]:
    """Messages/s of the fastest of three replays to a socket, and the bytes of one."""
    with raw_client(found.port, "count") as connection:
        connection.sendall(subscribe(ALL, 0))
        size = count_messages(connection, records)
    best = TIMEOUT_S
    for number in range(3):
        with raw_client(found.port, f"raw-{number}") as connection:
            connection.sendall(subscribe(ALL, 0))
            best = min(best, discard(connection, size))
    return records / best, size


def paho_rate(found: Node, wanted: int) -> float:
    """Messages/s that paho receives of the same replay."""
    seen = [0]
    times: list[float] = []
    is_complete = threading.Event()

    def received(*_: object) -> None:
        seen[0] += 1
        if seen[0] in (1, wanted):
            times.append(time.perf_counter())
            if seen[0] == wanted:
                is_complete.set()

    client = paho.Client(paho.CallbackAPIVersion.VERSION2)
    client.on_message = received
    client.on_connect = lambda made, *_: made.subscribe(ALL, qos=0)
    client.connect("127.0.0.1", found.port)
    client.loop_start()
    if not is_complete.wait(TIMEOUT_S):
        raise SystemExit(f"paho has received {seen[0]} of {wanted} messages")
    client.disconnect()
    client.loop_stop()
    return (wanted - 1) / (times[1] - times[0])


@contextmanager
def replaying(found: Node, size: int) -> Iterator[None]:
    """Beside a process that replays the log again and again as fast as it comes."""
    command = [sys.executable, "-m", "bench.mqtt_replay", "--reader", f"{found.port}:{size}"]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert reader.stdout is not None
        reader.stdout.readline()
        yield
    finally:
        reader.kill()
        reader.wait()


def read_for_ever(port: int, size: int) -> None:
    print("begun", flush=True)
    number = 0
    while True:
        number += 1
        with raw_client(port, f"reader-{number}") as connection:
            connection.sendall(subscribe(ALL, 0))
            discard(connection, size)


def live(found: Node, seconds: float, meanwhile: Callable[[], None] | None = None) -> Figures:
    """The waits of a live publisher at QoS 1, in milliseconds."""
    probe = Probe(found.port, RATE)
    probe.run_for(0.5)
    probe.drain()
    begun = probe.sent
    helper = None if meanwhile is None else threading.Thread(target=meanwhile)
    if helper is not None:
        helper.start()
    probe.run_for(seconds)
    probe.drain()
    if helper is not None:
        helper.join()
    for connection in (probe.sink, probe.source):
        connection.socket.close()
    pubacks, deliveries = sorted(probe.puback_ms[begun:]), probe.delivery_ms[begun:]
    return {
        "puback_p99_ms": percentile(pubacks, 0.99),
        "puback_max_ms": pubacks[-1],
        "delivery_max_ms": max(deliveries),
    }


def crowd(port: int, clients: int) -> float:
    """Let clients ask for the last messages of a topic at once. Prints the seconds until the last
    of them has all, and exits."""
    poll = select.epoll()
    made = {}
    for number in range(clients):
        connection = raw_client(port, f"crowd-{number}")
        poll.register(connection, select.EPOLLIN)
        made[connection.fileno()] = connection
    print("connected", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    for number, connection in enumerate(made.values()):
        topic = topic_of(number % DEVICES).decode()
        connection.sendall(subscribe(f"$stream/@last:{LAST}/{topic}", 0))
    left = dict.fromkeys(made, LAST)
    waiting = len(left)
    while waiting:
        for descriptor, _ in poll.poll(TIMEOUT_S):
            data = made[descriptor].recv(READ_BYTES)
            if not data:
                raise SystemExit("the node has closed a client's connection")
            # A message of this log has its topic in front, and no payload contains one.
            before = left[descriptor]
            left[descriptor] -= data.count(b"telemetry/sensor-")
            waiting -= before > 0 >= left[descriptor]
    return time.perf_counter() - start


def all_at_once(found: Node, clients: int) -> Figures:
    """The time until all clients are served, and the waits of the live publisher meanwhile."""
    command = [sys.executable, "-m", "bench.mqtt_replay", "--crowd", f"{found.port}:{clients}"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        stdout.readline()
        served: list[float] = []

        def ask() -> None:
            stdin.write("go\n")
            stdin.flush()
            served.append(float(stdout.readline()))

        found_figures = live(found, 6.0, ask)
    return {**found_figures, "served_s": served[0]}


def start_ms(directory: Path, size_bytes: int) -> Figures:
    """The time in which the search finds a start in a log of so many bytes. The log of the
    directory is its end, and the segments before exist in memory only: the search passes them by
    their summary."""
    files = OsFileSystem(directory)
    opened = open_journal(DataDirectory(files, read_manifest(files, directory)), SEGMENT_BYTES)
    journal = opened.journal
    finder = LogReader(journal, opened.store).starts
    newest_us = journal.segments[-1].last_timestamp_us()
    first = journal.segments[0]
    head = IndexHead(first.head.sequence, first.head.start_offsets)
    head.end_offsets = first.head.end_offsets
    head.last_timestamp_us = 1
    before = [Segment(first.sequence, head, None, SEGMENT_BYTES)] * (size_bytes // SEGMENT_BYTES)
    journal.segments[:0] = before
    figures: Figures = {}
    for name, query in (
        ("start_by_time_ms", StartQuery("telemetry/#", newest_us - 1000, 0)),
        ("start_by_last_ms", StartQuery(topic_of(0).decode(), 0, LAST)),
    ):
        start = time.perf_counter()
        found = finder.find(query, list(journal.written))
        figures[name] = (time.perf_counter() - start) * 1000
        assert not found.error
        assert bool(found.floors) == (query.last > 0)
    return figures


def run(folder: Path, records: int, seconds: float, clients: int) -> Figures:
    """All rows against one node."""
    write_log(folder / "data", records, BATCH_RECORDS)
    with node(folder / "data") as found:
        if found is None:
            raise SystemExit("the node did not start")
        rate, size = raw_rate(found, records)
        paho_receives = paho_rate(found, records // 10)
        alone = live(found, seconds)
        with replaying(found, size):
            beside = live(found, seconds)
        at_once = all_at_once(found, clients)
    starts = start_ms(folder / "data", LOG_BYTES)
    return {
        **starts,
        "raw_messages_per_s": rate,
        "raw_over_paho": rate / paho_receives,
        "puback_p99_alone_ms": alone["puback_p99_ms"],
        "puback_p99_beside_ms": beside["puback_p99_ms"],
        "puback_p99_ratio": beside["puback_p99_ms"] / alone["puback_p99_ms"],
        "last_10_served_s": at_once["served_s"],
        "last_10_live_max_ms": max(at_once["puback_max_ms"], at_once["delivery_max_ms"]),
    }


TARGETS: Final = {
    "start_by_time_ms": (START_TARGET_MS, False),
    "start_by_last_ms": (START_TARGET_MS, False),
    "raw_messages_per_s": (RAW_TARGET, True),
    "raw_over_paho": (PAHO_TARGET, True),
    "puback_p99_ratio": (P99_TARGET, False),
    "last_10_served_s": (ALL_SERVED_TARGET_S, False),
    "last_10_live_max_ms": (LIVE_TARGET_MS, False),
}
"""The target of each figure, and whether it is a least one."""


def main(argv: list[str] | None = None) -> int:
    parser = new_parser("bench.mqtt_replay", __doc__, "--directory")
    parser.add_argument("--records", type=int, default=500_000)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--reader", metavar="PORT:BYTES", help="for its own use")
    parser.add_argument("--crowd", metavar="PORT:CLIENTS", help="for its own use")
    arguments = parser.parse_args(argv)
    if arguments.reader:
        port, size = map(int, arguments.reader.split(":"))
        read_for_ever(port, size)
    if arguments.crowd:
        port, clients = map(int, arguments.crowd.split(":"))
        print(crowd(port, clients), flush=True)
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        figures = run(Path(folder), arguments.records, arguments.seconds, arguments.clients)
    for name, value in figures.items():
        target, is_least = TARGETS.get(name, (0.0, True))
        is_met = value >= target if is_least else value <= target
        told = f"  target {'>=' if is_least else '<='} {target:g}" if target else ""
        print(f"{name:24}{value:>14,.2f}{told}{'' if is_met else '  MISSED'}")
    write_json(arguments.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
