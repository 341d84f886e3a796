"""Retention: the choice of the oldest segments that may be deleted.

The module decides over a description of the segments and removes nothing itself. Only a run of the
oldest segments ever goes, so the rest has no holes. Age, bytes and `per_topic_last` select what the
policy removes. Three rules limit that:

- the active segment stays;
- every record that recovery may need stays: those from the `sequence` of the oldest snapshot in
  use;
- durable sessions that are behind pin the records they have not read, each up to its own limit in
  bytes. Beyond it they lose their oldest records, which is counted.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from msgspec import Struct, field


class SegmentSummary(Struct, frozen=True):
    """The description of a segment for retention."""

    sequence: int
    """The sequence of its first record."""
    size_bytes: int
    """Without the dead bytes of forgotten partitions."""
    last_timestamp_us: int
    """The time of its newest record, in microseconds since 1970 UTC."""
    end_offsets: Sequence[int]
    """Per partition the offset after its last record in this segment or any older one."""


class RetentionPolicy(Struct, frozen=True):
    """The limits of the log; None means no limit of this kind."""

    age_s_max: float | None = None
    """The most seconds since the newest record of a segment."""
    bytes_max: int | None = None
    """The most bytes of all segments, the active one included."""
    per_topic_last: int | None = None
    """The number of newest messages of a topic that count. Older ones may go early."""


class Pin(Struct, frozen=True):
    """The pin of a durable session or shared group on the log."""

    name: str
    positions: Sequence[int]
    """Per partition the first offset that it still needs."""
    bytes_max: int | None
    """The most bytes of the newest segments that it pins; None: all."""


class PinLoss(Struct, frozen=True):
    """The number of records deleted before a session had finished with them. It is an upper bound
    of the loss, because they are not matched against its subscriptions."""

    name: str
    records: int


class RetentionDecision(Struct, frozen=True):
    """The decision, with the reasons for what stays."""

    remove: int
    """The number of oldest segments to remove."""
    bytes_freed: int
    bytes_pinned: int
    """The bytes that the policy would also free if no session were behind."""
    bytes_unsaved: int
    """The bytes that the policy would also free if there were a newer snapshot."""
    losses: list[PinLoss] = field(default_factory=list)


def decide(
    segments: Sequence[SegmentSummary],
    start_offsets: Sequence[int],
    policy: RetentionPolicy,
    snapshot_sequence: int,
    pins: Iterable[Pin],
    now_us: int,
    *,
    superseded: int = 0,
) -> RetentionDecision:
    """Decides over `segments`, oldest first, the last one active.

    `start_offsets` has per partition the first offset that is still there, and `now_us` is the wall
    clock. `superseded` is the number of oldest segments without a message that `per_topic_last`
    keeps; see count_superseded.
    """
    by_policy = min(max(_by_limits(segments, policy, now_us), superseded), len(segments) - 1)
    wanted = min(by_policy, _before_sequence(segments, snapshot_sequence))
    if wanted <= 0:
        return RetentionDecision(0, 0, 0, _size_bytes(segments[: max(by_policy, 0)]))
    # A session that has read everything up to here pins nothing.
    wanted_ends = segments[wanted - 1].end_offsets
    behind = [pin for pin in pins if _is_behind(pin.positions, wanted_ends)]
    oldest = segments[:wanted]
    sizes = [segment.size_bytes for segment in segments]
    tail_bytes = list(accumulate(reversed(sizes)))[::-1]
    remove = wanted
    for pin in behind:
        remove = min(remove, _first_pinned(oldest, tail_bytes, pin))
    return RetentionDecision(
        remove,
        _size_bytes(segments[:remove]),
        _size_bytes(segments[remove:wanted]),
        _size_bytes(segments[wanted:by_policy]),
        _losses(behind, start_offsets, segments[remove - 1].end_offsets) if remove else [],
    )


def count_unpinned(
    segments: Sequence[SegmentSummary], snapshot_sequence: int, pins: Iterable[Pin]
) -> int:
    """The number of oldest segments that neither recovery nor a session needs, whatever the
    sessions' limits. Compaction may rewrite these."""
    removable = _before_sequence(segments, snapshot_sequence)
    for pin in pins:
        removable = min(removable, _first_needed(segments[:removable], pin))
    return removable


def pinned_bytes(segments: Sequence[SegmentSummary], pins: Iterable[Pin]) -> int:
    """The bytes from the oldest segment that a session needs to the end of the log, whatever the
    sessions' limits."""
    needed = len(segments)
    for pin in pins:
        needed = min(needed, _first_needed(segments[:needed], pin))
    return _size_bytes(segments[needed:])


def messages_beyond(
    topic_counts: Iterable[Mapping[bytes, int]], per_topic_last: int
) -> Iterator[dict[bytes, int]]:
    """Per segment and topic, the number of oldest messages that have `per_topic_last` or more newer
    ones. Topics without such messages are left out.

    `topic_counts` has the messages per topic of each segment, *newest first*, the active one
    included.
    """
    newer: dict[bytes, int] = {}
    for counts in topic_counts:
        beyond = {}
        for topic, count in counts.items():
            seen = newer.get(topic, 0) + count
            newer[topic] = seen
            if seen > per_topic_last:
                beyond[topic] = min(count, seen - per_topic_last)
        yield beyond


def count_superseded(topic_counts: Sequence[Mapping[bytes, int]], per_topic_last: int) -> int:
    """The number of oldest segments without a message that `per_topic_last` keeps.

    `topic_counts` is as in messages_beyond.
    """
    superseded = 0
    for counts, beyond in zip(
        topic_counts, messages_beyond(topic_counts, per_topic_last), strict=True
    ):
        superseded = superseded + 1 if counts == beyond else 0
    return superseded


def _by_limits(segments: Sequence[SegmentSummary], policy: RetentionPolicy, now_us: int) -> int:
    """The number of oldest segments to remove by age or bytes."""
    by_age = 0
    if policy.age_s_max is not None:
        oldest_us = now_us - int(policy.age_s_max * 1_000_000)
        while by_age < len(segments) and segments[by_age].last_timestamp_us < oldest_us:
            by_age += 1
    by_bytes = 0
    if policy.bytes_max is not None:
        size_bytes = _size_bytes(segments)
        while by_bytes < len(segments) and size_bytes > policy.bytes_max:
            size_bytes -= segments[by_bytes].size_bytes
            by_bytes += 1
    return max(by_age, by_bytes)


def _before_sequence(segments: Sequence[SegmentSummary], sequence: int) -> int:
    """The number of oldest segments with only records before `sequence`."""
    count = 0
    while count + 1 < len(segments) and segments[count + 1].sequence <= sequence:
        count += 1
    return count


def _is_behind(positions: Sequence[int], end_offsets: Sequence[int]) -> bool:
    return any(position < end for position, end in zip(positions, end_offsets, strict=True))


def _first_needed(segments: Sequence[SegmentSummary], pin: Pin) -> int:
    """The index of the oldest segment with a record that the session has not finished with."""
    # Ends grow with the segments, so a binary search finds the first one ahead of the session.
    return bisect_left(
        segments, True, key=lambda segment: _is_behind(pin.positions, segment.end_offsets)
    )


def _first_pinned(segments: Sequence[SegmentSummary], tail_bytes: Sequence[int], pin: Pin) -> int:
    """The index of the oldest segment that the pin keeps. `tail_bytes` has the bytes of each
    segment with all newer ones."""
    needed = _first_needed(segments, pin)
    if pin.bytes_max is None:
        return needed
    return max(needed, bisect_left(tail_bytes, -pin.bytes_max, key=lambda size: -size))


def _losses(
    behind: list[Pin], start_offsets: Sequence[int], end_offsets: Sequence[int]
) -> list[PinLoss]:
    losses = []
    for pin in behind:
        records = 0
        for partition, end in enumerate(end_offsets):
            # Records removed before were counted at that time.
            start = max(pin.positions[partition], start_offsets[partition])
            records += max(0, end - start)
        if records:
            losses.append(PinLoss(pin.name, records))
    return losses


def _size_bytes(segments: Sequence[SegmentSummary]) -> int:
    return sum(segment.size_bytes for segment in segments)
