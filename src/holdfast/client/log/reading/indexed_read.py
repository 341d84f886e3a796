"""Selective reads of a finished segment: only the batches with messages of some topics.

The postings in the segment's index name those batches. The read pays off if it needs few of many
topics.
"""

import os
from collections.abc import Sequence
from typing import Final

from holdfast.client.log.reading.offsets import OffsetRange
from holdfast.client.log.reading.reader_path import Piece
from holdfast.client.log.reading.segment_index import SegmentMap
from holdfast.log.files.layout import DataDirectory
from holdfast.log.reading.index_file import CorruptIndex, SealedIndex, decode
from holdfast.log.reading.topic_postings import TopicChoice

GAP_BYTES: Final = 64 << 10
"""The most unwanted bytes between two wanted batches that are cheaper to read than to skip."""


def chosen_pieces(
    directory: DataDirectory,
    segment: SegmentMap,
    ranges: Sequence[OffsetRange],
    choice: TopicChoice,
) -> list[Piece] | None:
    """Returns pieces with every wanted batch of the ranges.

    It returns None if the postings are missing or do not pay off; the caller then reads the whole
    stretch. A missing file raises FileNotFoundError.
    """
    if not segment.intersect(ranges):
        return []
    path, inode = str(segment.path), os.stat(segment.path).st_ino
    index = _index(directory, segment)
    if index is None:
        return None
    batches = choice.find(index)
    if batches is None:
        return None
    of = {item.partition: item for item in ranges}
    covered = {
        p: max(item.start, index.head.start_offsets[p])
        for p, item in of.items()
        if index.head.end_offsets[p] > item.start
    }
    stretches: list[list[int]] = []
    passed = []
    for number in batches:
        partition = index.partitions[number]
        base = index.base_offsets[number]
        end = base + index.counts[number]
        item = of.get(partition)
        if item is None or end <= item.start or base >= item.end:
            continue
        if covered[partition] < base:
            passed.append((partition, covered[partition], base))
        covered[partition] = end
        start, stop = index.positions[number], index.batch_end(number)
        if stretches and start - stretches[-1][1] <= GAP_BYTES:
            stretches[-1][1] = stop
        else:
            stretches.append([start, stop])
    for partition, offset in covered.items():
        if offset < index.head.end_offsets[partition]:
            passed.append((partition, offset, index.head.end_offsets[partition]))
    # The first piece carries the skipped ranges of all pieces. If no batch is wanted, an empty
    # piece carries them.
    first, *rest = stretches or [[0, 0]]
    return [
        Piece(path, inode, first[0], first[1], passed=tuple(sorted(passed))),
        *(Piece(path, inode, start, stop) for start, stop in rest),
    ]


def _index(directory: DataDirectory, segment: SegmentMap) -> SealedIndex | None:
    """Returns the index of the segment as it was mapped.

    It returns None if there is none, or if the index notes damage or batches that do not count.
    """
    try:
        data = directory.read_index(segment.sequence)
        index = decode(data) if data is not None else None
    except CorruptIndex:
        return None
    if index is None or index.head.log_bytes != segment.position:
        return None
    head = index.head
    if head.void or head.resets or head.gaps or segment.cuts:
        return None
    return index
