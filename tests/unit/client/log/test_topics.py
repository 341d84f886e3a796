"""Reads that are about some topics only, by path: the same rows as filtering after."""

import random
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa

from holdfast.client.log.reading.journal_index import JournalMap
from holdfast.client.log.reading.offsets import DataLossError, OffsetRange
from holdfast.client.log.reading.reader_path import Piece, read_pieces
from holdfast.client.log.reading.scan import Coverage
from holdfast.log.columns.decode import decode_rows
from holdfast.log.reading.topic_filter import Clause, TopicFilter
from holdfast.log.reading.topic_postings import TopicChoice
from holdfast.log.record import MESSAGE, SESSION
from tests.support.journal_files import Journal, batches_of, record

CLAUSES = [
    Clause(("rare",)),
    Clause(("rare", "site/7", "no/such")),
    Clause(("site/+",)),
    Clause(("site/3/#",)),
    Clause(prefixes=("site/1", "ra")),
    Clause(("none",)),
    Clause(),
]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """The batches of a topic are far from each other, compared with what is read at a time."""
    found = Journal(tmp_path / "data", partitions=3, segment_bytes=900_000)
    draw = random.Random(5)
    for number in range(400):
        topic = "rare" if number % 90 == 50 else f"site/{draw.randrange(60)}"
        kind = SESSION if draw.random() < 0.1 else MESSAGE
        records = [record(topic, bytes(9_000), kind=kind)] * draw.randrange(1, 3)
        found.append(draw.randrange(3), records)
    return found


def pieces_of(journal: Journal, ranges: list[OffsetRange], clause: Clause | None) -> list[Piece]:
    mapped = JournalMap(str(journal.directory))
    mapped.refresh()
    if clause is None:
        return mapped.pieces(ranges)
    return mapped.pieces(ranges, TopicChoice(clause.filters, clause.prefixes, lambda: None))


def places(pieces: list[Piece], ranges: list[OffsetRange], clause: Clause) -> list[tuple[int, int]]:
    coverage = Coverage(ranges, fail_on_data_loss=True)
    found = []
    for chunk in read_pieces(pieces, coverage):
        for batch in decode_rows(chunk, topics=TopicFilter((clause,))):
            found += [(row["partition"], row["offset"]) for row in batch.to_pylist()]
    assert coverage.done
    return sorted(found)


@pytest.mark.parametrize("clause", CLAUSES, ids=str)
def test_the_same_rows(journal: Journal, clause: Clause) -> None:
    draw = random.Random(str(clause))
    for turn in range(4):
        ranges = []
        for partition, end in enumerate(journal.next_offset):
            first = draw.randrange(end) if turn else 0
            ranges.append(
                OffsetRange(partition, first, draw.randrange(first, end) if turn else end)
            )
        wanted = {item.partition: item for item in ranges}
        expected = [
            (item.partition, item.offset)
            for item in journal.records()
            if item.kind == MESSAGE
            and clause.matches(item.topic.decode())
            and wanted[item.partition].start <= item.offset < wanted[item.partition].end
        ]
        pieces = pieces_of(journal, ranges, clause)
        assert places(pieces, ranges, clause) == sorted(expected)
        # A task may get any part of a range.
        halves = [OffsetRange(i.partition, i.start, (i.start + i.end) // 2) for i in ranges]
        found = places(pieces_of(journal, halves, clause), halves, clause)
        limit = {item.partition: item.end for item in halves}
        assert found == [place for place in sorted(expected) if place[1] < limit[place[0]]]


def test_little_is_read_for_a_rare_topic(journal: Journal) -> None:
    ranges = [OffsetRange(p, 0, end) for p, end in enumerate(journal.next_offset)]

    def size(clause: Clause | None) -> int:
        return sum(piece.end - piece.start for piece in pieces_of(journal, ranges, clause))

    newest = journal.segment.stat().st_size
    assert size(Clause(("rare",))) < newest + (size(None) - newest) / 5
    assert size(Clause(("none",))) <= newest


def test_damage_in_what_was_left_out_is_not_met(journal: Journal) -> None:
    """But in what was chosen it is."""
    ranges = [OffsetRange(p, 0, end) for p, end in enumerate(journal.next_offset)]
    segment = journal.segments()[0]
    data = bytearray(segment.read_bytes())
    first = next(batches_of(bytes(data)))
    data[first.length - 100] ^= 1
    segment.write_bytes(data)
    topic = first.record(0).topic.decode() or first.record(1).topic.decode()
    assert topic != "rare"
    # Of these nothing is near.
    clause = Clause(("rare",))
    assert places(pieces_of(journal, ranges, clause), ranges, clause)
    damaged = Clause((topic,))
    pieces = pieces_of(journal, ranges, damaged)
    with pytest.raises(DataLossError, match="wrong checksum"):
        places(pieces, ranges, damaged)


def test_a_payload_of_100_megabytes(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "data", partitions=1)
    payload = bytes(range(250)) * 400_000
    journal.append(0, [record("small")])
    journal.append(0, [record("large", payload)])
    journal.append(0, [record("small")])
    ranges = [OffsetRange(0, 0, 3)]
    coverage = Coverage(ranges, fail_on_data_loss=True)
    sizes = []
    for chunk in read_pieces(pieces_of(journal, ranges, None), coverage):
        for batch in decode_rows(chunk):
            for value in batch.column("payload"):
                sizes.append(len(value.as_buffer()))
                if sizes[-1]:
                    assert value.as_buffer().equals(pa.py_buffer(payload))
    assert sizes == [0, 100_000_000, 0]
