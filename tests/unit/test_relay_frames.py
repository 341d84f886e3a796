"""The frames between the broker and its I/O workers, in any pieces, and bytes that are none."""

import random

import pytest

from holdfast.protocol.relay.credit import WINDOW_BYTES, ReceivingCredit, SendingCredit
from holdfast.protocol.relay.frames import (
    CREDIT,
    DATA,
    ENDED,
    HEADER_BYTES,
    OPENED,
    PAYLOAD_BYTES_MAX,
    PONG,
    ClientArrival,
    RelayError,
    RelayReader,
    add_data,
    count_frame,
    decode_arrival,
    frame,
)

Frame = tuple[int, int, bytes]


def read(reader: RelayReader, data: bytes) -> list[Frame]:
    reader.feed(data)
    found = []
    while reader.next():
        found.append((reader.kind, reader.number, reader.content()))
    return found


def test_frames_arrive_whole_in_any_pieces() -> None:
    frames: list[Frame] = [
        (OPENED, 1, ClientArrival(3, "[::1]:4321", "tüv").encode()),
        (DATA, 1, b"\x10\x0c\x00\x04MQTT"),
        (DATA, 2**32 - 1, b""),
        (DATA, 1, bytes(1000)),
        (ENDED, 1, b""),
    ]
    stream = b"".join(frame(*each) for each in frames)
    for size in (1, 2, 3, HEADER_BYTES, HEADER_BYTES + 1, 100, len(stream)):
        reader = RelayReader()
        found = [
            each
            for start in range(0, len(stream), size)
            for each in read(reader, stream[start : start + size])
        ]
        assert found == frames, size


def test_long_data_travels_in_several_frames() -> None:
    data = random.Random(1).randbytes(2 * PAYLOAD_BYTES_MAX + 17)
    out: list[bytes] = []
    add_data(out, 7, data)
    found = read(RelayReader(), b"".join(out))
    assert [len(content) for _, _, content in found] == [PAYLOAD_BYTES_MAX, PAYLOAD_BYTES_MAX, 17]
    assert b"".join(content for _, _, content in found) == data


def test_a_count_is_a_count() -> None:
    reader = RelayReader()
    reader.feed(count_frame(CREDIT, 5, 2**32 - 1) + frame(CREDIT, 5, b"\x01\x02\x03"))
    assert reader.next()
    assert reader.count() == 2**32 - 1
    assert reader.next()
    with pytest.raises(RelayError, match="a count of 3 bytes"):
        reader.count()


@pytest.mark.parametrize("remote", ["127.0.0.1:1", "unix:42", "", "fe80::1%eth0:5"])
def test_an_arrival_is_read_as_written(remote: str) -> None:
    made = decode_arrival(ClientArrival(65535, remote, "a name").encode())
    assert (made.listener, made.remote, made.certificate_name) == (65535, remote, "a name")


def test_every_truncated_arrival_is_an_error_or_shorter() -> None:
    content = ClientArrival(1, "127.0.0.1:4321", "").encode()
    for end in range(len(content)):
        with pytest.raises(RelayError):
            decode_arrival(content[:end])


@pytest.mark.parametrize("kind", [0, PONG + 1, 255])
def test_an_unknown_kind_is_an_error(kind: int) -> None:
    with pytest.raises(RelayError, match=f"kind {kind}"):
        read(RelayReader(), frame(kind, 1))


def test_a_frame_that_is_too_long_is_an_error_at_its_header() -> None:
    header = frame(DATA, 1, bytes(PAYLOAD_BYTES_MAX))[:HEADER_BYTES]
    assert read(RelayReader(), header) == []
    longer = header[:5] + (PAYLOAD_BYTES_MAX + 1).to_bytes(4, "little")
    with pytest.raises(RelayError, match=f"{PAYLOAD_BYTES_MAX + 1} bytes"):
        read(RelayReader(), longer)


def test_garbage_raises_nothing_but_its_error() -> None:
    chance = random.Random(2)
    errors = 0
    for _ in range(2000):
        reader = RelayReader()
        try:
            for _, _, content in read(reader, chance.randbytes(chance.randrange(64))):
                decode_arrival(content)
        except RelayError:
            errors += 1
    assert errors > 1000


class Direction:
    """One direction of a connection: a sender, the bytes on their way, and a receiver. `waits`:
    the receiver confirms nothing before two windows, which is planted as a defect."""

    def __init__(self, chance: random.Random, *, waits: bool = False) -> None:
        self.chance = chance
        self.sending = SendingCredit()
        self.receiving = ReceivingCredit()
        self.on_its_way: list[int] = []
        self.confirmations: list[int] = []
        self.sent = self.received = self.held = 0
        self.waits = waits

    def step(self, size: int) -> None:
        """Something that may happen next."""
        what = self.chance.randrange(3)
        if what == 0 and not self.sending.is_exhausted:
            self.sending.spend(size)
            self.on_its_way.append(size)
            self.sent += size
            assert self.sending.unconfirmed <= WINDOW_BYTES + size
        elif what == 1 and self.on_its_way:
            self.receive()
        elif what == 2 and self.confirmations:
            self.sending.restore(self.confirmations.pop(0))

    def receive(self) -> None:
        size = self.on_its_way.pop(0)
        self.received += size
        self.held += size
        if self.waits and self.held <= 2 * WINDOW_BYTES:
            return
        due = self.receiving.finish(self.held)
        self.held = 0
        if due:
            self.confirmations.append(due)

    def settle(self) -> None:
        """All that is on its way arrives."""
        while self.on_its_way or self.confirmations:
            if self.on_its_way:
                self.receive()
            else:
                self.sending.restore(self.confirmations.pop(0))


SIZES = (1, 100, WINDOW_BYTES // 2, WINDOW_BYTES // 2 + 1, WINDOW_BYTES, 3 * WINDOW_BYTES)


@pytest.mark.parametrize("seed", range(50))
def test_a_sender_is_bounded_and_never_stops_for_ever(seed: int) -> None:
    chance = random.Random(f"credit/{seed}")
    direction = Direction(chance)
    for _ in range(300):
        direction.step(chance.choice(SIZES))
    direction.settle()
    assert not direction.sending.is_exhausted
    assert direction.received == direction.sent


def test_a_receiver_that_waits_for_two_windows_is_found() -> None:
    stopped = 0
    for seed in range(50):
        chance = random.Random(f"credit/{seed}")
        direction = Direction(chance, waits=True)
        for _ in range(300):
            direction.step(chance.choice(SIZES))
        direction.settle()
        stopped += direction.sending.is_exhausted
    assert stopped
