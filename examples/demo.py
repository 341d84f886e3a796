"""The main job, end to end: a cluster of three, live telemetry, a kill -9, and Spark's account.

Starts three nodes on this machine with `holdfast cluster local` and publishes the machine's own
telemetry at QoS 1 as several devices, each through another node. In the middle the node that leads
a busy partition is killed with SIGKILL, while a durable subscriber is away; it comes back to
another node. What happened meanwhile is printed as a timeline: detected, elected, the first
publish confirmed. Then Spark makes a lake of the cluster's log (bronze, silver and gold tables, and
a page of charts), in which every acknowledged message must be, in order; and the subscriber must
have received them all. Exits with 1 if anything was lost, and with 130 after Ctrl-C.

The console shows the kill on its timeline while it happens: the address is printed first.
With `--stay` the cluster runs and the devices publish until Ctrl-C. `--screenshots DIR` takes
pictures of the console, with Chromium and Playwright.

    python examples/demo.py [--seconds 20] [--keep] [--report FILE] [--stay] [--screenshots DIR]
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import console_pictures
import psutil
from console_pictures import Picture

from holdfast.client import Options, Reconnect
from holdfast.client.blocking import Client
from holdfast.log.partition import partition_of

NODES = 3
PARTITIONS = 16
SAMPLE_INTERVAL_S = 0.05
SESSION_EXPIRY_S = 3600
START_TIMEOUT_S = 60.0
SETTLE_TIMEOUT_S = 30.0
WATCH_INTERVAL_S = 0.005
REPORT = Path(tempfile.gettempdir()) / "holdfast-demo.html"
TABLES = ("records", "readings", "gaps", "device_minutes", "latency")
"""Of the pipeline's, those that are shown."""
GOLD_ROWS_MAX = 40
INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""
PICTURES = (
    Picture("timeline", "timeline?seconds=30", ".story li", height=1060),
    Picture("overview", "", ".health"),
    Picture("cluster", "cluster", ".seat.leader"),
    Picture("log", "log?filter=telemetry/%23", "tbody tr"),
)
START = time.monotonic()

Sample = dict[str, float]
"""Values by metric, of one device at one moment."""


def say(text: str) -> None:
    print(f"{time.monotonic() - START:6.1f} s  {text}", flush=True)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block: a process that is just being started would stay."""
    is_pressed = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal is_pressed
        is_pressed = True

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if is_pressed:
        raise KeyboardInterrupt


@dataclass
class Node:
    name: str
    port: int
    admin: str
    pid: int


class Cluster:
    """`holdfast cluster local`, and the nodes it has started."""

    def __init__(self, directory: Path) -> None:
        self.data = directory / "cluster"
        self.log = directory / "cluster.log"
        self.nodes: list[Node] = []
        self.process: subprocess.Popen[str] | None = None
        self.token = ""

    def start(self) -> None:
        command = [sys.executable, "-m", "holdfast.cli.main", "cluster", "local", "--json"]
        command += ["--nodes", str(NODES), "--data", str(self.data)]
        environment = dict(os.environ, HOLDFAST_CLUSTER__PARTITIONS=str(PARTITIONS))
        with self.log.open("w") as log, uninterrupted():
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                # Ctrl-C reaches the demo alone, which stops its devices before the cluster.
                start_new_session=True,
            )
        assert self.process.stdout is not None
        giving_up = threading.Timer(START_TIMEOUT_S, self.process.kill)
        giving_up.start()
        try:
            for line in self.process.stdout:
                found = json.loads(line)
                self.nodes.append(
                    Node(found["node"], found["port"], f"127.0.0.1:{found['admin']}", found["pid"])
                )
                if len(self.nodes) == NODES:
                    break
            else:
                text = self.log.read_text()[-3000:]
                raise SystemExit(f"the cluster did not start; its log:\n{text}")
        finally:
            giving_up.cancel()
        self._protect()

    def _protect(self) -> None:
        """Make a token, and give all nodes the same file of tokens. They use it within a second."""
        first = self.data / self.nodes[0].name
        command = [sys.executable, "-m", "holdfast.cli.main", "access", "token", "create"]
        command += ["--data", str(first), "--role", "admin", "--expires", "12h", "--note", "demo"]
        self.token = subprocess.check_output(command, text=True).strip()
        for node in self.nodes[1:]:
            shutil.copy2(first / "access.json", self.data / node.name)
        # Spark reads the log with it.
        os.environ["HOLDFAST_TOKEN"] = self.token

    def console(self, node: Node) -> str:
        """The address of the console, which shows the timeline of the last two minutes."""
        return f"http://{node.admin}/console/#token={self.token}&to=timeline"

    def status(self, node: Node) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://{node.admin}/cluster", headers={"Authorization": f"Bearer {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=5.0) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def leader_of(self, partition: int) -> Node:
        name = self.status(self.nodes[0])["partitions"][partition]["leader"]
        return next(node for node in self.nodes if node.name == name)

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(30.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def client(name: str, nodes: list[Node]) -> Client:
    """With all the nodes, the first one preferred."""
    return Client(
        servers=[f"127.0.0.1:{node.port}" for node in nodes],
        options=Options(client_id=name, clean_start=False, session_expiry_s=SESSION_EXPIRY_S),
        reconnect=Reconnect(),
    )


class Device:
    """Publishes one device's metrics, one after the other, and remembers what was acknowledged."""

    def __init__(self, name: str, sample: Callable[[], Sample], nodes: list[Node]) -> None:
        self.name = name
        self.node = nodes[0]
        self.sample = sample
        self.next_sequence: dict[str, int] = {}
        self.acknowledged: list[tuple[str, int]] = []
        self.refused: list[str] = []
        # (topic, sent, acknowledged), monotonic seconds.
        self.times: list[tuple[str, float, float]] = []
        self._stopping = threading.Event()
        self._client = client(f"device-{name}", nodes)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._client.connect()
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(SAMPLE_INTERVAL_S):
            for metric, value in self.sample().items():
                self._publish(f"telemetry/{self.name}/{metric}", value)

    def _publish(self, topic: str, value: float) -> None:
        sequence = self.next_sequence.get(topic, 0)
        self.next_sequence[topic] = sequence + 1
        metric = topic.rpartition("/")[2]
        fields = {"seq": sequence, "ts": time.time(), metric: value}
        sent_at = time.monotonic()
        reason = self._client.publish(topic, json.dumps(fields).encode(), qos=1).reason
        self.times.append((topic, sent_at, time.monotonic()))
        if reason < 0x80:
            self.acknowledged.append((topic, sequence))
        else:
            self.refused.append(f"refused: {topic} {sequence}, reason 0x{reason:02x}")

    def stop(self) -> None:
        """Stop publishing and disconnect. A second call does nothing."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(SETTLE_TIMEOUT_S)
        self._client.disconnect()
        self._client.close()


class Subscriber:
    """A durable subscriber of all telemetry, with a record of what it received."""

    def __init__(self) -> None:
        self.received: list[tuple[str, int]] = []
        self._client: Client | None = None
        self._thread: threading.Thread | None = None

    def start(self, nodes: list[Node]) -> None:
        self.come_back(nodes)
        assert self._client is not None
        self._client.subscribe(("telemetry/#", 1))

    def come_back(self, nodes: list[Node]) -> None:
        self._client, self._thread = client("demo-subscriber", nodes), None
        self._client.connect()
        self._thread = threading.Thread(target=self._receive, args=(self._client,), daemon=True)
        self._thread.start()

    def _receive(self, client: Client) -> None:
        for message in client.messages():
            self.received.append((message.topic, json.loads(message.payload)["seq"]))

    def go_away(self) -> None:
        """Disconnect. A second call does nothing."""
        if self._client is not None:
            self._client.disconnect()
            if self._thread is not None:
                self._thread.join(SETTLE_TIMEOUT_S)
            self._client.close()

    def lost(self, acknowledged: list[tuple[str, int]]) -> list[tuple[str, int]]:
        seen = set(self.received)
        return [message for message in acknowledged if message not in seen]

    def out_of_order(self) -> int:
        """First deliveries that came after a later message of their topic."""
        late = 0
        highest: dict[str, int] = {}
        for topic, sequence in dict.fromkeys(self.received):
            late += sequence < highest.get(topic, -1)
            highest[topic] = max(sequence, highest.get(topic, -1))
        return late

    def repeated(self) -> int:
        return len(self.received) - len(set(self.received))


@dataclass
class Failover:
    """What followed a kill; seconds since it."""

    topic: str
    partition: int
    killed: str
    killed_at: float
    elected: str = ""
    detected_s: float = -1.0
    elected_s: float = -1.0
    timeline: list[str] = field(default_factory=list)

    def watch(self, cluster: Cluster, survivor: Node) -> None:
        """Ask a node that lives until the partition has its next leader."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            status = cluster.status(survivor)
            passed_s = time.monotonic() - self.killed_at
            dead = next(node for node in status["nodes"] if node["node"] == self.killed)
            if self.detected_s < 0 and (dead["suspected"] or dead["state"] == "down"):
                self.detected_s = passed_s
            leader = status["partitions"][self.partition]["leader"]
            if leader not in ("", self.killed):
                self.elected = leader
                self.elected_s = passed_s
                return
            time.sleep(WATCH_INTERVAL_S)

    def report(self, devices: list[Device]) -> None:
        """After the devices have stopped."""
        say(f"failover of partition {self.partition}, led by {self.killed}, killed with SIGKILL:")
        say(f"    detected          after {self.detected_s * 1000:5.0f} ms")
        say(f"    {self.elected} elected        after {self.elected_s * 1000:5.0f} ms")
        confirmed = [
            acknowledged - self.killed_at
            for device in devices
            for topic, _, acknowledged in device.times
            if acknowledged > self.killed_at + self.elected_s
            and partition_of(topic.encode(), PARTITIONS) == self.partition
        ]
        if confirmed:
            say(f"    publish confirmed after {min(confirmed) * 1000:5.0f} ms")
        for device in devices:
            stall_s = max(
                acknowledged - sent
                for _, sent, acknowledged in device.times
                if acknowledged > self.killed_at
            )
            where = (
                "connected to it, went to another node"
                if (device.node.name == self.killed)
                else f"connected to {device.node.name}"
            )
            say(f"    {device.name:8} waited {stall_s * 1000:5.0f} ms at most ({where})")


class Rate:
    """Turns the system's ever-growing byte counters into bytes per second."""

    def __init__(self, read: Callable[[], Sample]) -> None:
        self.read = read
        self.last, self.last_at = read(), time.monotonic()

    def __call__(self) -> Sample:
        values, now = self.read(), time.monotonic()
        passed_s = max(now - self.last_at, 1e-3)
        rates = {
            f"{metric}_per_s": (value - self.last[metric]) / passed_s
            for metric, value in values.items()
        }
        self.last, self.last_at = values, now
        return rates


def disk_bytes() -> Sample:
    counters = psutil.disk_io_counters()
    if counters is None:
        return {"read_bytes": 0.0, "write_bytes": 0.0}
    return {"read_bytes": float(counters.read_bytes), "write_bytes": float(counters.write_bytes)}


def network_bytes() -> Sample:
    counters = psutil.net_io_counters()
    return {"sent_bytes": float(counters.bytes_sent), "received_bytes": float(counters.bytes_recv)}


def processor() -> Sample:
    return {"percent": psutil.cpu_percent(), "load_1min": psutil.getloadavg()[0]}


def memory() -> Sample:
    state = psutil.virtual_memory()
    return {"percent": state.percent, "available_bytes": float(state.available)}


def make_devices(nodes: list[Node]) -> list[Device]:
    """Four devices, each with another node that it prefers."""
    samplers: dict[str, Callable[[], Sample]] = {
        "cpu": processor,
        "memory": memory,
        "disk": Rate(disk_bytes),
        "network": Rate(network_bytes),
    }
    return [
        Device(name, sample, nodes[at % len(nodes) :] + nodes[: at % len(nodes)])
        for at, (name, sample) in enumerate(samplers.items())
    ]


def take_pictures(cluster: Cluster, node: Node, directory: Path) -> None:
    with console_pictures.camera() as camera:
        for file in camera.take(node.admin, cluster.token, PICTURES, directory):
            say(f"picture: {file}")


class Demo:
    """The telemetry half: who publishes, who listens, and what happens to the cluster meanwhile."""

    def __init__(self, cluster: Cluster, duration_s: float) -> None:
        self.cluster = cluster
        self.duration_s = duration_s
        self.subscriber = Subscriber()
        self.devices = make_devices(cluster.nodes)
        self.failover: Failover | None = None

    def run(self, screenshots: Path | None) -> None:
        try:
            self._publish_through_a_kill(screenshots)
        finally:
            # Ctrl-C may come at any point. A thread whose client ends before it prints a traceback.
            self._stop_devices()
            self.subscriber.go_away()
        assert self.failover is not None
        self.failover.report(self.devices)

    def _publish_through_a_kill(self, screenshots: Path | None) -> None:
        self.subscriber.start(self.cluster.nodes)
        for device in self.devices:
            device.start()
        self._wait(0.3)
        say(">> the subscriber goes away")
        self.subscriber.go_away()
        self._wait(0.2)
        self.kill_a_leader()
        self._wait(0.2)
        say(">> the subscriber comes back, to another node")
        self.subscriber.come_back(self.survivors())
        self._wait(0.3)
        if screenshots is not None:
            take_pictures(self.cluster, self.survivors()[0], screenshots)
        self._stop_devices()
        self._settle()

    def _stop_devices(self) -> None:
        for device in self.devices:
            device.stop()

    def _wait(self, share: float) -> None:
        end = time.monotonic() + share * self.duration_s
        while (left_s := end - time.monotonic()) > 0:
            time.sleep(min(2.0, left_s))
            acknowledged = len(self.acknowledged())
            received = len(self.subscriber.received)
            say(f"acknowledged {acknowledged:6}   received by the subscriber {received:6}")

    def kill_a_leader(self) -> None:
        topic = "telemetry/cpu/percent"
        partition = partition_of(topic.encode(), PARTITIONS)
        victim = self.cluster.leader_of(partition)
        say(f">> SIGKILL to {victim.name}, which leads partition {partition} ({topic})")
        os.kill(victim.pid, signal.SIGKILL)
        self.failover = Failover(topic, partition, victim.name, time.monotonic())
        self.failover.watch(self.cluster, self.survivors()[0])

    def survivors(self) -> list[Node]:
        killed = "" if self.failover is None else self.failover.killed
        return [node for node in self.cluster.nodes if node.name != killed]

    def _settle(self) -> None:
        """Until everything that was acknowledged is delivered, or time is up."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while time.monotonic() < deadline and self.subscriber.lost(self.acknowledged()):
            time.sleep(0.1)

    def acknowledged(self) -> list[tuple[str, int]]:
        return [message for device in self.devices for message in list(device.acknowledged)]

    def is_complete(self) -> bool:
        """Says what the clients saw; false if a message was lost, out of order or refused."""
        lost = self.subscriber.lost(self.acknowledged())
        late = self.subscriber.out_of_order()
        refused = [text for device in self.devices for text in device.refused]
        say(
            f"subscriber: {len(lost)} of {len(self.acknowledged())} acknowledged messages lost, "
            f"{late} out of order, {self.subscriber.repeated()} delivered again"
        )
        for problem in [f"lost: {message}" for message in lost[:5]] + refused[:5]:
            say(f"  {problem}")
        return bool(self.acknowledged()) and not (lost or late or refused)


class Account:
    """What Spark says: the log in a lake's tables, held against what the devices remember."""

    def __init__(self, directory: Path, admin: str) -> None:
        from holdfast_lake import Lake
        from holdfast_lake.tables import Rule, readings_table

        rule = Rule("telemetry/+/+", decode="json", device="level 2")
        self.lake = Lake(directory / "lake", tables=[readings_table((rule,))])
        self.admin = admin

    def run(self, acknowledged: list[tuple[str, int]], report: Path) -> bool:
        """False if a message is missing or out of order, or a table could not be made."""
        from holdfast_lake.report.report import write_report

        done = self.lake.run(TABLES, source=self.admin)
        for table, error in done.errors.items():
            say(f"table {table} failed: {error}")
        if done.errors:
            return False
        for name in TABLES:
            say(f"    {name:15} {done.rows.get(name, 0):6} rows")
        self.print_gold()
        write_report(self.lake.path, self.lake.catalog, report)
        say(f"charts: {report}")
        return self.is_complete(acknowledged)

    def print_gold(self) -> None:
        say("gold table device_minutes:")
        print(f"    {'minute':6} {'device':8} {'metric':22} {'n':>5} {'min':>12} {'mean':>12} "
              f"{'p99':>12} {'max':>12}")  # fmt: skip
        rows = self.lake.table("device_minutes").orderBy("window_start", "device", "metric")
        for row in rows.limit(GOLD_ROWS_MAX).collect():
            numbers = " ".join(f"{row[name]:12,.1f}" for name in ("min", "mean", "p99", "max"))
            print(f"    {row.window_start:%H:%M}  {row.device:8} {row.metric:22} "
                  f"{row.readings:5} {numbers}")  # fmt: skip
        for row in self.lake.table("latency").orderBy("window_start", "device").collect():
            say(
                f"publish to log, {row.window_start:%H:%M}, {row.device:8} "
                f"p50 {row.p50_ms:7.1f} ms   p99 {row.p99_ms:7.1f} ms"
            )

    def is_complete(self, acknowledged: list[tuple[str, int]]) -> bool:
        rows = self.lake.table("readings").select("topic", "sequence").collect()
        stored = {(row.topic, row.sequence) for row in rows}
        lost = [message for message in acknowledged if message not in stored]
        # Numbers that were skipped, and those that came later than they should have.
        gaps = self.lake.table("gaps").count()
        repeated = self.lake.table("records").count() - len(rows)
        say(
            f"Spark: of {len(acknowledged)} acknowledged messages {len(lost)} lost, "
            f"{gaps} gaps in the order, {repeated} stored again and dropped"
        )
        return not (lost or gaps)


@contextlib.contextmanager
def errors_to(log: Path) -> Iterator[None]:
    """Let the processes that start meanwhile write their errors to a file. Java warns of what this
    machine lacks, and a worker of Spark that is stopped may print a traceback."""
    errors = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    except Exception:
        os.write(errors, log.read_bytes()[-3000:])
        raise
    finally:
        os.dup2(errors, 2)
        os.close(errors)


def spark_account(demo: Demo, directory: Path, report: Path) -> bool:
    assert demo.failover is not None
    reader = next(node for node in demo.cluster.nodes if node.name == demo.failover.elected)
    try:
        from pyspark.sql import SparkSession

        account = Account(directory, reader.admin)
    except ImportError as missing:
        say(f"no Spark here ({missing}); install it with: pip install 'holdfast[spark]'")
        return False
    say(f"Spark makes tables of the cluster's log, which {reader.name} sends:")
    try:
        with errors_to(directory / "spark.log"):
            _ = account.lake.spark  # starts Java
        return account.run(demo.acknowledged(), report)
    finally:
        # The lake's property would start a session if Ctrl-C came before there was one.
        if (spark := SparkSession.getActiveSession()) is not None:
            spark.stop()
        # Spark's own handler would use the session that has just ended.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def stay(demo: Demo, address: str) -> None:
    """Publish again, through the nodes that live, until Ctrl-C."""
    assert demo.failover is not None
    devices = make_devices(demo.survivors())
    for device in devices:
        device.start()
    say(f"{len(devices)} devices publish until Ctrl-C; {demo.failover.killed} stays down")
    say(f"the console: {address}")
    try:
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                signal.pause()
        say("stopped by Ctrl-C")
    finally:
        for device in devices:
            device.stop()


def run(directory: Path, arguments: argparse.Namespace) -> bool:
    """Returns false if anything was lost."""
    cluster = Cluster(directory)
    try:
        cluster.start()
        for node in cluster.nodes:
            say(f"{node.name}: port {node.port}, admin {node.admin}, pid {node.pid}")
        demo = Demo(cluster, arguments.seconds)
        for node in cluster.nodes:
            say(f"the console of {node.name}: {cluster.console(node)}")
        say(f"{len(demo.devices)} devices publish for {arguments.seconds:.0f} s at QoS 1")
        demo.run(arguments.screenshots)
        complete = demo.is_complete()
        complete = spark_account(demo, directory, arguments.report) and complete
        say(verdict(complete))
        if arguments.stay:
            stay(demo, cluster.console(demo.survivors()[0]))
        else:
            say("the cluster ends here; make demo OPTIONS=--stay keeps it and its console")
        return complete
    finally:
        # A second Ctrl-C must not leave nodes behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        cluster.stop()


def verdict(complete: bool) -> str:
    return "every acknowledged message arrived, in order" if complete else "FAILED: see above"


def main() -> int:
    parser = argparse.ArgumentParser(description="Telemetry through a kill, then Spark's account.")
    parser.add_argument("--seconds", type=float, default=20.0, help="telemetry (default 20)")
    parser.add_argument("--keep", action="store_true", help="keep the data directory")
    parser.add_argument("--report", type=Path, default=REPORT, help=f"charts (default {REPORT})")
    parser.add_argument("--stay", action="store_true", help="keep the cluster until Ctrl-C")
    parser.add_argument(
        "--screenshots", type=Path, metavar="DIR", help="take pictures of the console"
    )
    arguments = parser.parse_args()
    if arguments.screenshots is not None:
        try:
            console_pictures.check()
        except console_pictures.Unavailable as missing:
            say(f"no pictures: {missing}")
            arguments.screenshots = None

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(1)

    for number in (signal.SIGTERM, signal.SIGHUP):
        # Under nohup the end of the terminal must not stop the demo.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    directory = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    try:
        ok = run(directory, arguments)
    except KeyboardInterrupt:
        say("stopped by Ctrl-C")
        return INTERRUPTED
    finally:
        if arguments.keep:
            say(f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
