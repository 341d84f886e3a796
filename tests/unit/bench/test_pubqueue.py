"""What the Publish Queue benchmark makes of its runs, and that its subscriber notices faults."""

import socket
import threading
from collections.abc import Callable

import pytest

from bench import pubqueue, wire
from bench.pubqueue import Run, ratios
from bench.pubqueue_receiver import Receiver, judge
from bench.pubqueue_variants import BASELINE, VARIANTS, by_name
from bench.wire import Frame

TOPIC = "bench/queue/test"


def payload(number: int) -> bytes:
    return b"%04d" % number + b"." * (pubqueue.PAYLOAD_BYTES - 4)


@pytest.mark.parametrize(
    ("numbers", "fault"),
    [
        ([1, 2, 3, 4], ""),
        ([1, 2, 4], "1 missing"),
        ([1, 2, 2, 3, 4, 4, 4], "3 double"),
        ([1, 3, 2, 4], "out of order"),
        ([1, 2, 3, 4, 7], "1 never sent"),
        ([2, 1, 1, 9], "2 missing, 1 double, 1 never sent, out of order"),
        ([], "4 missing"),
    ],
)
def test_the_judgement_of_what_arrived(numbers: list[int], fault: str) -> None:
    assert judge(numbers, 4) == fault


def test_a_ratio_compares_runs_of_one_round() -> None:
    runs = [
        Run("b", BASELINE, 0, 1.0, 0.0),
        Run("b", BASELINE, 1, 3.0, 0.0),
        Run("b", "memory", 1, 1.5, 0.0),
        Run("b", "memory", 0, 0.25, 0.0),
        Run("other", "memory", 0, 100.0, 0.0),
    ]
    assert sorted(ratios(runs, "b", "memory")) == [2.0, 4.0]
    assert ratios(runs, "other", "memory") == []


def test_a_target_is_judged_by_the_median_ratio() -> None:
    variant = by_name("memory")
    runs = [Run("holdfast", BASELINE, round_, 1.0, 0.0) for round_ in range(3)]
    runs += [
        Run("holdfast", "memory", round_, time_s, 0.0)
        for round_, time_s in enumerate((1, 0.5, 0.4))
    ]
    assert pubqueue.line(runs, "holdfast", variant).endswith("pass")
    slow = [
        run if run.variant == BASELINE else Run("holdfast", "memory", run.round, 0.6, 0.0)
        for run in runs
    ]
    assert pubqueue.line(slow, "holdfast", variant).endswith("MISS")
    assert pubqueue.line(slow, "holdfast", by_name(BASELINE)).endswith("1.00 (1.00..1.00)")


def test_the_variants_are_told_apart_by_name() -> None:
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    with pytest.raises(KeyError):
        by_name("nothing")


class Sender:
    """A broker with one subscriber, which sends what the test says and keeps the answers."""

    def __init__(self, qos: int) -> None:
        self.frame = Frame(TOPIC, qos, pubqueue.PAYLOAD_BYTES)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._greet)
        self._thread.start()

    def _greet(self) -> None:
        self._connection, _ = self._listener.accept()
        self._read(len(wire.connect("bench-receiver")))
        self._connection.sendall(wire.CONNACK_ACCEPTED)
        self._read(len(wire.subscribe(TOPIC, self.frame.qos)))
        self._connection.sendall(wire.suback(self.frame.qos))

    def _read(self, count: int) -> bytes:
        assert self._connection is not None
        data = b""
        while len(data) < count:
            data += self._connection.recv(count - len(data))
        return data

    def packet(self, number: int, *, dup: bool = False) -> bytes:
        packet = self.frame.batch(wire.Ids(b"\0", bytes([number % 255 + 1])))
        packet[self.frame.payload_at :] = payload(number)
        packet[0] |= 8 if dup else 0
        return bytes(packet)

    def send(self, data: bytes) -> None:
        self._thread.join()
        assert self._connection is not None
        self._connection.sendall(data)

    def answers(self, count: int) -> bytes:
        return self._read(count * wire.ACK_BYTES)

    def close(self) -> None:
        self._thread.join()
        assert self._connection is not None
        self._connection.close()
        self._listener.close()


def receiver_of(sender: Sender) -> Receiver:
    return Receiver(sender.port, TOPIC, sender.frame.qos, pubqueue.PAYLOAD_BYTES, pubqueue.END)


def test_the_receiver_acknowledges_and_keeps_the_order_however_the_bytes_are_cut() -> None:
    sender = Sender(1)
    receiver = receiver_of(sender)
    stream = b"".join(sender.packet(number) for number in (1, 2, 3))
    stream += sender.packet(2, dup=True) + sender.packet(pubqueue.END)
    for at in range(0, len(stream), 7):
        sender.send(stream[at : at + 7])
    assert receiver.join() == [1, 2, 3, 2]
    assert sender.answers(5)[0::4] == bytes([wire.PUBACK] * 5)
    sender.close()


def test_the_receiver_completes_qos_2() -> None:
    sender = Sender(2)
    receiver = receiver_of(sender)
    sender.send(sender.packet(1))
    assert sender.answers(1) == bytes([wire.PUBREC, 2, 0, 2])
    sender.send(bytes([wire.PUBREL, 2, 0, 2]) + sender.packet(pubqueue.END))
    assert receiver.join() == [1]
    assert sender.answers(2)[0::4] == bytes([wire.PUBCOMP, wire.PUBREC])
    sender.close()


@pytest.mark.parametrize(
    "end",
    [lambda sender: sender.send(b"\x30\x03\x00\x01a" + bytes(60)), lambda sender: sender.close()],
)
def test_the_receiver_raises_what_went_wrong(end: Callable[[Sender], None]) -> None:
    sender = Sender(1)
    receiver = receiver_of(sender)
    end(sender)
    with pytest.raises(Exception, match=r"not a message|closed by the broker"):
        receiver.join()
    sender.close()


def test_a_receiver_whose_publisher_failed_can_be_given_up() -> None:
    sender = Sender(1)
    receiver = receiver_of(sender)
    receiver.abandon()
    sender.close()
