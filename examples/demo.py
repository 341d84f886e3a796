"""The main job, end to end: live telemetry, a kill -9 or two, and Spark's account of it.

Starts a broker on a free port and publishes this machine's own telemetry at QoS 1 as several
devices, through paho. A durable subscriber goes away and comes back, and the broker is killed
with SIGKILL once while the subscriber is away and once while it listens. Then Spark reads the
journal and checks that every acknowledged message is in it, in order, and this program checks
that the subscriber has received them all. Exits with 1 if anything was lost.

    python examples/demo.py [--seconds 24] [--keep]
"""

import argparse
import json
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import paho.mqtt.client as mqtt
import psutil
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

SAMPLE_INTERVAL_S = 0.1
SESSION_EXPIRY_S = 3600
BROKER_START_TIMEOUT_S = 20.0
SETTLE_TIMEOUT_S = 20.0
START = time.monotonic()

Sample = dict[str, float]
"""Values by metric, of one device at one moment."""


def say(text: str) -> None:
    print(f"{time.monotonic() - START:6.1f} s  {text}", flush=True)


class Broker:
    """`holdfast serve` on one data directory and one port, through any number of lives."""

    def __init__(self, directory: Path) -> None:
        self.data = directory / "data"
        self.log = directory / "broker.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "holdfast.cli.main", "serve", "--admin", "off"]
        command += ["-p", str(self.port), "--bind", "127.0.0.1", "--data", str(self.data)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + BROKER_START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                time.sleep(0.02)
        raise SystemExit(f"the broker did not start; its log:\n{self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.kill()


def durable_client(client_id: str) -> mqtt.Client:
    """An MQTT 5 client that retries every second."""
    client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=client_id, protocol=mqtt.MQTTv5)
    client.reconnect_delay_set(1, 1)
    return client


def connect(client: mqtt.Client, port: int) -> None:
    """Resumes the client's session; the broker keeps it for an hour without a connection."""
    properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
    properties.SessionExpiryInterval = SESSION_EXPIRY_S
    client.connect("127.0.0.1", port, keepalive=10, clean_start=False, properties=properties)
    client.loop_start()


class Device:
    """Publishes one device's metrics and remembers what the broker has acknowledged."""

    def __init__(self, name: str, sample: Callable[[], Sample], port: int) -> None:
        self.name = name
        self.sample = sample
        self.next_sequence: dict[str, int] = {}
        self.acknowledged: list[tuple[str, int]] = []
        self.refused: list[str] = []
        self._waiting: dict[int, tuple[str, int]] = {}
        """Published and not acknowledged, by packet id; only the main thread touches it."""
        self._pubacks: queue.SimpleQueue[tuple[int, ReasonCode]] = queue.SimpleQueue()
        self._client = durable_client(f"device-{name}")
        self._client.max_inflight_messages_set(100)
        self._client.on_publish = self._on_publish
        connect(self._client, port)

    def publish(self) -> None:
        for metric, value in self.sample().items():
            topic = f"telemetry/{self.name}/{metric}"
            sequence = self.next_sequence.get(topic, 0)
            self.next_sequence[topic] = sequence + 1
            payload = {"device": self.name, "seq": sequence, "ts": time.time(), "value": value}
            message = self._client.publish(topic, json.dumps(payload), qos=1)
            self._waiting[message.mid] = (topic, sequence)

    def _on_publish(
        self,
        client: mqtt.Client,
        userdata: object,
        mid: int,
        reason: ReasonCode,
        properties: Properties,
    ) -> None:
        self._pubacks.put((mid, reason))

    def unacknowledged(self) -> int:
        """Books the PUBACKs that have arrived; how many messages still wait for theirs."""
        while not self._pubacks.empty():
            mid, reason = self._pubacks.get()
            message = self._waiting.pop(mid)
            if reason.is_failure:
                self.refused.append(f"refused: {message}, {reason}")
            else:
                self.acknowledged.append(message)
        return len(self._waiting)

    def published(self) -> int:
        return sum(self.next_sequence.values())

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


class Subscriber:
    """A durable subscriber of all telemetry, with a record of what it received."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._received: list[tuple[str, int]] = []
        self.subscribed = threading.Event()
        self._client = durable_client("demo-subscriber")
        self._client.on_message = self._on_message
        self._client.on_subscribe = lambda *_: self.subscribed.set()

    def start(self) -> None:
        self.come_back()
        self._client.subscribe("telemetry/#", qos=1)
        if not self.subscribed.wait(10.0):
            raise SystemExit("the subscription was not confirmed within 10 s")

    def go_away(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def come_back(self) -> None:
        connect(self._client, self.port)

    def _on_message(self, client: mqtt.Client, userdata: object, message: mqtt.MQTTMessage) -> None:
        self._received.append((message.topic, json.loads(message.payload)["seq"]))

    def received(self) -> list[tuple[str, int]]:
        """Topic and sequence of every delivery, in the order of arrival."""
        return list(self._received)

    def lost(self, acknowledged: list[tuple[str, int]]) -> list[tuple[str, int]]:
        seen = set(self.received())
        return [message for message in acknowledged if message not in seen]

    def out_of_order(self) -> int:
        """First deliveries that came after a later message of their topic."""
        late = 0
        highest: dict[str, int] = {}
        for topic, sequence in dict.fromkeys(self.received()):
            late += sequence < highest.get(topic, -1)
            highest[topic] = max(sequence, highest.get(topic, -1))
        return late

    def repeated(self) -> int:
        received = self.received()
        return len(received) - len(set(received))


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


class Demo:
    """The telemetry half: who publishes, who listens, and what happens to the broker meanwhile."""

    def __init__(self, broker: Broker, duration_s: float) -> None:
        self.broker = broker
        self.duration_s = duration_s
        self.subscriber = Subscriber(broker.port)
        self.subscriber.start()
        samplers: dict[str, Callable[[], Sample]] = {
            "cpu": processor,
            "memory": memory,
            "disk": Rate(disk_bytes),
            "network": Rate(network_bytes),
        }
        self.devices = [Device(name, sample, broker.port) for name, sample in samplers.items()]

    def events(self) -> list[tuple[float, str, Callable[[], None]]]:
        """What happens when, as shares of the duration."""
        return [
            (0.2, "the subscriber goes away", self.subscriber.go_away),
            (0.4, "SIGKILL to the broker, subscriber away; restart", self.kill_and_restart),
            (0.55, "the subscriber comes back", self.subscriber.come_back),
            (0.75, "SIGKILL to the broker, subscriber connected; restart", self.kill_and_restart),
        ]

    def kill_and_restart(self) -> None:
        # Publishing just before leaves messages without their PUBACK, and what is taken while
        # the broker is gone waits in the devices.
        self.publish_for(0.0)
        self.broker.kill()
        self.publish_for(0.5)
        self.broker.start()

    def publish_for(self, duration_s: float) -> None:
        end = time.monotonic() + duration_s
        while True:
            for device in self.devices:
                device.publish()
            left_s = end - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(SAMPLE_INTERVAL_S, left_s))

    def run(self) -> None:
        start = time.monotonic()
        events = self.events()
        while (elapsed_s := time.monotonic() - start) < self.duration_s:
            if events and elapsed_s >= events[0][0] * self.duration_s:
                _, text, happen = events.pop(0)
                say(f">> {text}")
                happen()
            self.publish_for(1.0)
            self.show_progress()
        self.settle()

    def settle(self) -> None:
        """Until everything is acknowledged and delivered, or time is up."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while time.monotonic() < deadline and (
            self.unacknowledged() or self.subscriber.lost(self.acknowledged())
        ):
            time.sleep(0.1)
        self.show_progress()
        self.close()

    def close(self) -> None:
        for device in self.devices:
            device.close()
        self.subscriber.go_away()

    def acknowledged(self) -> list[tuple[str, int]]:
        return [message for device in self.devices for message in device.acknowledged]

    def unacknowledged(self) -> int:
        return sum(device.unacknowledged() for device in self.devices)

    def show_progress(self) -> None:
        waiting = self.unacknowledged()
        published = sum(device.published() for device in self.devices)
        say(
            f"published {published:5}   acknowledged {published - waiting:5}   "
            f"received by the subscriber {len(self.subscriber.received()):5}"
        )

    def is_complete(self) -> bool:
        """Says what the clients saw; false if a message was lost, out of order or refused."""
        lost = self.subscriber.lost(self.acknowledged())
        late = self.subscriber.out_of_order()
        waiting = self.unacknowledged()
        refused = [text for device in self.devices for text in device.refused]
        say(
            f"subscriber: {len(lost)} acknowledged messages lost, {late} out of order, "
            f"{self.subscriber.repeated()} delivered again (QoS 1 allows it after a kill)"
        )
        for problem in [f"lost: {message}" for message in lost[:5]] + refused[:5]:
            say(f"  {problem}")
        if waiting:
            say(f"  {waiting} messages were never acknowledged")
        return bool(self.acknowledged()) and not (lost or late or waiting or refused)


def spark_report(data: Path, acknowledged: list[tuple[str, int]]) -> bool:
    try:
        from holdfast.pipeline import spark_session
    except ImportError as missing:
        say(f"no Spark here ({missing}); install it with: pip install 'holdfast[spark]'")
        return False
    from telemetry_report import report

    spark = spark_session("holdfast demo")
    try:
        return bool(report(spark, {"path": str(data)}, acknowledged).ok)
    finally:
        spark.stop()


def run(directory: Path, duration_s: float) -> bool:
    broker = Broker(directory)
    try:
        say(f"broker on port {broker.port}, data in {broker.data}")
        broker.start()
        demo = Demo(broker, duration_s)
        say(f"{len(demo.devices)} devices publish for {duration_s:.0f} s at QoS 1")
        demo.run()
        complete = demo.is_complete()
        say("Spark reads the journal")
        return spark_report(broker.data, demo.acknowledged()) and complete
    finally:
        broker.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description="Telemetry through kills, then Spark's account.")
    parser.add_argument("--seconds", type=float, default=24.0, help="telemetry (default 24)")
    parser.add_argument("--keep", action="store_true", help="keep the data directory")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    try:
        ok = run(directory, arguments.seconds)
    finally:
        if arguments.keep:
            say(f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    say("every acknowledged message arrived, in order" if ok else "FAILED: see above")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
