"""Charts that several experiments have: distributions, and latency over time."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from holdfast_lab.results.store import Chart, Series

SHARES: Final = (*(number / 100 for number in range(1, 100)), 0.995, 0.999, 1.0)
HEAT_COLUMNS: Final = 120
HEAT_ROWS_A_DECADE: Final = 6


def quantile(values: Sequence[float], share: float) -> float:
    """The value that at most the share of the values is below. There must be one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def distribution_of(name: str, values: Sequence[float]) -> Series:
    """The empirical distribution of values: the percentage that is at most so much."""
    ordered = sorted(values)
    last = len(ordered) - 1
    points: list[float | str | None] = [ordered[min(last, int(s * len(ordered)))] for s in SHARES]
    return Series(name, points if ordered else [], [s * 100 for s in SHARES] if ordered else [])


def heat_of(title: str, caption: str, latencies_ms: Mapping[float, float]) -> Chart:
    """Latency over time: the number of messages for each stretch of time and range of latency.

    `latencies_ms` has the latency of each message by its time in seconds. The ranges are equally
    wide on a logarithmic axis.
    """
    chart = Chart(title, "seconds", "milliseconds", caption, [], "heat")
    if not latencies_ms:
        return chart
    width_s = max(max(latencies_ms) / HEAT_COLUMNS, 0.001)
    counts: dict[int, dict[int, int]] = {}
    for at_s, latency_ms in latencies_ms.items():
        row = math.floor(math.log10(max(latency_ms, 0.001)) * HEAT_ROWS_A_DECADE)
        columns = counts.setdefault(row, {})
        column = min(int(at_s / width_s), HEAT_COLUMNS - 1)
        columns[column] = columns.get(column, 0) + 1
    times: list[float | str | None] = [
        round((each + 0.5) * width_s, 3) for each in range(HEAT_COLUMNS)
    ]
    for row in range(min(counts), max(counts) + 1):
        middle = 10 ** ((row + 0.5) / HEAT_ROWS_A_DECADE)
        found = counts.get(row, {})
        values: list[float | str | None] = [found.get(each) for each in range(HEAT_COLUMNS)]
        chart.series.append(Series(f"{middle:.3g}", times, values))
    return chart
