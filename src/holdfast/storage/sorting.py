"""Sorting that other threads can interrupt."""

from bisect import bisect_left
from typing import Final

PIECE: Final = 2000
SAMPLES_A_PIECE: Final = 16


def sorted_in_pieces(values: list[bytes]) -> list[bytes]:
    """sorted(), which lets no other thread run before it is done: too long for an event loop that
    waits. Some of the values divide the rest into ranges that are quick to sort.

    Not to be compiled: between two lines of Python other threads may run.
    """
    pieces = len(values) // PIECE + 1
    if pieces == 1:
        return sorted(values)
    sample = sorted(values[:: max(1, len(values) // (SAMPLES_A_PIECE * pieces))])
    borders = sample[SAMPLES_A_PIECE::SAMPLES_A_PIECE]
    ranges: list[list[bytes]] = [[] for _ in range(len(borders) + 1)]
    for value in values:
        ranges[bisect_left(borders, value)].append(value)
    result: list[bytes] = []
    for values_in_range in ranges:
        values_in_range.sort()
        result += values_in_range
    return result
