"""Whether the broker kept its promise to one publisher and one durable subscriber of one topic.

Both are told by the clients themselves (`trace`): what was sent and confirmed, and what was
delivered, in the order in which it happened. Messages are numbered from 1 in sending order.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from bench.trace import Entry, Event

DELIVERIES = (Event.DELIVERED, Event.REDELIVERED)


@dataclass(frozen=True)
class Findings:
    """Counts, of what the clients saw."""

    sent: int
    confirmed: int
    delivered: int
    """Different messages."""
    lost: int
    """Confirmed and never delivered."""
    undelivered: int
    """Sent, whether confirmed or not, and never delivered."""
    reordered: int
    """First deliveries that came after that of a later message."""
    duplicates: int
    """Delivered again as if they were new, without the DUP flag."""
    redelivered: int
    """Delivered again with the DUP flag, as QoS 1 allows."""
    invented: int
    """Delivered and never sent."""
    failed: int
    """Given up by the client library."""

    def violations(self, *, exactly_once: bool, sent_in_order: bool = True) -> list[str]:
        """A line for each broken promise. `exactly_once`: the messages carry an identity by which
        those that are there already are recognised. `sent_in_order`: the client library lets no
        message overtake one that it has to send again."""
        forbidden = ["lost", "invented", "failed"]
        if sent_in_order:
            forbidden.append("reordered")
        if exactly_once:
            forbidden.append("duplicates")
        counts = asdict(self)
        return [f"{counts[name]:,} {name}" for name in forbidden if counts[name]]


def examine(published: Iterable[Entry], received: Iterable[Entry]) -> Findings:
    of_event: dict[Event, set[int]] = {event: set() for event in Event}
    for entry in published:
        of_event[entry.event].add(entry.sequence)
    sent, confirmed = of_event[Event.SENT], of_event[Event.CONFIRMED]
    first_deliveries: dict[int, None] = {}
    again: Counter[Event] = Counter()
    for entry in received:
        if entry.event not in DELIVERIES:
            continue
        if entry.sequence in first_deliveries:
            again[entry.event] += 1
        else:
            first_deliveries[entry.sequence] = None
    return Findings(
        sent=len(sent),
        confirmed=len(confirmed),
        delivered=len(first_deliveries),
        lost=len(confirmed - first_deliveries.keys()),
        undelivered=len(sent - first_deliveries.keys()),
        reordered=falls(first_deliveries),
        duplicates=again[Event.DELIVERED],
        redelivered=again[Event.REDELIVERED],
        invented=len(first_deliveries.keys() - sent),
        failed=len(of_event[Event.FAILED]),
    )


def falls(numbers: Iterable[int]) -> int:
    """How many are below one before them."""
    newest, count = 0, 0
    for number in numbers:
        count += number < newest
        newest = max(newest, number)
    return count


@dataclass(frozen=True)
class StoredFindings:
    """What the log says about the messages of one publisher; counts."""

    stored: int
    """Different messages."""
    stored_twice: int
    unstored: int
    """Confirmed and not in the log."""
    out_of_order: int
    """Delivered for the first time after a message that is behind it in the log."""


def examine_log(
    records: Sequence[int], published: Iterable[Entry], received: Iterable[Entry]
) -> StoredFindings:
    """`records`: the sequences in the log, in its order."""
    counts = Counter(records)
    position = {number: at for at, number in enumerate(counts, 1)}
    confirmed = {each.sequence for each in published if each.event is Event.CONFIRMED}
    delivered = dict.fromkeys(each.sequence for each in received if each.event in DELIVERIES)
    return StoredFindings(
        stored=len(counts),
        stored_twice=sum(count > 1 for count in counts.values()),
        unstored=len(confirmed - counts.keys()),
        out_of_order=falls(position[each] for each in delivered if each in position),
    )


def confirmed_at_s(published: Iterable[Entry]) -> list[float]:
    return [entry.at_s for entry in published if entry.event is Event.CONFIRMED]


@dataclass(frozen=True)
class Silence:
    """Between two confirmations that follow one another."""

    from_s: float
    to_s: float

    @property
    def duration_s(self) -> float:
        return self.to_s - self.from_s


def longest_silence(confirmed_s: Sequence[float], from_s: float, to_s: float) -> Silence | None:
    """The longest time without a confirmation that ended after `from_s` and by `to_s`; None when
    there was no confirmation before it or within it.

    That is the downtime of a fault at `from_s`: a broker that is told to stop still confirms for
    a moment, and what a killed one had sent arrives after its end, so neither the fault itself
    nor the first confirmation behind it bounds the time without service.
    """
    silences = [
        Silence(before, after) for before, after in pairwise(confirmed_s) if from_s < after <= to_s
    ]
    return max(silences, key=lambda silence: silence.duration_s, default=None)


def median_and_worst(durations_s: Sequence[float | None]) -> tuple[float, float]:
    """None, a round in which nothing was confirmed again, counts as infinite. Raises
    statistics.StatisticsError when there are no rounds."""
    counted = [float("inf") if each is None else each for each in durations_s]
    return statistics.median(counted), max(counted, default=0.0)
