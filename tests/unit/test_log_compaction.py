"""Compaction: messages are emptied, offsets and everything else stay."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.log.compaction import SegmentCompactor, is_worthwhile
from holdfast.log.record import (
    ATTRIBUTE_STATE,
    CONTROL,
    CURSOR,
    FLAG_RETAIN,
    MESSAGE,
    Batch,
    BatchBuilder,
    Record,
)


def batch(*records: tuple[int, bytes], base_offset: int = 10, state: bool = False) -> Batch:
    builder = BatchBuilder(3, base_offset)
    for index, (kind, topic) in enumerate(records):
        builder.add(
            kind, FLAG_RETAIN, 1000 + index, topic, b"client", b"producer", 2, index,
            b"properties", b"payload %d" % index, state,
        )  # fmt: skip
    return Batch(builder.build(epoch=9))


def shown(record: Record) -> tuple[object, ...]:
    return (
        record.partition, record.offset, record.kind, record.flags, record.timestamp_us,
        record.topic, record.client_id, record.producer, record.producer_epoch, record.sequence,
        record.properties, record.payload,
    )  # fmt: skip


def test_the_oldest_messages_of_a_topic_are_emptied() -> None:
    before = batch((MESSAGE, b"a"), (MESSAGE, b"b"), (MESSAGE, b"a"), (MESSAGE, b"a"))
    compactor = SegmentCompactor({b"a": 2})
    after = Batch(compactor.rewrite(before))
    assert [record.topic for record in after.records()] == [b"", b"b", b"", b"a"]
    assert [record.kind for record in after.records()] == [CONTROL, MESSAGE, CONTROL, MESSAGE]
    assert [record.offset for record in after.records()] == [10, 11, 12, 13]
    assert [record.timestamp_us for record in after.records()] == [1000, 1001, 1002, 1003]
    assert shown(after.record(1)) == shown(before.record(1))
    assert shown(after.record(3)) == shown(before.record(3))
    assert (after.partition, after.base_offset, after.epoch) == (3, 10, 9)
    assert compactor.emptied == 2
    assert compactor.bytes_freed == before.length - after.length > 0


def test_counts_go_on_over_the_batches_of_a_segment() -> None:
    compactor = SegmentCompactor({b"a": 3})
    first = Batch(compactor.rewrite(batch((MESSAGE, b"a"), (MESSAGE, b"a"))))
    second = Batch(compactor.rewrite(batch((MESSAGE, b"a"), (MESSAGE, b"a"), base_offset=12)))
    assert [record.kind for record in first.records()] == [CONTROL, CONTROL]
    assert [record.kind for record in second.records()] == [CONTROL, MESSAGE]
    assert second.base_offset == 12


def test_other_kinds_stay() -> None:
    before = batch((CURSOR, b"a"), (MESSAGE, b"a"))
    after = Batch(SegmentCompactor({b"a": 5}).rewrite(before))
    assert [record.kind for record in after.records()] == [CURSOR, CONTROL]
    assert after.record(0).payload == b"payload 0"


def test_the_state_attribute_stays() -> None:
    before = batch((CURSOR, b""), (MESSAGE, b"a"), state=True)
    after = Batch(SegmentCompactor({b"a": 1}).rewrite(before))
    assert before.attributes == after.attributes == ATTRIBUTE_STATE


def test_an_untouched_batch_keeps_its_bytes() -> None:
    before = batch((MESSAGE, b"a"))
    inside = b"before" + before.data + b"after"
    compactor = SegmentCompactor({b"b": 1})
    assert compactor.rewrite(Batch(inside, 6)) == before.data
    assert compactor.emptied == 0


def test_rewriting_again_changes_nothing() -> None:
    before = batch((MESSAGE, b"a"), (MESSAGE, b"a"))
    once = SegmentCompactor({b"a": 1}).rewrite(before)
    assert SegmentCompactor({}).rewrite(Batch(once)) == once


KINDS_AND_TOPICS = st.tuples(st.sampled_from([MESSAGE, CURSOR]), st.sampled_from([b"a", b"b"]))


@given(st.lists(KINDS_AND_TOPICS, min_size=1, max_size=10), st.integers(0, 10))
def test_what_stays_is_the_newest(records: list[tuple[int, bytes]], beyond: int) -> None:
    after = Batch(SegmentCompactor({b"a": beyond}).rewrite(batch(*records)))
    messages = [index for index, record in enumerate(records) if record == (MESSAGE, b"a")]
    gone = set(messages[:beyond])
    for index, record in enumerate(after.records()):
        assert record.offset == 10 + index
        assert record.kind == (CONTROL if index in gone else records[index][0])
        assert record.payload == (b"" if index in gone else b"payload %d" % index)


def test_half_of_the_messages_make_it_worthwhile() -> None:
    assert is_worthwhile({b"a": 3, b"b": 1}, {b"a": 2})
    assert not is_worthwhile({b"a": 3, b"b": 1}, {b"a": 1})
    assert not is_worthwhile({}, {})
