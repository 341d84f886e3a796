"""Brokers with [federation], killed: whatever dies, what was acknowledged reaches the other log
once and in order."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.federated import Member, line, running
from tests.e2e.pair import wait_until
from tests.interop.paho_client import Paho

SESSION_S = 3600


def qos_of(number: int) -> int:
    return 1 + number // 7 % 2


class Stream:
    """Numbered messages from one paho client, at QoS 1 and 2 in turn, until it is told to stop; it
    comes back by itself."""

    def __init__(self, member: Member, name: str, topics: int = 3) -> None:
        self.topics = topics
        self.sent = 0
        self.client = Paho(member.port, name, clean=False, expiry_s=SESSION_S)
        self.client.client.reconnect_delay_set(0.1, 0.5)
        self.acknowledged = 0
        self.client.client.on_publish = self._on_publish
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _on_publish(self, *_: Any) -> None:
        self.acknowledged += 1

    def _run(self) -> None:
        while not self._stop.is_set():
            if self.sent - self.acknowledged < 20:
                number = self.sent
                self.sent += 1
                self.client.client.publish(
                    f"stream/{number % self.topics}", b"%d" % number, qos_of(number)
                )
            else:
                time.sleep(0.001)

    def stop(self) -> None:
        """All that was sent is acknowledged."""
        self._stop.set()
        self._thread.join()
        wait_until(lambda: self.acknowledged >= self.sent, "everything is acknowledged")
        self.client.close()


class Listener:
    """A session that outlives its connections, and what it got."""

    def __init__(self, member: Member, name: str) -> None:
        self.member = member
        self.client = Paho(member.port, name, clean=False, expiry_s=SESSION_S)
        self.client.client.reconnect_delay_set(0.1, 0.5)
        self.client.subscribe("stream/#", 2)

    def got(self) -> list[tuple[int, int, bool]]:
        """Number, QoS and DUP, in order."""
        return [(int(m.payload), m.qos, m.dup) for m in list(self.client.messages.queue)]

    def check(self, origin: Member, sent: int, topics: int = 3) -> None:
        """What the origin has stored, each once and in order. That is not quite what was sent: paho
        sends a QoS 2 message anew that it had released when it has to reconnect twice."""
        missing = set(range(sent))

        def all_arrive() -> bool:
            missing.difference_update(number for number, _, _ in self.got())
            return not missing

        try:
            wait_until(all_arrive, "all arrive")
        except AssertionError as error:
            error.add_note(f"missing: {sorted(missing)}")
            raise
        got = self.got()
        assert all(qos == qos_of(number) for number, qos, _ in got)
        for topic in range(topics):
            name = f"stream/{topic}"
            stored = self.member.stored(name)
            assert stored == origin.stored(name)
            assert list(dict.fromkeys(stored)) == list(range(topic, sent, topics))
            # paho hands out a message of QoS 2 with its PUBREL, after later ones of QoS 1.
            mine = [(number, qos) for number, qos, dup in got if number % topics == topic]
            assert [n for n, qos in mine if qos == 2] == [n for n in stored if qos_of(n) == 2]
            first = list(dict.fromkeys(n for n, qos in mine if qos == 1))
            assert first == sorted(first), "order"


def _await_progress(stream: Stream, count: int) -> None:
    target = stream.acknowledged + count
    wait_until(lambda: stream.acknowledged >= target, f"{count} more are acknowledged")


@pytest.mark.parametrize("killed", ["origin", "relay", "destination"])
@pytest.mark.timeout(180)
def test_kill_9_loses_and_repeats_nothing(tmp_path: Path, killed: str) -> None:
    with line(tmp_path) as members:
        a, _, c = members
        victim = members[["origin", "relay", "destination"].index(killed)]
        listener = Listener(c, "listener")
        a.await_sending("stream/#")
        stream = Stream(a, "stream")
        try:
            for _ in range(2):
                _await_progress(stream, 60)
                victim.kill()
                time.sleep(0.3)
                victim.start()
            _await_progress(stream, 60)
        finally:
            stream.stop()
        listener.check(a, stream.sent)
        listener.client.close()


@pytest.mark.timeout(180)
def test_what_was_acknowledged_goes_out_though_the_origin_dies_at_once(tmp_path: Path) -> None:
    """Killed with the last acknowledgement, while the way is cut and the destination away."""
    with line(tmp_path) as members:
        a, b, c = members
        listener = Listener(c, "listener")
        a.await_sending("stream/#")
        listener.client.close()
        sent = 0
        for kill_others in (False, True, False):
            if kill_others:
                b.kill()
                c.kill()
            with Paho(a.port, "p") as publisher:
                for _ in range(30):
                    publisher.publish(f"stream/{sent % 3}", b"%d" % sent, qos_of(sent))
                    sent += 1
                a.kill()
            a.start()
            if kill_others:
                b.start()
                c.start()
        again = Listener(c, "listener")
        again.check(a, sent)
        again.client.close()


@pytest.mark.timeout(180)
def test_a_pair_on_one_directory_is_one_member(tmp_path: Path) -> None:
    """The standby goes on as the same member, in its next epoch, with what waits for others."""
    data = tmp_path / "data"
    first = Member(tmp_path, "first", {"node": {"id": "p1", "standby": True}}, data)
    second = Member(tmp_path, "second", {"node": {"id": "p2", "standby": True}}, data)
    far = Member(tmp_path, "far")
    far.link_to(first, second)
    with running([far, first], [second]):
        wait_until(lambda: first.federation().get("members") == 2, "the pair's member is linked")
        was = first.federation()
        listener = Listener(far, "listener")
        first.await_sending("stream/#")
        stream = _Roaming([first.port, second.port])
        stream.publish(50)
        first.kill()
        wait_until(second.serves, "the standby serves")
        stream.publish(50)
        wait_until(lambda: bool(second.federation().get("running")), "it is a member")
        now = second.federation()
        assert now["id"] == was["id"]
        assert now["epoch"] > was["epoch"]
        listener.check(second, stream.sent)
        listener.client.close()


class _Roaming:
    """Publishes through whichever node serves, each message until it is acknowledged."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self.sent = 0

    def publish(self, count: int) -> None:
        for port in self.ports:
            try:
                client = Paho(port, "roaming")
            except OSError:
                continue
            with client:
                for _ in range(count):
                    number = self.sent
                    client.publish(f"stream/{number % 3}", b"%d" % number, qos_of(number))
                    self.sent += 1
            return
        raise AssertionError("nobody serves")
