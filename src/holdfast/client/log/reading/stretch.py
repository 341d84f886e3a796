"""Scans a stretch of batches without a fault, with numpy, for `Coverage.scan`."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from holdfast.log.batch import HEADER_BYTES
from holdfast.log.columns.checksum import crc32
from holdfast.log.columns.chunk import Chunk, Data
from holdfast.log.columns.headers import headers_at, sound_headers

AT_ONCE_MIN: Final = 8
"""The fewest batches for which the vectorised scan is faster than the loop."""


def scan_stretch(
    reached: dict[int, int], chunk: Chunk, position: int, data_end: int, ends: Mapping[int, int]
) -> int:
    """Scans a stretch in which everything is in order, and advances `reached`.

    The stretch is taken completely or not at all, so that the loop of `Coverage.scan` finds the
    exact place of a fault. Returns the position at which the stretch ends.
    """
    data = chunk.data
    found = walk(data, position, data_end)
    if len(found) < AT_ONCE_MIN:
        return position
    positions = np.array(found, np.int64)
    headers = headers_at(data, positions)
    if not sound_headers(headers).all():
        return position
    # The index of each partition in the arrays of next and end. Partitions beyond the last one
    # share index 0, and the next line leaves them out.
    known = np.array(sorted(reached), np.int64)
    slot = np.searchsorted(known, headers["partition"])
    slot[slot == len(known)] = 0
    wanted = known[slot] == headers["partition"] if len(known) else slot < 0
    positions, headers, slot = positions[wanted], headers[wanted], slot[wanted]
    if len(positions):
        base = headers["base_offset"]
        stop = base + headers["count"]
        order = np.argsort(slot, kind="stable")
        sorted_slot, sorted_base, sorted_stop = slot[order], base[order], stop[order]
        same = sorted_slot[1:] == sorted_slot[:-1]
        expected = np.array([reached[p] for p in known.tolist()], np.int64)[sorted_slot]
        limit = np.array([ends[p] for p in known.tolist()], np.int64)[slot]
        dense = sorted_base[1:][same] == sorted_stop[:-1][same]
        first = np.concatenate([[True], ~same])
        if not dense.all() or (sorted_base[first] > expected[first]).any():
            return position
        start = np.maximum(base, expected[np.argsort(order, kind="stable")])
        end = np.minimum(stop, limit)
        counts = start < end
        positions, start, end = positions[counts], start[counts], end[counts]
        lengths = headers["length"][counts].tolist()
        view = memoryview(data)
        sums = [
            crc32(view[at + 12 : at + length])
            for at, length in zip(positions.tolist(), lengths, strict=True)
        ]
        if sums != headers["crc"][counts].tolist():
            return position
        chunk.positions += positions.tolist()
        chunk.starts += start.tolist()
        chunk.ends += end.tolist()
        chunk.records += int((end - start).sum())
        found_ends = np.array([reached[p] for p in known.tolist()], np.int64)
        np.maximum.at(found_ends, slot[counts], end)
        reached.update(zip(known.tolist(), found_ends.tolist(), strict=True))
    last = found[-1]
    return last + int.from_bytes(data[last + 4 : last + 8], "little")


def walk(data: Data, position: int, data_end: int) -> list[int]:
    """Returns the byte positions at which complete batches begin, by their lengths alone."""
    words = memoryview(data)[: len(data) & ~3].cast("I")
    found = []
    while position + HEADER_BYTES <= data_end:
        length = words[(position >> 2) + 1]
        if length < HEADER_BYTES or length & 7 or position + length > data_end:
            break
        found.append(position)
        position += length
    return found
