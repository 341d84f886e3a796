"""Sorting that other threads can interrupt."""

from bisect import bisect_left
from typing import Final

PIECE: Final = 2000
"""The number of values that one call sorts, roughly."""
SAMPLES_A_PIECE: Final = 16
"""The number of samples per piece, from which the borders of the pieces are taken."""


def sorted_in_pieces(values: list[bytes]) -> list[bytes]:
    """A replacement for sorted(), which lets no other thread run until it is done. That is too long
    for an event loop that waits. Some of the values divide the rest into ranges that are quick to
    sort.

    It must not be compiled: between two lines of Python other threads may run.
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
