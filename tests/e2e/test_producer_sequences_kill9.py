"""Producer sequences on a real broker: kill -9 at random moments, retention, users.

`HOLDFAST_CHAOS_SEED` repeats a run.
"""

import json
import os
import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from holdfast.cli.main import main
from tests.e2e import wire
from tests.e2e.brokers import Holdfast, one_process
from tests.e2e.conftest import StartHoldfast
from tests.e2e.test_doors import TAKEN
from tests.support.waiting import until

SEED = int(os.environ.get("HOLDFAST_CHAOS_SEED", str(time.time_ns() % 1_000_000)))
KILLS = 4
TOPICS = ["plant/1", "plant/2", "plant/3"]
WINDOW = 20
FORGOTTEN = 5
"""After a lost connection the publisher repeats so many that were acknowledged, as one does that
was killed before it noted that."""
WAIT_S = 40.0


def identity(value: str) -> list[tuple[int, wire.PropertyValue]]:
    return [(wire.USER_PROPERTY, ("hf-seq", value))]


class Publisher(Thread):
    """Numbered messages, WINDOW in flight, sent again in order after each lost connection."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.sequence = 0
        self.confirmed = 0
        self.again: deque[int] = deque()
        self.ending = False
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            while not (self.ending and self.confirmed == self.sequence):
                try:
                    self._one_connection()
                except (OSError, wire.Closed):
                    time.sleep(0.01)
        except BaseException as error:
            self.error = error
            raise

    def _one_connection(self) -> None:
        with wire.Wire(self.port) as client:
            client.connect("publisher")
            first = max(1, self.confirmed - FORGOTTEN + 1)
            self.again = deque(range(first, self.sequence + 1))
            inflight: dict[int, int] = {}
            while True:
                while len(inflight) < WINDOW and (self.again or not self.ending):
                    self._send(client, inflight)
                if not inflight:
                    return
                answer = client.expect(wire.PUBACK)
                assert answer.reason in (0x00, 0x10), hex(answer.reason)
                # Answers come in the order of the messages. [MQTT-4.6.0-2]
                assert answer.packet_id == next(iter(inflight))
                self.confirmed = max(self.confirmed, inflight.pop(answer.packet_id))

    def _send(self, client: wire.Wire, inflight: dict[int, int]) -> None:
        if self.again:
            number = self.again.popleft()
        else:
            self.sequence += 1
            number = self.sequence
        packet_id = client.next_packet_id()
        inflight[packet_id] = number
        client.send(
            wire.publish(
                TOPICS[number % len(TOPICS)], b"%d" % number, 1, packet_id,
                props=identity(f"plant-7:3:{number}"),
            )
        )  # fmt: skip


def subscribe_durably(broker: Holdfast, filter: str) -> None:
    with wire.Wire(broker.port) as client:
        client.connect("reader", expiry_s=3600)
        client.subscribe((filter, 2))
        client.disconnect()


@contextmanager
def returned(broker: Holdfast) -> Iterator[wire.Wire]:
    with wire.Wire(broker.port) as client:
        assert client.connect("reader", clean=False, expiry_s=3600).session_present
        yield client


def test_kill_9_while_many_are_in_flight(start_holdfast: StartHoldfast) -> None:
    """Nothing lost, nothing twice, each topic in order: with QoS 1 all the way to the log."""
    dice = random.Random(SEED)
    broker = start_holdfast({"log": {"partitions": 4}})
    subscribe_durably(broker, "plant/+")
    publisher = Publisher(broker.port)
    repetitions = 0.0
    for number in range(KILLS):
        goal = publisher.confirmed + dice.randint(100, 400)
        until(
            lambda goal=goal: publisher.confirmed >= goal or not publisher.is_alive(),  # type: ignore[misc]
            f"seed {SEED}: publishing stands still",
        )
        assert publisher.error is None, f"seed {SEED}: {publisher.error!r}"
        repetitions += broker.metric("producer_duplicates_total")
        if number == 2:
            # A clean stop in between leaves a snapshot.
            assert broker.stop() == 0
        else:
            broker.kill()
        broker.start()
    publisher.ending = True
    publisher.join(WAIT_S)
    assert publisher.error is None
    assert not publisher.is_alive(), f"seed {SEED}: {publisher.confirmed} of {publisher.sequence}"
    repetitions += broker.metric("producer_duplicates_total")
    assert repetitions >= FORGOTTEN * (KILLS - 1)

    with returned(broker) as reader:
        found: dict[str, list[int]] = {topic: [] for topic in TOPICS}
        for _ in range(publisher.sequence):
            message = reader.message()
            found[message.topic].append(int(message.payload))
        reader.ping()
        assert not any(frame.kind == wire.PUBLISH for frame in reader.inbox)
    for place, topic in enumerate(TOPICS):
        expected = [n for n in range(1, publisher.sequence + 1) if n % len(TOPICS) == place]
        assert found[topic] == expected, f"seed {SEED}: {topic}"


@one_process("its $SYS counts are its own")
def test_the_table_outlives_the_records(start_holdfast: StartHoldfast) -> None:
    """Retention takes the segment with the message; after a kill -9 the producer is still known."""
    log = {"segment_bytes": 65536, "snapshot_bytes": 65536, "partitions": 1}
    broker = start_holdfast(
        {"log": log, "log.retention": {"bytes": 131072}, "sys": {"interval_s": 0.1}}
    )

    def publish(value: str, payload: bytes) -> int:
        with wire.Wire(broker.port) as client:
            client.connect()
            return client.publish("t", payload, 1, props=identity(value))

    assert publish("quiet:1:7", b"once") in TAKEN
    with wire.Wire(broker.port) as client:
        client.connect()
        for _ in range(600):
            client.publish("t", bytes(1000), 1)

    def first_offset() -> int:
        ranges = json.loads(broker.admin("/api/v1/log")[1])["ranges"]
        return int(ranges[0][0])

    until(lambda: first_offset() > 1, "the message was not removed")
    broker.kill()
    broker.start()
    assert first_offset() > 1
    subscribe_durably(broker, "t")
    assert publish("quiet:1:7", b"once") in TAKEN
    assert publish("quiet:0:8", b"old epoch") == 0x83
    assert publish("quiet:1:8", b"next") in TAKEN
    with returned(broker) as reader:
        assert reader.message().payload == b"next"
        counts = {"count": b"1", "duplicates": b"1", "fenced": b"1", "evicted": b"0"}
        reader.subscribe(("$SYS/broker/producers/+", 0))
        while counts:
            message = reader.message()
            name = message.topic.rpartition("/")[2]
            if counts.get(name) == message.payload:
                del counts[name]
    assert broker.metric("producers") == 1
    assert broker.metric("producer_fenced_total") == 1


def test_a_producer_is_its_users(start_holdfast: StartHoldfast, tmp_path: Path) -> None:
    passwords = str(tmp_path / "passwords")
    for name in ("alice", "mallory"):
        assert main(["passwd", "-b", passwords, name, "secret", *["-c"][: name == "alice"]]) == 0
    broker = start_holdfast({"security": {"password_file": passwords, "allow_anonymous": True}})

    def publish(user: str | None, value: str) -> int:
        with wire.Wire(broker.port) as client:
            password = None if user is None else b"secret"
            client.send(wire.connect("", username=user, password=password))
            assert wire.read_connack(client.expect(wire.CONNACK), 5).reason == 0
            return client.publish("t", b"x", 1, props=identity(value))

    assert publish("alice", "p:1:1") in TAKEN
    for restart in (broker.kill, broker.stop):
        assert publish("mallory", "p:9:9") == 0x87
        assert publish(None, "p:1:1") == 0x87
        assert publish("alice", "p:1:1") in TAKEN
        restart()
        broker.start()
    assert publish("mallory", "p:9:9") == 0x87
    assert publish("alice", "p:1:2") in TAKEN
