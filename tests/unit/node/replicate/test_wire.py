"""Frames between leader and followers: what was encoded comes back, all else is refused."""

import random
from collections.abc import Callable

import pytest

from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.record import MESSAGE, Record
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.replicate.codec import (
    CUT,
    EPOCH,
    FOLLOW_ENTRY,
    FOLLOW_FROM_ENTRY,
    OFFSET_ENTRY,
    decode_ack,
    decode_follow,
    decode_follow_from,
    decode_offsets,
    decode_replicate,
    encode_ack,
    encode_follow,
    range_of,
    replicate_parts,
)


def batch(partition: int, base: int, count: int, epoch: int) -> bytes:
    builder = BatchBuilder(partition, base)
    for number in range(count):
        builder.add(
            Record(
                builder.partition, MESSAGE, timestamp_us=number, topic=b"a/b", payload=b"x" * number
            )
        )
    return builder.build(epoch)


FIRST = batch(3, 10, 2, 4)
SECOND = batch(65535, 0, 5, 7)
FOLLOW = encode_follow("0a1b", [FOLLOW_ENTRY.pack(1, 5, 9, 4, 100, 90)])
FOLLOW_FROM = FOLLOW_FROM_ENTRY.pack(1, 5, 9, CUT, 3, 80, 70) * 2
ACK = encode_ack(1 << 40, [OFFSET_ENTRY.pack(1, 5, 90), OFFSET_ENTRY.pack(2, 6, 1 << 50)])
REPLICATE = b"".join(replicate_parts([EPOCH.pack(5), EPOCH.pack(7)], [FIRST, SECOND]))


def test_what_is_encoded_comes_back() -> None:
    assert decode_follow(FOLLOW) == ("0a1b", [(1, 5, 9, 4, 100, 90)])
    assert decode_follow_from(FOLLOW_FROM) == [(1, 5, 9, CUT, 3, 80, 70)] * 2
    assert decode_ack(ACK) == (1 << 40, [(1, 5, 90), (2, 6, 1 << 50)])
    assert decode_offsets("COMMIT", ACK[8:]) == [(1, 5, 90), (2, 6, 1 << 50)]
    (first_epoch, first), (second_epoch, second) = decode_replicate(REPLICATE)
    assert (first_epoch, second_epoch) == (5, 7)
    assert (first.partition, first.base_offset, first.end_offset, first.epoch) == (3, 10, 12, 4)
    assert second.data[second.start : second.start + second.length] == SECOND
    assert range_of(SECOND) == (65535, 0, 5, 7)


DECODERS: list[tuple[Callable[[bytes], object], bytes]] = [
    (decode_follow, FOLLOW),
    (decode_follow_from, FOLLOW_FROM),
    (decode_ack, ACK),
    (decode_replicate, REPLICATE),
]


@pytest.mark.parametrize(("decode", "payload"), DECODERS)
def test_a_prefix_is_refused_or_a_whole_number_of_entries(
    decode: Callable[[bytes], object], payload: bytes
) -> None:
    refused = 0
    for length in range(len(payload)):
        try:
            decode(payload[:length])
        except BadFrame:
            refused += 1
    assert refused >= len(payload) - 3


def test_a_changed_byte_of_a_batch_is_seen() -> None:
    starts = len(REPLICATE) - len(FIRST) - len(SECOND)
    for at in range(starts, len(REPLICATE)):
        damaged = bytearray(REPLICATE)
        damaged[at] ^= 0x10
        with pytest.raises(BadFrame):
            decode_replicate(bytes(damaged))


@pytest.mark.parametrize("decode", [decoder for decoder, _ in DECODERS])
def test_noise_is_refused_as_a_bad_frame_or_read(decode: Callable[[bytes], object]) -> None:
    noise = random.Random(1)
    refused = 0
    for _ in range(500):
        try:
            decode(noise.randbytes(noise.randint(0, 80)))
        except BadFrame:
            refused += 1
    assert refused > 400


def test_a_batch_newer_than_its_leader_is_refused() -> None:
    with pytest.raises(BadFrame, match="epoch 7 from the leader of epoch 6"):
        decode_replicate(b"".join(replicate_parts([EPOCH.pack(6)], [SECOND])))


def test_a_batch_without_records_is_refused() -> None:
    empty = BatchBuilder(3, 10).build(5)
    with pytest.raises(BadFrame, match="no records"):
        decode_replicate(b"".join(replicate_parts([EPOCH.pack(5)], [empty])))


def test_bytes_after_the_last_batch_are_refused() -> None:
    with pytest.raises(BadFrame, match="1 bytes after"):
        decode_replicate(REPLICATE + b"\0")


def test_an_unknown_action_is_refused() -> None:
    with pytest.raises(BadFrame, match="action 9"):
        decode_follow_from(FOLLOW_FROM_ENTRY.pack(1, 5, 9, 9, 3, 80, 70))
