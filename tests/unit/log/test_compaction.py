"""Compaction: messages are emptied, offsets and everything else stay."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.main import main
from holdfast.log.batch import ATTRIBUTE_STATE, Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.journal.compaction import SegmentCompactor, compact_segment, is_worthwhile
from holdfast.log.journal.recovery import open_journal
from holdfast.log.reading.cursor import LogReader
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.reading.segment_store import SegmentStore
from holdfast.log.record import CONTROL, CURSOR, FLAG_RETAIN, MESSAGE, Record
from tests.support.journal_files import Journal


def batch(*records: tuple[int, bytes], base_offset: int = 10) -> Batch:
    builder = BatchBuilder(3, base_offset)
    for index, (kind, topic) in enumerate(records):
        builder.add(
            Record(
                builder.partition,
                kind,
                flags=FLAG_RETAIN,
                timestamp_us=1000 + index,
                topic=topic,
                client_id=b"client",
                producer=b"producer",
                producer_epoch=2,
                sequence=index,
                properties=b"properties",
                payload=b"payload %d" % index,
            )
        )
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
    before = batch((MESSAGE, b"a"))
    after = Batch(SegmentCompactor({b"a": 1}).rewrite(before))
    assert after.record(0).kind == CONTROL
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


def test_a_rewritten_segment_is_a_good_one(tmp_path: Path) -> None:
    made = Journal(tmp_path / "data", segment_bytes=20_000)
    for number in range(300):
        made.publish(f"topic/{number % 3}", b"x" * 150 + b"%d" % number)
    before = open_journal(made.files, writes=False).journal
    segment = before.segments[0]
    index = SegmentStore(made.files, writes=False).load_index(segment)
    counts = index.message_counts()
    beyond = {topic: count - 2 for topic, count in counts.items()}

    compacted = compact_segment(made.files, segment, beyond)
    assert compacted is not None
    path = made.segments()[0]
    assert compacted.size_bytes == path.stat().st_size < segment.size_bytes * 0.6
    assert main(["log", "verify", str(made.directory)]) == 0

    opened = open_journal(made.files, writes=False)
    assert opened.rebuilt == []
    assert opened.journal.next_offset == before.next_offset
    assert opened.journal.sequence == before.sequence
    reader = LogReader(opened.journal, opened.store)
    interests = [ReadInterest(topic.decode(), None) for topic in counts]
    result = reader.read([0] * 4, opened.journal.next_offset, interests, 1000, 1 << 20)
    kept = 300 - sum(beyond.values())
    assert len(result.records) == kept
    assert result.lost == 0
    newest = [record.payload for record in result.records]
    assert newest == sorted(newest, key=lambda payload: int(payload[150:]))
    assert compact_segment(made.files, compacted, {}) is None


def test_a_crash_between_segment_and_index(tmp_path: Path) -> None:
    made = Journal(tmp_path / "data", segment_bytes=2000)
    for number in range(40):
        made.publish("topic", b"%d" % number)
    before = open_journal(made.files, writes=False).journal
    old_index = made.files.read_index(0)
    assert old_index is not None
    assert compact_segment(made.files, before.segments[0], {b"topic": 5}) is not None
    made.files.write_index(0, old_index)
    opened = open_journal(made.files, writes=False)
    assert opened.rebuilt == [0]
    assert opened.damage == []
    assert opened.journal.next_offset == before.next_offset
    assert opened.journal.sequence == before.sequence


def test_a_process_that_ends_between_segment_and_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever knows the old segment, as the next holder of a shared directory does, reads the new
    one right, and `holdfast log verify` finds nothing wrong."""
    made = Journal(tmp_path / "data", segment_bytes=2000)
    for number in range(40):
        made.publish("topic", b"%d" % number)
    successor = open_journal(made.files, writes=False)
    segment = open_journal(made.files, writes=False).journal.segments[0]

    def ended(sequence: int, data: bytes) -> None:
        raise OSError("the process ended here")

    monkeypatch.setattr(made.files, "write_index", ended)
    with pytest.raises(OSError, match="ended here"):
        compact_segment(made.files, segment, {b"topic": 5})
    monkeypatch.undo()
    assert main(["log", "verify", str(made.directory)]) == 0
    reader = LogReader(successor.journal, successor.store)
    interests = [ReadInterest("topic", None)]
    found = reader.read([0] * 4, successor.journal.next_offset, interests, 1000, 1 << 20)
    assert [record.payload for record in found.records] == [b"%d" % n for n in range(5, 40)]
    assert found.lost == 0


def test_a_damaged_segment_is_left_alone(tmp_path: Path) -> None:
    made = Journal(tmp_path / "data", segment_bytes=2000)
    for number in range(40):
        made.publish("topic", b"%d" % number)
    segment = open_journal(made.files, writes=False).journal.segments[0]
    path = made.segments()[0]
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    path.write_bytes(data)
    assert compact_segment(made.files, segment, {b"topic": 5}) is None
    assert path.read_bytes() == data
    assert sorted(made.folder.glob("*.tmp")) == []
