"""Damage in the journal: the broker starts, says what it found, and keeps everything else."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import wire
from tests.e2e.brokers import Holdfast
from tests.e2e.conftest import StartHoldfast

MESSAGES = 200
SETTINGS = {"log": {"segment_bytes": 1 << 16, "partitions": 1}}


def fill(broker: Holdfast) -> None:
    """A durable subscriber that is away, and numbered messages, one acknowledged after another
    so that each lies in a batch of its own; several segments of them."""
    with wire.Wire(broker.port) as reader:
        reader.connect("reader", expiry_s=3600)
        reader.subscribe(("t", 1))
        reader.disconnect()
    with wire.Wire(broker.port) as publisher:
        publisher.connect("publisher")
        for number in range(MESSAGES):
            assert publisher.publish("t", b"%05d " % number + b"x" * 900, qos=1) < 0x80
    broker.kill()


def append(segment: Path, data: bytes) -> None:
    """Behind the last batch, whose padding ends at a multiple of 8."""
    with segment.open("r+b") as file:
        file.truncate((len(segment.read_bytes().rstrip(b"\0")) + 7) & ~7)
        file.seek(0, 2)
        file.write(data)


def position_of(segments: list[Path], number: int) -> tuple[Path, int]:
    """Where the payload of that message lies."""
    for segment in segments:
        at = segment.read_bytes().find(b"%05d xxx" % number)
        if at >= 0:
            return segment, at
    raise AssertionError(f"message {number} is in no segment")


def read_back(broker: Holdfast) -> list[int]:
    """What the durable subscriber gets, up to a message published now."""
    with wire.Wire(broker.port) as reader, wire.Wire(broker.port) as publisher:
        assert reader.connect("reader", clean=False, expiry_s=3600).session_present
        publisher.connect("publisher")
        assert publisher.publish("t", b"99999 end", qos=1) < 0x80
        numbers: list[int] = []
        while True:
            number = int(reader.message().payload[:5])
            if number == 99999:
                return numbers
            numbers.append(number)


def append_garbage(segments: list[Path]) -> set[int]:
    append(segments[-1], b"\xa5 noise, not a batch" * 40)
    return set()


def append_half_batch(segments: list[Path]) -> set[int]:
    """The start of a batch as a power cut leaves it."""
    data = segments[-1].read_bytes()
    start = data.rindex(b"HFLB", 0, position_of(segments, MESSAGES - 1)[1])
    append(segments[-1], data[start : start + 500])
    return set()


def truncate(segments: list[Path]) -> set[int]:
    with segments[-1].open("r+b") as file:
        file.truncate(position_of(segments, MESSAGES - 1)[1] + 100)
    return {MESSAGES - 1}


def flip_in_last_segment(segments: list[Path]) -> set[int]:
    return flip(segments, MESSAGES - 5)


def flip_in_sealed_segment(segments: list[Path]) -> set[int]:
    assert len(segments) > 2
    return flip(segments, MESSAGES // 2)


def flip(segments: list[Path], number: int) -> set[int]:
    segment, at = position_of(segments, number)
    with segment.open("r+b") as file:
        file.seek(at + 100)
        file.write(b"y")
    return {number}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (append_garbage, "journal_tail_truncated"),
        (append_half_batch, "journal_tail_truncated"),
        (truncate, "journal_tail_truncated"),
        (flip_in_last_segment, "journal_damaged"),
        (flip_in_sealed_segment, "journal_damaged"),
    ],
)
def test_damage(
    start_holdfast: StartHoldfast, damage: Callable[[list[Path]], set[int]], said: str
) -> None:
    broker = start_holdfast(SETTINGS)
    fill(broker)
    hit = damage(broker.segments())
    log_before = len(broker.log_text())
    broker.start()
    assert read_back(broker) == [number for number in range(MESSAGES) if number not in hit]
    assert said in broker.log_text()[log_before:]

    # Once told, the next start is an ordinary one.
    assert broker.stop() == 0
    broker.start()
    assert read_back(broker) == []


def test_damaged_bytes_are_kept_aside(start_holdfast: StartHoldfast) -> None:
    broker = start_holdfast(SETTINGS)
    fill(broker)
    flip_in_sealed_segment(broker.segments())
    sizes = {segment.name: segment.stat().st_size for segment in broker.segments()[:-1]}
    broker.start()
    read_back(broker)
    kept = list((broker.data / "quarantine").iterdir())
    assert any(b"%05d x" % (MESSAGES // 2) in file.read_bytes() for file in kept)
    # Never truncated away.
    after = {segment.name: segment.stat().st_size for segment in broker.segments()}
    assert sizes.items() <= after.items()
