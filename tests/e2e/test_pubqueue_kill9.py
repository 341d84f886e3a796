"""The publish queue with real processes: publisher and broker are killed at random moments, and
every message whose put has returned is stored once and in order.

`HOLDFAST_CHAOS_ROUNDS` (default 4) kills, `HOLDFAST_CHAOS_SEED` repeats a run.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.client.client import Client
from holdfast.client.options import Options
from holdfast.client.pubqueue.format import PaperFormat, parse_paper
from holdfast.client.pubqueue.messages import ProducerFenced
from holdfast.client.pubqueue.ordered import ordered_messages
from holdfast.client.pubqueue.queue import PublishQueue
from holdfast.client.pubqueue.sqlite import SqliteStore
from holdfast.client.pubqueue.store import MemoryStore
from holdfast.client.reconnect import Reconnect
from tests.e2e.brokers import SOURCE, Broker, Holdfast
from tests.e2e.conftest import StartHoldfast
from tests.e2e.pubqueue_publisher import TOPICS

ROUNDS = int(os.environ.get("HOLDFAST_CHAOS_ROUNDS", "4"))
SEED = int(os.environ.get("HOLDFAST_CHAOS_SEED", str(time.time_ns() % 1_000_000)))
RUN = 1_000_000
"""Numbers of one run of the publisher: those of the next begin after them."""
WAIT_S = 60.0


class Publisher:
    """The process, and what it has printed."""

    def __init__(self, port: int, path: Path, window: int, first: int, count: int = 0) -> None:
        arguments = [str(one) for one in (port, path, window, first, count)]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("pubqueue_publisher.py")), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # The last one may be cut off.
            if line.endswith("\n"):
                self.lines.append(line.strip())

    def wait_for_lines(self, count: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while len(self.lines) < count:
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline, f"{len(self.lines)} lines of {count}"
            time.sleep(0.002)

    def end(self, kill: bool) -> list[int]:
        """The numbers whose put has returned."""
        if kill:
            self.process.kill()
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        errors = self.process.stderr.read()
        self.process.stdout.close()
        self.process.stderr.close()
        assert not errors, errors
        return [int(line) for line in self.lines if line != "done"]


def stored(broker: Holdfast) -> dict[str, list[int]]:
    """The numbers in the broker's log, by topic, in order."""
    found: dict[str, list[int]] = {}
    lines = []
    for directory in broker.directories():
        done = subprocess.run(
            [
                *[sys.executable, "-m", "holdfast.cli.main", "log", "dump", "--json", "--full"],
                *["--kind", "message", "--topic", "q/#", str(directory)],
            ],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=True,
        )
        lines += done.stdout.splitlines()
    for line in lines:
        record: dict[str, Any] = json.loads(line)
        found.setdefault(record["topic"], []).append(int(record["payload"]))
    return found


@pytest.mark.parametrize("window", [1, 32])
@pytest.mark.timeout(60 + 20 * ROUNDS)
def test_kill_9_of_publisher_and_broker(
    start_holdfast: StartHoldfast, tmp_path: Path, window: int
) -> None:
    choose = random.Random(SEED + window)
    broker = start_holdfast({"log": {"partitions": 2}})
    path = tmp_path / "queue.db"
    returned: list[int] = []
    for number in range(ROUNDS):
        publisher = Publisher(broker.port, path, window, number * RUN)
        publisher.wait_for_lines(choose.randint(1, 150))
        if choose.random() < 0.5:
            broker.kill()
            time.sleep(choose.uniform(0, 0.05))
            if choose.random() < 0.5:
                returned += publisher.end(kill=True)
                broker.start()
                continue
            broker.start()
            publisher.wait_for_lines(len(publisher.lines) + choose.randint(1, 150))
        time.sleep(choose.uniform(0, 0.05))
        returned += publisher.end(kill=True)
    last = Publisher(broker.port, path, window, ROUNDS * RUN, 16)
    last.wait_for_lines(17)
    returned += last.end(kill=False)
    # The directory of a broker that runs may lack the last second.
    broker.stop()
    found = stored(broker)
    context = f"seed {SEED}, window {window}"
    for topic, numbers in found.items():
        assert numbers == sorted(set(numbers)), f"{context}: {topic} is not in order, once each"
    everything = {number for numbers in found.values() for number in numbers}
    lost = sorted(set(returned) - everything)
    assert not lost, f"{context}: {len(lost)} lost, first {lost[:5]}"
    assert len(found) == TOPICS
    assert len(returned) > 20 * ROUNDS


def connect(broker: Broker, **options: Any) -> Client:
    return Client("127.0.0.1", broker.port, options=Options(**options))


def test_two_writers_with_one_identity(start_holdfast: StartHoldfast, tmp_path: Path) -> None:
    """The older one finds itself fenced, stops, and keeps its messages; renewing the identity is
    the way on."""
    broker = start_holdfast()

    async def test() -> None:
        async with connect(broker) as client:
            old = PublishQueue(client, SqliteStore(tmp_path / "old.db", producer="meter"))
            await old.open()
            await old.put("q/1", "old 1")
            await old.flush()
            newer = SqliteStore(tmp_path / "new.db", producer="meter")
            newer.open("sequence", time.time() + 1000)
            newer.close()
            async with PublishQueue(client, newer) as queue:
                await queue.put("q/1", "new 1")
            await old.put("q/1", "old 2")
            with pytest.raises(ProducerFenced, match="epoch is fenced"):
                await old.flush(30)
            assert await old.close() == 1
            again = SqliteStore(tmp_path / "old.db", renew_identity=True)
            again.open("sequence", time.time() + 2000)
            again.close()
            async with PublishQueue(
                client, SqliteStore(tmp_path / "old.db", renew_identity=True)
            ) as queue:
                await queue.flush(30)

    asyncio.run(asyncio.wait_for(test(), WAIT_S))


def test_subscriber_sees_each_once_and_in_order(start_holdfast: StartHoldfast) -> None:
    """From end to end with the default form: put, killed broker, ordered messages."""
    broker = start_holdfast()
    count = 300

    async def test() -> None:
        loop = asyncio.get_running_loop()
        servers = [f"127.0.0.1:{broker.port}"]
        subscriber = Client(
            servers=servers,
            reconnect=Reconnect(delay_max_s=0.2),
            options=Options(client_id="reader", clean_start=False, session_expiry_s=600),
        )
        publisher = Client(servers=servers, reconnect=Reconnect(delay_max_s=0.2))
        async with subscriber, publisher:
            await subscriber.subscribe(("q/#", 1))
            async with PublishQueue(publisher, MemoryStore(), window=16) as queue:
                for number in range(count):
                    await queue.put(f"q/{number % 3}", str(number))
                    if number == count // 2:
                        await loop.run_in_executor(None, broker.kill)
                        await loop.run_in_executor(None, broker.start)
                await queue.flush(30)
            got: list[int] = []
            async for message in ordered_messages(subscriber, complete=True, gap_timeout_s=20):
                got.append(int(message.payload))
                if len(got) == count:
                    break
            assert got == list(range(count))

    asyncio.run(asyncio.wait_for(test(), WAIT_S))


def test_paper_form_over_mqtt_311_and_mosquitto(mosquitto: Broker) -> None:
    """The compatible form at a broker that knows nothing of it."""

    async def test() -> None:
        async with connect(mosquitto, level=4) as reader, connect(mosquitto, level=4) as writer:
            await reader.subscribe(("topic1/group1/#", 1))
            async with PublishQueue(writer, form=PaperFormat("user1"), window=8) as queue:
                for number in range(50):
                    await queue.put("topic1/group1/user1", str(number))
            ids: list[int] = []
            texts: list[str] = []
            async for message in ordered_messages(reader):
                id, text, sender = parse_paper(message.payload)
                assert sender == "user1"
                ids.append(id)
                texts.append(text)
                if len(texts) == 50:
                    break
            assert texts == [str(number) for number in range(50)]
            assert ids == sorted(set(ids))

    asyncio.run(asyncio.wait_for(test(), WAIT_S))
