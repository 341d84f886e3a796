"""A fleet of bought devices, from their first message to the tables: a real broker whose clock is
faster, which is killed and stopped meanwhile, rules by `infer`, runs of which one is killed, and an
independent model of each table."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("pyspark.sql")

from holdfast.client.log import LogClient
from tests.e2e.brokers import Holdfast
from tests.e2e.wire import Closed, Will, Wire
from tests.support.fast_clock import simulated
from tests.support.fleet import (
    BEGIN_S,
    END_S,
    HOURS,
    MESSAGES_MIN,
    ZONE,
    Device,
    Fleet,
    by_the_broker,
)
from tests.support.pipeline_process import PipelineProcess, rows_total
from tests.support.plant_day import Said
from tests.support.plant_oracle import Expected, check_table, micros

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(1800)]

RATE = 120.0
"""Simulated seconds in a real one: eight hours in four minutes."""
INFERRED_S = BEGIN_S + 3600
KILLED_S = [BEGIN_S + 7500, BEGIN_S + 20_000]
"""When the broker is killed. The second time it stays away for half an hour."""
AWAY_S = [0, 1800]
RETRY_S = 0.05
LIVE_US = 600_000_000
TWICE_US = 1_792_886_400_000_000
"""The first of the two hours from 2 to 3 o'clock: midnight of UTC."""
COMMAND_S = 600.0


class FastBroker(Holdfast):
    """Its clock begins at BEGIN_S when the object is made, and goes on while it is down."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.began_s = time.time()

    def command(self) -> list[str]:
        arguments = super().command()
        serve = arguments[arguments.index("serve") :]
        clock = [str(RATE), repr(self.began_s), str(BEGIN_S)]
        return [sys.executable, "-m", "tests.support.fast_clock", *clock, *serve]

    def launch(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOLDFAST_TEST_PATH", str(Path(__file__).parents[2]))
            super().launch()

    def now_s(self) -> float:
        return simulated(RATE, self.began_s, BEGIN_S, time.time())

    def wait_until(self, at_s: float) -> None:
        """By its clock."""
        time.sleep(max(0.0, (at_s - self.now_s()) / RATE))


class Publisher(threading.Thread):
    """A device: each message is sent until it is acknowledged, on a new connection if need be."""

    def __init__(self, broker: FastBroker, device: Device) -> None:
        super().__init__(daemon=True)
        self.broker = broker
        self.device = device
        self.sent: list[tuple[str, bytes]] = []
        self.link: Wire | None = None

    def run(self) -> None:
        messages = self.device.messages
        for at, each in enumerate(messages):
            self.broker.wait_until(each.at_s)
            while not self._publish(each.topic, each.payload):
                time.sleep(RETRY_S)
            self.sent.append((each.topic, each.payload))
            if at + 1 < len(messages) and messages[at + 1].breaks and self.link is not None:
                self.link.abort()
                self.link = None
        if self.link is not None:
            self.link.disconnect()

    def _publish(self, topic: str, payload: bytes) -> bool:
        try:
            if self.link is None:
                link = Wire(self.broker.port, timeout_s=30.0)
                will = self.device.will
                link.connect(
                    self.device.client,
                    will=None if will is None else Will(will.topic, will.payload, qos=1),
                )
                self.link = link
            return self.link.publish(topic, payload, qos=1) < 0x80
        except (OSError, Closed):
            if self.link is not None:
                self.link.socket.close()
            self.link = None
            return False


class Night:
    """The fleet, its broker and its lake."""

    def __init__(self, directory: Path) -> None:
        self.fleet = Fleet()
        self.directory = directory
        self.lake = directory / "lake"
        self.broker = FastBroker(directory)
        self.publishers = [Publisher(self.broker, each) for each in self.fleet.devices]
        self.source = f"127.0.0.1:{self.broker.admin_port}"
        self.rules = directory / "my_tables.py"
        self.live: set[int] = set()
        """The times of messages with local time that came at once."""

    def pass_by(self) -> None:
        self.broker.start()
        for each in self.publishers:
            each.start()
        self.broker.wait_until(INFERRED_S)
        told = self.command("infer", "--from", self.source, "-o", str(self.rules))
        assert told.startswith(f"wrote {self.rules}: "), told
        words = ["all", "--from", self.source, "--tables", str(self.rules)]
        first = PipelineProcess(self.lake, self.directory / "run.log", words)
        try:
            for at_s, away_s in zip(KILLED_S, AWAY_S, strict=True):
                self.broker.wait_until(at_s)
                self.broker.kill()
                self.broker.wait_until(at_s + away_s)
                self.broker.start()
                # A run that dies in the middle of its work.
                if first.process.poll() is not None and rows_total(self.lake, "records"):
                    first = PipelineProcess(self.lake, self.directory / "run.log", ["all"])
                    first.wait_for_rows("readings", rows_total(self.lake, "readings") + 1)
        finally:
            first.kill9()
        self.broker.wait_until(END_S)
        for each in self.publishers:
            each.join(COMMAND_S)
            assert not each.is_alive()
        self.command("run", "all", "--lake", str(self.lake))

    def command(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast.cli.main", "pipeline", *words],
            env={**os.environ, "TZ": ZONE}, capture_output=True, text=True, timeout=COMMAND_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def stored(self) -> list[Said]:
        """The messages of the log with their meanings, in the order of the broker's clock."""
        meanings = self.fleet.meanings()
        found = []
        for message in LogClient(self.source).read("#"):
            meaning = meanings[message.topic, message.payload]
            at_us, time_us = micros(message.time), meaning.time_us
            if (message.topic, message.payload) in self.fleet.local:
                assert time_us is not None  # later nothing can say which of the two hours it is
                time_us = by_the_broker(time_us, at_us)
                if at_us - (meaning.time_us or 0) < LIVE_US:
                    assert time_us == meaning.time_us
                    self.live.add(time_us)
            more = {} if time_us == meaning.time_us else {"time_us": time_us, "sent_us": time_us}
            found.append(
                Said(**{**meaning.__dict__, "at_us": at_us, "partition": message.partition,
                        "offset": message.offset} | more)
            )  # fmt: skip
        return sorted(found, key=lambda said: (said.at_us, said.partition, said.offset))


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Night]:
    night = Night(tmp_path_factory.mktemp("night"))
    try:
        night.pass_by()
        yield night
    finally:
        with suppress(ProcessLookupError):
            night.broker.kill()


def test_the_tables_of_a_fleet_are_those_of_the_model(night: Night) -> None:
    messages = night.stored()
    # Both hours of local time that have one name are those that they are.
    for hour_us in (TWICE_US, TWICE_US + 3_600_000_000):
        assert len({each for each in night.live if hour_us <= each < hour_us + 3_600_000_000}) > 20
    # What was acknowledged is there.
    stored = Counter((each.topic, each.payload) for each in messages)
    for publisher in night.publishers:
        assert Counter(publisher.sent) - stored == Counter()
    # The night has what it is made for.
    expected = Expected(messages)
    assert len(night.fleet.names()) == 22
    assert len(messages) >= MESSAGES_MIN
    assert (messages[-1].at_us - messages[0].at_us) / 3.6e9 > HOURS - 0.2
    rows = expected.readings
    assert {row["device"] for row in rows} == night.fleet.names()
    assert sum(row["is_late"] for row in rows) > 100
    assert sum(row["claimed_time"] is not None for row in rows) > 500
    assert sum(row["metric"] == "$repeated" for row in rows) > 20
    assert len(expected.quarantine) > 10
    assert {row["event"] for row in expected.gaps()} == {"missing", "filled"}
    outages, _ = expected.presence()
    assert {row["cause"] for row in outages} == {"silence", "offline"}
    assert {row["began_before"] for row in outages} == {False, True}
    wrong = []
    for name, make in expected.tables().items():
        try:
            check_table(night.lake, name, make())
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)
    status = night.command("status", "--lake", str(night.lake))
    assert f"{len(expected.quarantine)}" in status
