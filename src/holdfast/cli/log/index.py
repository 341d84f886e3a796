"""Compares an .idx file with the segment that it describes."""

from array import array

from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.reading.index import SegmentIndex
from holdfast.log.reading.index_file import CorruptIndex, decode


def index_difference(data: bytes, rebuilt: ActiveIndex) -> str:
    """Returns the first difference of an .idx file from its segment, "" if there is none."""
    try:
        stored = decode(data)
    except CorruptIndex as error:
        return str(error)
    for name, found, expected in _compared(stored, rebuilt):
        if found != expected:
            return f"wrong {name}: the index says {found}, the segment {expected}"
    return _topic_difference(stored, rebuilt)


def _compared(stored: SegmentIndex, rebuilt: SegmentIndex) -> list[tuple[str, object, object]]:
    """Returns triples (name, found, expected), with single values instead of arrays.

    The ends are left out: they include damaged records, which the segment alone does not show.
    """
    pairs: list[tuple[str, object, object]] = [
        ("number of batches", stored.batch_count(), rebuilt.batch_count()),
        ("number of records", stored.head.records, rebuilt.head.records),
        ("first time", stored.head.first_timestamp_us, rebuilt.head.first_timestamp_us),
        ("last time", stored.head.last_timestamp_us, rebuilt.head.last_timestamp_us),
    ]
    arrays: list[tuple[str, array[int], array[int]]] = [
        ("base offset", stored.base_offsets, rebuilt.base_offsets),
        ("first time", stored.first_timestamps_us, rebuilt.first_timestamps_us),
        ("position", stored.positions, rebuilt.positions),
        ("count", stored.counts, rebuilt.counts),
        ("last time", stored.last_deltas_us, rebuilt.last_deltas_us),
        ("partition", stored.partitions, rebuilt.partitions),
        ("attributes", stored.attributes, rebuilt.attributes),
    ]
    for partition, numbers in enumerate(stored.by_partition):
        arrays.append((f"batch of partition {partition}", numbers, rebuilt.by_partition[partition]))
    for name, found, expected in arrays:
        if found != expected:
            pairs.append((f"number of {name}s", len(found), len(expected)))
            for number, value in enumerate(found[: len(expected)]):
                pairs.append((f"{name} of batch {number}", value, expected[number]))
    return pairs


def _topic_difference(stored: SegmentIndex, rebuilt: SegmentIndex) -> str:
    if stored.topic_count() != rebuilt.topic_count():
        return f"{stored.topic_count()} topics, the segment has {rebuilt.topic_count()}"
    for number in range(stored.topic_count()):
        topic = stored.topic(number)
        known = rebuilt.find_topic(topic)
        if known < 0:
            return f"topic {topic!r}, which no message of the segment has"
        if stored.find_topic(topic) != number:
            return f"topic {topic!r} is out of order"
        if stored.postings(number) != rebuilt.postings(known):
            return f"other messages for topic {topic!r} than the segment has"
    return ""
