"""Traffic during rolling restarts, and the check that nothing of it is lost."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.client import Options, PublishRefused, Reconnect
from holdfast.client.blocking import Client
from tests.e2e.cluster_processes import until

MESSAGES_BEFORE = 20
TOPICS = 8


class Writer:
    """Numbered messages, QoS 1 and 2 in turn, each after the answer to the one before."""

    def __init__(self, name: str, servers: list[str]) -> None:
        self.name = name
        self.reasons: list[int] = []
        self.longest_s = 0.0
        self._client = Client(
            servers=servers,
            options=Options(client_id=name, clean_start=False, session_expiry_s=600),
            reconnect=Reconnect(),
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._client.connect()
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stopping.wait(0.002):
            began = time.monotonic()
            topic = f"rolling/{self.name}/{number % TOPICS}"
            payload = str(number).encode()
            try:
                reason = self._client.publish(topic, payload, qos=1 + number % 2).reason
            except PublishRefused as error:
                reason = error.reason
            self.reasons.append(reason)
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            number += 1

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._client.disconnect()
        self._client.close()


class RollingTraffic:
    """Writers, and a reader with a session. `wait` returns when each writer has gone on."""

    def __init__(self, reader_servers: list[str], writer_servers: list[list[str]]) -> None:
        self.reader = Client(
            servers=reader_servers,
            options=Options(client_id="reader", clean_start=False, session_expiry_s=600),
            reconnect=Reconnect(),
        )
        self.writers = [Writer(f"w{at}", each) for at, each in enumerate(writer_servers)]

    def start(self) -> None:
        for writer in self.writers:
            writer.start()

    def wait(self) -> None:
        """Wait until each writer has written MESSAGES_BEFORE more messages."""
        goals = [len(writer.reasons) + MESSAGES_BEFORE for writer in self.writers]
        pairs = list(zip(self.writers, goals, strict=True))
        until(lambda: all(len(each.reasons) > goal for each, goal in pairs), "traffic")

    def finish(self) -> None:
        """Stop, and check that everything was received, in order, and QoS 2 once."""
        for writer in self.writers:
            writer.stop()
            assert set(writer.reasons) == {0}
        expected = {writer.name: len(writer.reasons) for writer in self.writers}
        found: dict[str, list[int]] = {writer.name: [] for writer in self.writers}
        while sum(len(set(each)) for each in found.values()) < sum(expected.values()):
            message = self.reader.receive(timeout_s=30)
            assert message is not None
            found[message.topic.split("/")[1]].append(int(message.payload))
        with pytest.raises(TimeoutError):
            self.reader.receive(timeout_s=0.3)
        for name, numbers in found.items():
            for topic in range(TOPICS):
                of_topic = [number for number in numbers if number % TOPICS == topic]
                first = list(dict.fromkeys(of_topic))
                assert first == sorted(first), f"{name}: order of topic {topic}"
            # QoS 2 comes once; of QoS 1 what was in doubt may come again.
            exact = [number for number in numbers if number % 2]
            assert len(exact) == len(set(exact))


@contextmanager
def rolling_traffic(
    reader_servers: list[str], writer_servers: list[list[str]]
) -> Iterator[RollingTraffic]:
    """A subscribed reader and writers that have not begun. Leaving it checks what came."""
    traffic = RollingTraffic(reader_servers, writer_servers)
    traffic.reader.connect()
    traffic.reader.subscribe(("rolling/#", 2))
    yield traffic
    traffic.finish()
    traffic.reader.disconnect()
    traffic.reader.close()
