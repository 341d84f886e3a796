"""The window of the sink: order, repetition and refusals, also against a broker like Holdfast that
fails at random."""

import random
from collections import deque

import pytest

from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import PUBACK, PUBCOMP, PUBREC
from holdfast_lake.sink.publisher import (
    BYTES_MAX,
    PAUSE_MAX_S,
    PublishWindow,
    RowRefused,
    UnknownPacket,
)

QOS_1 = 0x32


def add(window: PublishWindow, number: int) -> bytes:
    return window.add(QOS_1, b"\0\1t", b"%d" % number)


def number_of(frame: bytes) -> int:
    """Of a short frame: what stands behind the packet id."""
    return int(frame[7:])


def id_of(frame: bytes) -> int:
    return frame[5] << 8 | frame[6]


def test_frames() -> None:
    window = PublishWindow(10)
    assert window.add(QOS_1, b"\0\1t", b"\0payload") == b"\x32\x0d\0\1t\0\1\0payload"
    long = window.add(0x3D, b"\0\1t", b"x" * 200)
    assert long[:3] == b"\x3d\xcd\x01"
    assert long[3:8] == b"\0\1t\0\2"
    assert window.on_wire == 2
    window.acknowledged(1)
    assert (window.on_wire, window.resolved) == (1, 1)


def test_a_full_window_has_no_room() -> None:
    window = PublishWindow(3)
    window.connected(2)
    add(window, 1)
    assert window.has_room()
    add(window, 2)
    assert not window.has_room()
    window.acknowledged(1)
    assert window.has_room()
    window.add(QOS_1, b"\0\1t", bytes(BYTES_MAX))
    window.acknowledged(2)
    assert not window.has_room(), "its bytes count, too"
    window.acknowledged(3)
    assert window.has_room()


def test_packet_ids_in_use_are_passed_over() -> None:
    window = PublishWindow(65_535)
    first = add(window, 0)
    for number in range(1, 65_535):
        window.acknowledged(id_of(add(window, number)))
    following = [id_of(add(window, number)) for number in range(2)]
    assert id_of(first) == 1
    assert following == [2, 3], "1 is still on the wire"


@pytest.mark.parametrize("packet_id", [0, 2, 65_535])
def test_an_acknowledgement_of_nothing(packet_id: int) -> None:
    window = PublishWindow(10)
    add(window, 1)
    with pytest.raises(UnknownPacket, match=f"packet id {packet_id}"):
        window.acknowledged(packet_id)
    with pytest.raises(UnknownPacket):
        window.handle_acknowledgement(PUBACK, packet_id, 0, "", 0.0)


def test_acknowledged_while_it_waits_to_be_sent_again() -> None:
    window = PublishWindow(10)
    add(window, 1)
    window.connected(10)
    with pytest.raises(UnknownPacket):
        window.acknowledged(1)
    window.pop_due(0.0)
    window.handle_acknowledgement(PUBACK, 1, reasons.QUOTA_EXCEEDED, "", 0.0)
    with pytest.raises(UnknownPacket):
        window.acknowledged(1)


def test_a_new_connection_gets_everything_again_in_order() -> None:
    window = PublishWindow(10)
    frames = [add(window, number) for number in range(5)]
    window.acknowledged(id_of(frames[1]))
    window.connected(2)
    assert not window.has_room()
    assert window.pop_due(0.0) == [frames[0], frames[2]]
    assert window.pop_due(0.0) == []
    window.acknowledged(id_of(frames[2]))
    assert window.pop_due(0.0) == [frames[3]]
    window.acknowledged(id_of(frames[0]))
    window.acknowledged(id_of(frames[3]))
    assert window.pop_due(0.0) == [frames[4]]
    window.acknowledged(id_of(frames[4]))
    assert window.has_room()
    assert window.resent == 4


def test_nothing_new_goes_out_while_there_is_no_connection() -> None:
    window = PublishWindow(10)
    frame = add(window, 1)
    window.disconnected()
    assert not window.has_room()
    window.connected(10)
    assert window.pop_due(0.0) == [frame]
    assert window.has_room()


def test_qos_2() -> None:
    window = PublishWindow(10)
    window.add(0x34, b"\0\1t", b"")
    assert window.handle_acknowledgement(PUBREC, 1, 0, "", 0.0) == b"\x62\x02\0\1"
    assert window.unsettled
    assert (
        window.handle_acknowledgement(PUBCOMP, 1, reasons.PACKET_IDENTIFIER_NOT_FOUND, "", 0.0)
        == b""
    )
    assert not window.unsettled
    window.add(0x34, b"\0\1t", b"")
    with pytest.raises(RowRefused, match="Not authorized"):
        window.handle_acknowledgement(PUBREC, 2, reasons.NOT_AUTHORIZED, "", 0.0)
    assert not window.unsettled


def test_refused_for_good() -> None:
    window = PublishWindow(10)
    frame = add(window, 1)
    add(window, 2)
    with pytest.raises(RowRefused, match="Topic Name invalid") as caught:
        window.handle_acknowledgement(PUBACK, 1, reasons.TOPIC_NAME_INVALID, "why", 0.0)
    assert (caught.value.frame, caught.value.detail) == (frame, "why")
    assert window.on_wire == 1, "it holds nothing back"
    assert window.has_room()


def test_refused_for_now() -> None:
    window = PublishWindow(10)
    frames = [add(window, number) for number in range(4)]
    window.acknowledged(1)
    window.handle_acknowledgement(PUBACK, 2, reasons.QUOTA_EXCEEDED, "disk full", 5.0)
    assert not window.has_room()
    assert window.pop_due(99.0) == [], "3 and 4 are still on the wire"
    assert window.timer() is None
    window.handle_acknowledgement(PUBACK, 3, reasons.QUOTA_EXCEEDED, "", 5.0)
    window.acknowledged(4)
    resume_at = window.timer()
    assert resume_at is not None
    assert window.pop_due(resume_at - 0.001) == []
    assert window.pop_due(resume_at) == [frames[1]], "first that one alone"
    assert window.pop_due(resume_at) == []
    window.handle_acknowledgement(PUBACK, 2, reasons.QUOTA_EXCEEDED, "disk full", resume_at)
    again_at = window.timer()
    assert again_at is not None
    assert again_at - resume_at > resume_at - 5.0, "longer each time"
    assert window.last_refusal == "Quota exceeded: disk full"
    assert window.pop_due(again_at) == [frames[1]]
    window.acknowledged(2)
    assert window.pop_due(again_at) == [frames[2]]
    window.acknowledged(3)
    assert window.has_room()


def test_pauses_are_bounded() -> None:
    window = PublishWindow(1)
    add(window, 1)
    now = 0.0
    for _ in range(20):
        window.handle_acknowledgement(PUBACK, 1, reasons.SERVER_BUSY, "", now)
        resume_at = window.timer()
        assert resume_at is not None
        assert resume_at - now <= PAUSE_MAX_S + 0.001
        now = resume_at
        window.pop_due(now)


class Connection:
    """The server's end: what has not been read yet, what the client has not read yet, and which
    sequence was refused."""

    def __init__(self) -> None:
        self.incoming: deque[bytes] = deque()
        self.answers: deque[tuple[int, int]] = deque()
        self.hole = 0


class RandomBroker:
    """What Holdfast does with one producer in one partition: it stores a higher sequence, and
    refuses what is behind a refused one on the same connection. What a lost connection has sent
    may still be read, beside what the next one sends."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.stored: list[int] = []
        self.current = Connection()
        self.lost: list[Connection] = []
        self.is_full = False

    def reconnect(self) -> None:
        old, self.current = self.current, Connection()
        for _ in range(self.choose.randrange(len(old.incoming) + 1)):
            old.incoming.pop()
        self.lost.append(old)

    def step(self) -> None:
        if self.choose.random() < 0.02:
            self.is_full = not self.is_full
        connection = self.choose.choice([self.current, *self.lost[-2:]])
        if connection.incoming:
            frame = connection.incoming.popleft()
            reason = self.admit(connection, number_of(frame))
            connection.answers.append((id_of(frame), reason))

    def admit(self, connection: Connection, sequence: int) -> int:
        if connection.hole and sequence > connection.hole:
            return reasons.QUOTA_EXCEEDED
        connection.hole = 0
        if self.stored and sequence <= self.stored[-1]:
            return reasons.SUCCESS
        if self.is_full:
            connection.hole = sequence
            return reasons.QUOTA_EXCEEDED
        self.stored.append(sequence)
        return reasons.SUCCESS


@pytest.mark.parametrize("seed", range(60))
def test_each_message_once_and_in_order(seed: int) -> None:
    choose = random.Random(seed)
    broker = RandomBroker(choose)
    window = PublishWindow(choose.choice([1, 2, 7, 50]))
    receive_maximum = choose.choice([1, 5, 100])
    window.connected(receive_maximum)
    total, given, now = 80, 0, 0.0
    for _ in range(100_000):
        now += choose.random() * 0.1
        if given < total and window.has_room() and choose.random() < 0.5:
            given += 1
            broker.current.incoming.append(add(window, given))
        broker.current.incoming.extend(window.pop_due(now))
        assert window.on_wire <= receive_maximum
        broker.step()
        if broker.current.answers and choose.random() < 0.7:
            packet_id, reason = broker.current.answers.popleft()
            window.handle_acknowledgement(PUBACK, packet_id, reason, "", now)
        if choose.random() < 0.01:
            broker.reconnect()
            window.connected(receive_maximum)
        if given == total and not window.unsettled:
            break
    assert broker.stored == list(range(1, total + 1))
    assert window.resolved == total
