"""Indexes: the active one, its file, and what is found in both."""

import pytest

from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.reading.index import INDEX_BITS, SegmentIndex
from holdfast.log.reading.index_file import CorruptIndex, decode, decode_head, head_length

TOPICS = [b"b/1", b"a", b"a/1", b"c", b"\xc3\xa9", b"a-x", b"a/1/2"]


def pause() -> None:
    return None


def sample() -> ActiveIndex:
    """Partition 0: offsets 10 to 14 and, after a gap, 20 to 22. Partition 2: 5 to 6."""
    index = ActiveIndex(100, [10, 0, 5])
    index.add_batch(0, 200, 0, 10, 1, 1000, 50, [b"a", b"", b"b/1", b"a"])
    index.add_batch(200, 120, 2, 5, 0, 900, 0, [b"a/1"])
    index.add_batch(320, 152, 0, 20, 0, 1100, 7, [b"a", b"c"])
    return index


@pytest.fixture(params=["active", "sealed"])
def index(request: pytest.FixtureRequest) -> SegmentIndex:
    active = sample()
    return active if request.param == "active" else decode(active.encode(pause))


def test_head(index: SegmentIndex) -> None:
    head = index.head
    assert (head.sequence, head.log_bytes, head.records) == (100, 472, 7)
    assert (head.first_timestamp_us, head.last_timestamp_us) == (900, 1107)
    assert head.start_offsets == [10, 0, 5]
    assert head.end_offsets == [22, 0, 6]
    assert [(gap.partition, gap.start, gap.end) for gap in head.gaps] == [(0, 14, 20)]


def test_find_batch(index: SegmentIndex) -> None:
    found = [index.find_batch(0, offset) for offset in (0, 10, 13, 14, 19, 20, 21, 22)]
    assert found == [0, 0, 0, 2, 2, 2, 2, -1]
    assert index.find_batch(1, 0) == -1
    assert index.find_batch(2, 5) == 1


def test_where_batches_are(index: SegmentIndex) -> None:
    assert index.batch_count() == 3
    assert [index.positions[number] for number in range(3)] == [0, 200, 320]
    assert [index.batch_end(number) for number in range(3)] == [200, 320, 472]
    assert list(index.by_partition[0]) == [0, 2]


def test_offset_at(index: SegmentIndex) -> None:
    middle = (0 << INDEX_BITS) + 2
    assert [index.offset_at(partition, middle) for partition in range(3)] == [12, 0, 5]
    later = 2 << INDEX_BITS
    assert [index.offset_at(partition, later) for partition in range(3)] == [20, 0, 6]


def test_postings(index: SegmentIndex) -> None:
    number = index.find_topic(b"a")
    assert list(index.postings(number)) == [0, 3, 2 << INDEX_BITS]
    assert list(index.postings(index.find_topic(b"b/1"))) == [2]
    assert index.find_topic(b"nothing") == -1
    assert index.find_topic(b"") == -1
    assert index.message_counts() == {b"a": 3, b"b/1": 1, b"a/1": 1, b"c": 1}


def test_topic_range_has_all_with_the_prefix() -> None:
    active = ActiveIndex(0, [0])
    active.add_batch(0, 8, 0, 0, 0, 0, 0, TOPICS)
    for index in (active, decode(active.encode(pause))):
        for prefix in (b"", b"a", b"a/", b"\xc3", b"b/1", b"z"):
            start, end = index.topic_range(prefix)
            found = {index.topic(number) for number in range(start, end)}
            assert {topic for topic in TOPICS if topic.startswith(prefix)} <= found
    sealed = decode(active.encode(pause))
    start, end = sealed.topic_range(b"a/")
    assert [sealed.topic(number) for number in range(start, end)] == [b"a/1", b"a/1/2"]


def test_many_topics_are_sorted_in_pieces() -> None:
    active = ActiveIndex(0, [0])
    topics = [b"site/%d/%d" % (number * 7919 % 50, number) for number in range(9000)]
    active.add_batch(0, 8, 0, 0, 0, 0, 0, topics)
    pauses = []
    sealed = decode(active.encode(lambda: pauses.append(1)))
    assert [sealed.topic(number) for number in range(9000)] == sorted(topics)
    assert list(sealed.postings(sealed.find_topic(topics[4321]))) == [4321]
    assert len(pauses) >= 4
    assert active.encode(pause) == active.encode(None)


def test_gap_at_the_end() -> None:
    index = sample()
    index.add_gap(1, 4)
    index.add_gap(0, 22)
    assert index.head.end_offsets == [22, 4, 6]
    assert len(index.head.gaps) == 2
    head = decode_head(index.encode(pause))
    assert [(gap.partition, gap.start, gap.end) for gap in head.gaps] == [(0, 14, 20), (1, 0, 4)]


def test_empty_index() -> None:
    sealed = decode(ActiveIndex(7, [1, 2]).encode(pause))
    assert sealed.batch_count() == 0
    assert sealed.find_batch(0, 0) == -1
    assert sealed.find_topic(b"a") == -1
    assert sealed.head.end_offsets == [1, 2]


def test_every_changed_byte_is_noticed() -> None:
    data = sample().encode(pause)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 0x10
        with pytest.raises(CorruptIndex):
            decode(bytes(changed))


def test_every_truncation_is_noticed() -> None:
    data = sample().encode(pause)
    for length in range(len(data)):
        with pytest.raises(CorruptIndex):
            decode(data[:length])


def test_the_head_alone() -> None:
    data = sample().encode(pause)
    length = head_length(data[:12])
    head = decode_head(data[:length])
    assert head.end_offsets == [22, 0, 6]
    assert head.head_bytes + head.body_bytes == len(data)
    with pytest.raises(CorruptIndex, match="magic"):
        head_length(b"x" * 12)
