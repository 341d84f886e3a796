"""Charts a run with faults: a timeline of each kind of fault, and its messages by second."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from holdfast_lab.experiments.traffic import PUBLISHER, Observed, longest_gap
from holdfast_lab.results.distributions import heat_of
from holdfast_lab.results.store import Chart, Series
from holdfast_lab.targets.target import Change

BROKER: Final = "broker"
BEFORE_S: Final = 0.1
AFTER_S: Final = 0.3
"""The timeline begins and ends by so much before the fault and after the last silence."""


@dataclass
class PlayedFault:
    """A fault that was injected, with times of the monotonic clock in seconds."""

    kind: str
    from_s: float
    until_s: float
    changes: list[Change]
    """Events of the broker, with times since 1970."""


def timeline_of(title: str, fault: PlayedFault, observed: Observed) -> Chart:
    """One fault, from just before it until all clients are served again.

    The rows are the broker and the clients. The silence of a client is a bar.
    """
    silences = {PUBLISHER: longest_gap(observed.confirmed.values(), fault.from_s, fault.until_s)}
    for name, found in observed.arrivals.items():
        silences[name] = longest_gap(found.delivered.values(), fault.from_s, fault.until_s)
    ends = [gap[1] for gap in silences.values() if gap is not None]
    begin_s, end_s = fault.from_s - BEFORE_S, max(ends, default=fault.until_s) + AFTER_S
    # The wall clock of the broker's own report, on the monotonic clock of the clients.
    offset_s = time.monotonic() - time.time()
    events: dict[str, list[tuple[float, str, str]]] = {
        "fault": [(fault.from_s, BROKER, fault.kind)]
    }
    for change in fault.changes:
        events.setdefault(change.what, []).append((change.at_s + offset_s, BROKER, change.text))
    for at_s, client, is_connected in observed.links:
        what = "connected" if is_connected else "disconnected"
        events.setdefault(what, []).append((at_s, client, f"{client} {what}"))
    bars = Series("silence", [], [])
    for client, gap in silences.items():
        if gap is None:
            continue
        bars.xs = [*bars.xs, gap[0] - fault.from_s, gap[1] - fault.from_s, None]
        bars.ys = [*bars.ys, client, client, None]
        what = "confirmation" if client == PUBLISHER else "delivery"
        text = f"{client}: first {what} after a silence of {gap[1] - gap[0]:.3f} s"
        events.setdefault("service", []).append((gap[1], client, text))
    series = [bars]
    for what, found_events in events.items():
        shown = [each for each in sorted(found_events) if begin_s <= each[0] <= end_s]
        series.append(
            Series(
                what,
                [round(each[0] - fault.from_s, 4) for each in shown],
                [each[1] for each in shown],
                [f"{each[0] - fault.from_s:.3f} s: {each[2]}" for each in shown],
            )
        )
    return Chart(
        title, "seconds after the fault", "",
        "Bars are the time without a confirmation or delivery; service is the first one after it.",
        [each for each in series if len(each.xs)], "points",
    )  # fmt: skip


def seconds_of(title: str, observed: Observed) -> Chart:
    """The messages of each second: published, confirmed, delivered to all and lost."""
    start_s = min(observed.published.values(), default=0.0)
    length = int(max(observed.published.values(), default=0.0) - start_s) + 1
    first = next(iter(observed.arrivals.values()))
    lost = [observed.published[each] for each in observed.not_delivered()]

    def line(name: str, times_s: Iterable[float]) -> Series:
        """Counts the times in each second."""
        counts = Counter(int(each - start_s) for each in times_s)
        return Series(name, list(range(length)), [counts[second] for second in range(length)])

    return Chart(
        title, "second of the run", "messages a second",
        "A message that never arrived is lost in the second in which it was published.",
        [
            line("published", observed.published.values()),
            line("confirmed", observed.confirmed.values()),
            line("delivered", first.delivered.values()),
            line("lost", lost),
        ],
    )  # fmt: skip


def latency_of(title: str, observed: Observed) -> Chart:
    """The latency of confirmations over time, as a heat map."""
    start_s = min(observed.due.values(), default=0.0)
    found = {
        observed.due[number] - start_s: (at_s - observed.due[number]) * 1000
        for number, at_s in observed.confirmed.items()
    }
    return heat_of(
        title, "From when a message was due until its confirmation. Failovers stand out as towers.",
        found,
    )  # fmt: skip
