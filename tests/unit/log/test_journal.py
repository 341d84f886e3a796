"""The journal's bookkeeping, without a disk."""

import pytest

from holdfast.log.batch import ATTRIBUTE_STATE, Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.journal import journal as journal_module
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.journal.journal import Journal
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.record import MESSAGE, SESSION, Record

TIME_US = 1_700_000_000_000_000


def append(journal: Journal, partition: int, payload: bytes = b"p", topic: bytes = b"t") -> int:
    return journal.append(
        Record(
            partition,
            MESSAGE,
            flags=1,
            timestamp_us=TIME_US,
            topic=topic,
            client_id=b"c",
            payload=payload,
        )
    )


def take(journal: Journal) -> WriteGroup:
    group = journal.close_write_group()
    assert group is not None
    return group


def test_offsets_are_dense_per_partition() -> None:
    journal = Journal(2)
    assert [append(journal, 0), append(journal, 1), append(journal, 0)] == [0, 0, 1]
    assert journal.next_offset == [2, 1]
    assert journal.sequence == 3
    assert journal.pending_bytes > 0


def forwarded(*payloads: bytes) -> Batch:
    builder = BatchBuilder(0, 0)
    for payload in payloads:
        builder.add(Record(0, MESSAGE, flags=1, timestamp_us=TIME_US, topic=b"t", payload=payload))
    return Batch(builder.build(0))


def test_batches_of_other_nodes_go_on_where_the_partition_ends() -> None:
    journal = Journal(2)
    append(journal, 0, b"1")
    assert journal.extend(forwarded(b"2", b"3")) == 1
    append(journal, 0, b"4")
    assert journal.extend(forwarded(b"5")) == 4
    assert (journal.next_offset, journal.sequence) == ([5, 0], 5)
    group = take(journal)
    (batch,) = map(Batch, group.data)
    assert [record.payload for record in batch.records()] == [b"1", b"2", b"3", b"4", b"5"]
    assert [record.offset for record in batch.records()] == [0, 1, 2, 3, 4]
    assert journal.pending_bytes == 0


def test_nothing_to_take() -> None:
    journal = Journal(1)
    assert journal.close_write_group() is None
    append(journal, 0)
    take(journal)
    assert journal.close_write_group() is None


def test_group_holds_one_batch_a_partition_in_order_of_first_records() -> None:
    journal = Journal(3)
    for partition in (2, 0, 2, 0):
        append(journal, partition)
    group = take(journal)
    assert [Batch(data).partition for data in group.data] == [2, 0]
    assert [Batch(data).count for data in group.data] == [2, 2]
    assert group.size_bytes == sum(map(len, group.data))
    assert (group.segment, group.position, group.starts_segment) == (0, 0, True)
    assert (group.end_sequence, group.end_offsets) == (4, [2, 0, 2])
    assert journal.pending_bytes == 0


def test_watermarks_follow_the_disk() -> None:
    journal = Journal(2)
    append(journal, 0)
    group = take(journal)
    append(journal, 0)
    append(journal, 1)
    assert (journal.written, journal.high_watermark) == ([0, 0], [0, 0])
    journal.wrote(group)
    assert (journal.written, journal.high_watermark) == ([1, 0], [0, 0])
    assert journal.committed_sequence == 0
    journal.commit(group)
    assert (journal.high_watermark, journal.committed_sequence) == ([1, 0], 1)


def test_segments_roll_at_their_size() -> None:
    journal = Journal(1, segment_bytes=1000)
    groups = []
    for _ in range(6):
        append(journal, 0, bytes(300))
        groups.append(take(journal))
    assert [group.segment for group in groups] == [0, 0, 2, 2, 4, 4]
    assert [group.starts_segment for group in groups] == [True, False] * 3
    assert groups[1].position == groups[0].size_bytes
    sealed = [group.sealed.sequence if group.sealed else None for group in groups]
    assert sealed == [None, None, 0, None, 2, None]
    assert [segment.end_offsets() for segment in journal.segments] == [[2], [4], [6]]
    assert [segment.start_offsets() for segment in journal.segments] == [[0], [2], [4]]
    assert [segment.end_sequence() for segment in journal.segments] == [2, 4, 6]
    assert journal.size_bytes() == sum(group.size_bytes for group in groups)
    assert journal.segments[-1].sequence == 4


def test_a_group_larger_than_a_segment_gets_one_of_its_own() -> None:
    journal = Journal(1, segment_bytes=1000)
    append(journal, 0, bytes(5000))
    assert take(journal).position == 0
    append(journal, 0)
    assert take(journal).starts_segment


def test_large_batches_are_closed() -> None:
    journal = Journal(1)
    payload = bytes(journal_module.BATCH_BODY_BYTES_MAX // 2)
    for _ in range(4):
        append(journal, 0, payload)
    group = take(journal)
    assert [Batch(data).count for data in group.data] == [2, 2]
    assert [Batch(data).base_offset for data in group.data] == [0, 2]


def test_index_of_the_active_segment_knows_what_was_taken() -> None:
    journal = Journal(2)
    append(journal, 1, topic=b"a")
    append(journal, 0, topic=b"b")
    take(journal)
    index = journal.segments[0].index
    assert isinstance(index, ActiveIndex)
    assert index.batch_count() == 2
    assert index.message_counts() == {b"a": 1, b"b": 1}


def test_remove_oldest_never_takes_the_active_segment() -> None:
    journal = Journal(1, segment_bytes=100)
    for _ in range(3):
        append(journal, 0)
        take(journal)
    assert [each.sequence for each in journal.remove_oldest(5)] == [0, 1]
    assert journal.start_offsets == [2]
    assert journal.remove_oldest(1) == []


def test_begin_at() -> None:
    journal = Journal(2)
    journal.continue_at([5, 7], 100)
    assert append(journal, 1) == 7
    group = take(journal)
    assert group.segment == 100
    assert group.end_offsets == [5, 8]
    assert journal.start_offsets == [5, 7]
    assert journal.segments[0].start_offsets() == [5, 7]


def test_going_on_with_segments() -> None:
    first = Journal(2, segment_bytes=200)
    for partition in (0, 1, 1):
        append(first, partition)
        take(first)
    journal = Journal(2, 200, first.segments)
    assert journal.next_offset == journal.written == journal.high_watermark == [1, 2]
    assert journal.sequence == journal.committed_sequence == 3
    assert append(journal, 1) == 2
    group = take(journal)
    assert (group.segment, group.starts_segment, group.position) == (2, False, 96)


@pytest.mark.parametrize("kind", [MESSAGE, SESSION])
def test_a_large_record_does_not_join_a_batch(kind: int) -> None:
    """Else a batch could be larger than a frame between nodes."""
    journal = Journal(1)
    sizes = [100, 40 << 20, 100, 1 << 20, 33 << 20]
    for number, size in enumerate(sizes):
        made = Record(0, kind, 0, 1000 + number, b"t", b"c", b"", bytes(size))
        assert journal.append(made) == number
        assert made.offset == number
    group = journal.close_write_group()
    assert group is not None
    batches = [Batch(data) for data in group.data]
    assert [batch.count for batch in batches] == [1, 1, 2, 1]
    assert [batch.base_offset for batch in batches] == [0, 1, 2, 4]
    found = [record for batch in batches for record in batch.records()]
    assert [len(record.payload) for record in found] == sizes
    assert [record.timestamp_us for record in found] == [1000, 1001, 1002, 1003, 1004]
    states = [batch.attributes & ATTRIBUTE_STATE for batch in batches]
    assert states == [ATTRIBUTE_STATE if kind == SESSION else 0] * 4
    index = journal.segments[-1].index
    assert index is not None
    assert list(index.last_deltas_us) == [0, 0, 1, 0]
