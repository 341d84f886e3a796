"""The cost of an open console for the broker.

    python -m bench.console [--clients 10000] [--rate 10000] [--seconds 10] [--json PATH]

A broker has this many idle clients. A client makes the requests of a screen at its intervals, and
reads the stream of events, as a browser does. First without traffic, so that all that is measured
is the console: the CPU time of the broker, and the longest hold, which is the CPU time that passes
until another connection has its PINGRESP. Then with so many messages a second at QoS 0 from another
process: the CPU time of windows with and without the console, in turn. Windows of one kind differ
by more than the console costs when the machine does other work, so the second row shows that, too.
Targets: less than 1 % of a core, no hold above 10 ms. About two minutes.
"""

import http.client
import json
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from bench import brokers, wire
from bench.connection import Connection
from bench.idle import Crowd
from bench.options import new_parser, write_json
from bench.process import cpu_s, raise_open_files_limit
from bench.scenarios import PAYLOAD_BYTES
from bench.worst_packet import Canary

TARGET_CORES: Final = 0.01
TARGET_MS: Final = 10.0
SETTLE_S: Final = 2.0
PAIRS: Final = 3
RECEIVED: Final = "publish_received"
RATE_MIN: Final = 0.9
"""The least part of the rate that must have come."""
TICK_S: Final = 0.005
LIST: Final = "sessions?sort=log_lag&descending=true"
SCREENS: Final[dict[str, tuple[tuple[str, float], ...]]] = {
    "overview": ((f"{LIST}&limit=5", 5.0), ("storage", 15.0), ("notes?limit=12", 3600.0)),
    "sessions": (("sessions?sort=client&limit=50", 5.0),),
    "drops": ((f"{LIST}&limit=10", 5.0), ("sessions?sort=dropped&descending=true&limit=10", 5.0),
              ("drops?cases=50", 5.0), ("limits", 5.0)),
    "topics": (("topics?prefix=&limit=100", 5.0),),
}  # fmt: skip
"""The requests of each screen with their intervals in seconds, as its module makes them."""


class OpenConsole:
    """`with OpenConsole(port, screen):` reads the events, and makes the requests of a screen."""

    def __init__(self, admin_port: int, screen: str) -> None:
        self._port = admin_port
        self._requests = SCREENS[screen]
        self._stopping = threading.Event()
        self._stream = http.client.HTTPConnection("127.0.0.1", admin_port)
        self._threads = [threading.Thread(target=each) for each in (self._read, self._ask)]
        self.events = self.replies = 0
        self.refused = ""
        self.received_per_s = 0.0
        """The most publishes a second that the stream of events has named."""

    def __enter__(self) -> "OpenConsole":
        self._stream.request("GET", "/api/v1/events")
        self._events = self._stream.getresponse()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        if self._stream.sock is not None:
            self._stream.sock.shutdown(2)
        for thread in self._threads:
            thread.join()
        self._stream.close()

    def _read(self) -> None:
        with suppress(OSError, http.client.HTTPException, ValueError):
            while line := self._events.readline():
                if line.startswith(b"data:"):
                    self.events += 1
                    rates = json.loads(line[5:]).get("rates", {})
                    self.received_per_s = max(self.received_per_s, rates.get(RECEIVED, 0.0))

    def _ask(self) -> None:
        due = {path: 0.0 for path, _ in self._requests}
        while not self._stopping.wait(0.05):
            for path, interval_s in self._requests:
                if time.monotonic() >= due[path]:
                    self._get(path)
                    due[path] = time.monotonic() + interval_s

    def _get(self, path: str) -> None:
        """One request. The port closes a connection after 5 idle seconds, so each has its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request("GET", f"/api/v1/{path}")
        reply = connection.getresponse()
        reply.read()
        connection.close()
        if reply.status == 200:
            self.replies += 1
        else:
            self.refused = f"{path}: {reply.status}"


def publish(port: int, rate: int) -> None:
    """Publish at a fixed rate until the process is ended; another connection receives all."""
    sink, source = Connection(port, "sink"), Connection(port, "source")
    sink.subscribe("load/#", 0)
    threading.Thread(target=_drain, args=(sink,), daemon=True).start()
    frames = [wire.Frame(f"load/{number:03}", 0, PAYLOAD_BYTES).blank for number in range(100)]
    began, sent = time.monotonic(), 0
    while True:
        due = int((time.monotonic() - began) * rate)
        source.socket.sendall(b"".join(frames[at % 100] for at in range(sent, due)))
        sent = due
        time.sleep(TICK_S)


def _drain(sink: Connection) -> None:
    while sink.socket.recv(1 << 20):
        pass


@contextmanager
def load(port: int, rate: int) -> Iterator[None]:
    """Traffic from a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=publish, args=(port, rate))
    process.start()
    try:
        time.sleep(SETTLE_S)
        if not process.is_alive():
            raise RuntimeError("the load has ended early")
        yield
    finally:
        process.terminate()
        process.join()


class Window:
    """The cores that the broker uses in a window, and its longest hold in ms."""

    def __init__(self, pid: int, canary: Canary, seconds: float) -> None:
        canary.worst_cpu_ms = 0.0
        before, began = cpu_s(pid), time.monotonic()
        time.sleep(seconds)
        self.cores = (cpu_s(pid) - before) / (time.monotonic() - began)
        self.hold_ms = canary.worst_cpu_ms


def at_rest(broker: brokers.Broker, admin_port: int, seconds: float) -> dict[str, Any]:
    """The cost of each screen without traffic, compared with the windows around it."""
    canary = Canary(broker.port, broker.pid)
    found: dict[str, Any] = {}
    before = Window(broker.pid, canary, seconds)
    for screen in SCREENS:
        with OpenConsole(admin_port, screen) as console:
            # The first request of a kind imports and compiles.
            time.sleep(SETTLE_S)
            opened = Window(broker.pid, canary, seconds)
            if not console.events or not console.replies or console.refused:
                raise RuntimeError(f"{screen}: {console.events} events, {console.replies} replies,"
                                   f" refused {console.refused!r}")  # fmt: skip
        time.sleep(SETTLE_S)
        after = Window(broker.pid, canary, seconds)
        cost = opened.cores - (before.cores + after.cores) / 2
        found[screen] = {"cores": cost, "hold_ms": opened.hold_ms, "closed_hold_ms": after.hold_ms,
                         "closed_cores": after.cores - before.cores}  # fmt: skip
        before = after
    return found


def under_load(
    broker: brokers.Broker, admin_port: int, seconds: float, rate: int
) -> dict[str, Any]:
    """The cost of the overview with traffic: the median of pairs of windows."""
    canary = Canary(broker.port, broker.pid)
    costs: list[float] = []
    closed: list[Window] = []
    opened: list[Window] = []
    with load(broker.port, rate):
        for _ in range(PAIRS):
            closed.append(Window(broker.pid, canary, seconds))
            with OpenConsole(admin_port, "overview") as console:
                opened.append(Window(broker.pid, canary, seconds))
            if console.received_per_s < rate * RATE_MIN:
                raise RuntimeError(f"only {console.received_per_s:.0f} messages a second came")
            costs.append(opened[-1].cores - closed[-1].cores)
    cores = [each.cores for each in closed]
    return {
        "cores": statistics.median(costs),
        "broker_cores": statistics.median(cores),
        "noise_cores": max(cores) - min(cores),
        "hold_ms": max(each.hold_ms for each in opened),
        "closed_hold_ms": max(each.hold_ms for each in closed),
    }


def show(name: str, figures: dict[str, Any]) -> None:
    print(
        f"  {name:18} {figures['cores'] * 100:6.2f} % of a core, longest hold"
        f" {figures['hold_ms']:6.2f} ms ({figures['closed_hold_ms']:.2f} ms when closed)",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, and return 1 if a target is missed."""
    parser = new_parser("bench.console", (__doc__ or "").partition("\n")[0], "--directory")
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rate", type=int, default=10_000, help="messages a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="the length of a window")
    arguments = parser.parse_args(argv)
    raise_open_files_limit(arguments.clients + 1000)
    admin_port = brokers.free_port()
    broker = brokers.start_holdfast(arguments.directory, "fsync", admin_port=admin_port)
    try:
        crowd = Crowd(broker.port, keep_alive_s=0)
        crowd.grow(arguments.clients)
        time.sleep(SETTLE_S)
        print(f"{arguments.clients} clients; targets: {TARGET_CORES:.0%} of a core, no hold above"
              f" {TARGET_MS:g} ms")  # fmt: skip
        rest = at_rest(broker, admin_port, arguments.seconds)
        for screen, figures in rest.items():
            show(screen, figures)
        busy = under_load(broker, admin_port, arguments.seconds, arguments.rate)
        show(f"overview, {arguments.rate}/s", busy)
        print(f"  without the console {busy['broker_cores']:.2f} cores, which differ by"
              f" {busy['noise_cores'] * 100:.1f} % of a core between windows")  # fmt: skip
        crowd.close()
    finally:
        broker.stop()
    write_json(arguments.json, {"clients": arguments.clients, "at_rest": rest, "load": busy})
    # Traffic has holds and noise of its own, so the console is judged by its windows at rest.
    return int(
        any(each["cores"] > TARGET_CORES or each["hold_ms"] > TARGET_MS for each in rest.values())
        or busy["cores"] > TARGET_CORES + busy["noise_cores"]
    )


if __name__ == "__main__":
    sys.exit(main())
