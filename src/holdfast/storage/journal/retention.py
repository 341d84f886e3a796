"""Which of the oldest segments may go.

A pure decision over a description of the segments; it removes nothing itself. Only a run of the
oldest segments ever goes, so what is left has no holes: age, bytes and `per_topic_last` say what
the policy wants gone, and three things stand against it:

- the active segment stays;
- so does every record that recovery may need: `sequence` of the oldest snapshot still relied upon;
- durable sessions that are behind hold back what they have not read, each up to its own limit in
  bytes. Beyond it they lose their oldest records, which is counted.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass(frozen=True)
class SegmentSummary:
    sequence: int
    """Of its first record."""
    size_bytes: int
    last_timestamp_us: int
    """Of its newest record, microseconds since 1970 UTC."""
    end_offsets: Sequence[int]
    """Per partition the offset after its last record in this segment or any older one."""


@dataclass(frozen=True)
class RetentionPolicy:
    """None: no limit of this kind."""

    age_s_max: float | None = None
    bytes_max: int | None = None
    """Of all segments, the active one included."""
    per_topic_last: int | None = None
    """Messages of a topic that count; with more newer ones than this, a message may go early."""


@dataclass(frozen=True)
class Hold:
    """A durable session's (or shared group's) claim on the log."""

    name: str
    positions: Sequence[int]
    """Per partition the first offset it still needs."""
    bytes_max: int | None
    """How many bytes of the newest segments it can hold back; None: all."""


@dataclass(frozen=True)
class HoldLoss:
    """`records` that a session had not finished with go: an upper bound of what it loses, because
    whether they match its subscriptions is not looked at."""

    name: str
    records: int


@dataclass(frozen=True)
class RetentionDecision:
    remove: int
    """How many of the oldest segments go."""
    bytes_freed: int
    bytes_held: int
    """What the policy would have freed too, were it not for sessions that are behind."""
    bytes_unsaved: int
    """What the policy would have freed too, were there a newer snapshot."""
    losses: list[HoldLoss] = field(default_factory=list)


def decide(
    segments: Sequence[SegmentSummary],
    start_offsets: Sequence[int],
    policy: RetentionPolicy,
    snapshot_sequence: int,
    holds: Iterable[Hold],
    now_us: int,
    *,
    superseded: int = 0,
) -> RetentionDecision:
    """Decide over `segments`, oldest first, the last one active.

    `start_offsets`: per partition the offset of its first record that is still there.
    `now_us`: wall clock. `superseded`: how many of the oldest segments hold no message that
    `per_topic_last` keeps, see count_superseded.
    """
    by_policy = min(max(_by_limits(segments, policy, now_us), superseded), len(segments) - 1)
    wanted = min(by_policy, _before_sequence(segments, snapshot_sequence))
    if wanted <= 0:
        return RetentionDecision(0, 0, 0, _size_bytes(segments[: max(by_policy, 0)]))
    # A hold that has read everything up to here stands against nothing.
    wanted_ends = segments[wanted - 1].end_offsets
    behind = [hold for hold in holds if _is_behind(hold.positions, wanted_ends)]
    oldest = segments[:wanted]
    sizes = [segment.size_bytes for segment in segments]
    tail_bytes = list(accumulate(reversed(sizes)))[::-1]
    remove = wanted
    for hold in behind:
        remove = min(remove, _first_held(oldest, tail_bytes, hold))
    return RetentionDecision(
        remove,
        _size_bytes(segments[:remove]),
        _size_bytes(segments[remove:wanted]),
        _size_bytes(segments[wanted:by_policy]),
        _losses(behind, start_offsets, segments[remove - 1].end_offsets) if remove else [],
    )


def count_settled(
    segments: Sequence[SegmentSummary], snapshot_sequence: int, holds: Iterable[Hold]
) -> int:
    """How many of the oldest segments neither recovery nor a session behind needs any more,
    whatever the sessions' limits: what compaction may rewrite."""
    settled = _before_sequence(segments, snapshot_sequence)
    for hold in holds:
        settled = min(settled, _first_needed(segments[:settled], hold))
    return settled


def messages_beyond(
    topic_counts: Iterable[Mapping[bytes, int]], per_topic_last: int
) -> Iterator[dict[bytes, int]]:
    """Per segment: how many of a topic's messages, its oldest ones there, have `per_topic_last`
    or more newer ones. Topics without any are left out.

    `topic_counts`: messages per topic of each segment, *newest first*, the active one included.
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
    """How many of the oldest segments hold no message that `per_topic_last` keeps.

    `topic_counts` as in messages_beyond.
    """
    superseded = 0
    for counts, beyond in zip(
        topic_counts, messages_beyond(topic_counts, per_topic_last), strict=True
    ):
        superseded = superseded + 1 if counts == beyond else 0
    return superseded


def _by_limits(segments: Sequence[SegmentSummary], policy: RetentionPolicy, now_us: int) -> int:
    """How many of the oldest segments age or bytes want gone."""
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
    """How many of the oldest segments have only records before `sequence`."""
    count = 0
    while count + 1 < len(segments) and segments[count + 1].sequence <= sequence:
        count += 1
    return count


def _is_behind(positions: Sequence[int], end_offsets: Sequence[int]) -> bool:
    return any(position < end for position, end in zip(positions, end_offsets, strict=True))


def _first_needed(segments: Sequence[SegmentSummary], hold: Hold) -> int:
    """Index of the oldest segment with a record that the hold has not finished with."""
    # What one segment's end is ahead of, every newer one's is too.
    return bisect_left(
        segments, True, key=lambda segment: _is_behind(hold.positions, segment.end_offsets)
    )


def _first_held(segments: Sequence[SegmentSummary], tail_bytes: Sequence[int], hold: Hold) -> int:
    """Index of the oldest segment that the hold keeps. `tail_bytes`: of each segment and all
    newer ones."""
    needed = _first_needed(segments, hold)
    if hold.bytes_max is None:
        return needed
    return max(needed, bisect_left(tail_bytes, -hold.bytes_max, key=lambda size: -size))


def _losses(
    behind: list[Hold], start_offsets: Sequence[int], end_offsets: Sequence[int]
) -> list[HoldLoss]:
    losses = []
    for hold in behind:
        records = 0
        for partition, end in enumerate(end_offsets):
            # What was gone before was counted when it went.
            start = max(hold.positions[partition], start_offsets[partition])
            records += max(0, end - start)
        if records:
            losses.append(HoldLoss(hold.name, records))
    return losses


def _size_bytes(segments: Sequence[SegmentSummary]) -> int:
    return sum(segment.size_bytes for segment in segments)
