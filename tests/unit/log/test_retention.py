"""Retention: which segments go, what holds them back, what is lost."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.log.journal.retention import (
    Pin,
    PinLoss,
    RetentionDecision,
    RetentionPolicy,
    SegmentSummary,
    count_superseded,
    count_unpinned,
    decide,
    messages_beyond,
    pinned_bytes,
)

SECOND_US = 1_000_000
EVERYTHING = 1 << 60
"""A snapshot sequence after which recovery needs nothing that a test writes."""


def journal(count: int, size_bytes: int = 100) -> list[SegmentSummary]:
    """Two partitions; each segment adds ten records to the first and five to the second, the last
    of them at second 1, 2, 3, ..."""
    return [
        SegmentSummary(
            sequence=15 * index,
            size_bytes=size_bytes,
            last_timestamp_us=(index + 1) * SECOND_US,
            end_offsets=[10 * (index + 1), 5 * (index + 1)],
        )
        for index in range(count)
    ]


def decided(
    segments: Sequence[SegmentSummary],
    *,
    age_s: float | None = None,
    bytes_max: int | None = None,
    snapshot: int = EVERYTHING,
    holds: Sequence[Pin] = (),
    now_s: float = 0,
    start: Sequence[int] = (0, 0),
    superseded: int = 0,
) -> RetentionDecision:
    policy = RetentionPolicy(age_s_max=age_s, bytes_max=bytes_max)
    now_us = int(now_s * SECOND_US)
    return decide(segments, start, policy, snapshot, holds, now_us, superseded=superseded)


def test_without_limits_everything_stays() -> None:
    assert decided(journal(5), now_s=1e9) == RetentionDecision(0, 0, 0, 0)


def test_without_segments_nothing_goes() -> None:
    assert decided([], age_s=1, bytes_max=1) == RetentionDecision(0, 0, 0, 0)


@pytest.mark.parametrize(("now_s", "remove"), [(11, 0), (11.5, 1), (12, 1), (13.5, 3), (99, 4)])
def test_age_counts_from_a_segments_newest_record(now_s: float, remove: int) -> None:
    # Five segments, the last one active: it stays whatever its age.
    assert decided(journal(5), age_s=10, now_s=now_s).remove == remove


def test_age_does_not_reach_past_a_younger_segment() -> None:
    first, second, third, active = journal(4)
    young = SegmentSummary(second.sequence, 100, 50 * SECOND_US, second.end_offsets)
    assert decided([first, young, third, active], age_s=10, now_s=40).remove == 1


@pytest.mark.parametrize(
    ("bytes_max", "remove"), [(500, 0), (499, 1), (400, 1), (399, 2), (100, 4), (0, 4)]
)
def test_bytes_count_the_active_segment_too(bytes_max: int, remove: int) -> None:
    decision = decided(journal(5), bytes_max=bytes_max)
    assert decision == RetentionDecision(remove, 100 * remove, 0, 0)


@pytest.mark.parametrize(("snapshot", "remove"), [(0, 0), (14, 0), (15, 1), (29, 1), (30, 2)])
def test_what_recovery_needs_stays(snapshot: int, remove: int) -> None:
    decision = decided(journal(5), bytes_max=0, snapshot=snapshot)
    assert decision.remove == remove
    assert decision.bytes_unsaved == 100 * (4 - remove)


def test_a_session_behind_holds_from_its_first_unread_record() -> None:
    hold = Pin("slow", [20, 14], None)
    # It has read the first partition of two segments, but of the second only up to 14.
    decision = decided(journal(5), bytes_max=0, holds=[hold])
    assert decision == RetentionDecision(2, 200, 200, 0)
    partly = Pin("slow", [20, 9], None)
    assert decided(journal(5), bytes_max=0, holds=[partly]).remove == 1


def test_a_session_that_is_not_behind_holds_nothing() -> None:
    decision = decided(journal(5), bytes_max=0, holds=[Pin("live", [50, 25], None)])
    assert decision == RetentionDecision(4, 400, 0, 0)


def test_the_slowest_of_the_sessions_counts() -> None:
    holds = [
        Pin("live", [50, 25], None),
        Pin("slow", [10, 5], None),
        Pin("faster", [30, 15], None),
    ]
    assert decided(journal(5), bytes_max=0, holds=holds).remove == 1


def test_past_its_limit_a_session_loses_its_oldest_records() -> None:
    hold = Pin("away", [12, 0], bytes_max=250)
    decision = decided(journal(5), bytes_max=0, holds=[hold])
    # It may hold the two newest segments; of the three that go it had 12 of 30 and 0 of 15.
    assert decision == RetentionDecision(3, 300, 100, 0, [PinLoss("away", 18 + 15)])


def test_a_record_is_lost_once() -> None:
    hold = Pin("away", [0, 0], bytes_max=100)
    decision = decided(journal(5)[2:], bytes_max=200, holds=[hold], start=[20, 10])
    assert decision.remove == 1
    assert decision.losses == [PinLoss("away", 15)]


def test_one_session_holds_what_another_would_lose() -> None:
    holds = [Pin("limited", [0, 0], bytes_max=100), Pin("unlimited", [20, 10], None)]
    decision = decided(journal(5), bytes_max=0, holds=holds)
    assert decision.remove == 2
    assert decision.losses == [PinLoss("limited", 30)]


def test_a_limit_of_no_bytes_holds_nothing() -> None:
    decision = decided(journal(3), bytes_max=0, holds=[Pin("away", [0, 0], bytes_max=0)])
    assert decision.remove == 2
    assert decision.losses == [PinLoss("away", 30)]


def test_superseded_segments_go_without_other_limits() -> None:
    assert decided(journal(5), superseded=2).remove == 2
    assert decided(journal(5), superseded=5).remove == 4
    assert decided(journal(5), superseded=3, snapshot=15).remove == 1


def test_settled_segments_are_those_nobody_needs() -> None:
    segments = journal(5)
    assert count_unpinned(segments, EVERYTHING, []) == 4
    assert count_unpinned(segments, 30, []) == 2
    # A limit does not make a session's records anyone else's to empty.
    assert count_unpinned(segments, EVERYTHING, [Pin("away", [10, 5], 0)]) == 1
    assert count_unpinned([], 0, []) == 0


def test_the_worst_session_is_that_with_the_oldest_record() -> None:
    segments = journal(5)
    assert pinned_bytes(segments, []) == 0
    assert pinned_bytes(segments, [Pin("done", [50, 25], None)]) == 0
    # Its limit does not make less of it.
    behind = [Pin("done", [50, 25], 0), Pin("away", [35, 25], 0), Pin("near", [49, 25], 0)]
    assert pinned_bytes(segments, behind) == 200
    assert pinned_bytes(segments, [Pin("other partition", [50, 4], 0), *behind]) == 500


def test_messages_beyond_the_last_of_a_topic() -> None:
    newest_first = [{b"a": 2}, {b"a": 3, b"b": 1}, {b"a": 4, b"c": 5}]
    assert list(messages_beyond(newest_first, 4)) == [{}, {b"a": 1}, {b"a": 4, b"c": 1}]


def test_superseded_counts_from_the_oldest() -> None:
    old = [{b"a": 9}, {b"a": 5, b"b": 1}]
    assert count_superseded([{b"a": 3}, {b"b": 3}, *old], 3) == 2
    # One message of a quiet topic keeps its segment and what is newer, not what is older.
    assert count_superseded([{b"a": 3}, {b"quiet": 1}, *old], 3) == 0
    assert count_superseded([{b"a": 3}, {b"b": 3}, {b"quiet": 1}, *old], 3) == 2
    # State records alone keep nothing.
    assert count_superseded([{b"a": 3}, {}], 3) == 1
    assert count_superseded([], 3) == 0


TOPICS = st.sampled_from([b"a", b"b", b"c"])


@given(st.lists(st.lists(TOPICS, max_size=8), max_size=6), st.integers(1, 5))
def test_beyond_agrees_with_a_list_of_messages(segments: list[list[bytes]], last: int) -> None:
    """Oldest first here: a message is beyond exactly if `last` newer ones of its topic exist."""
    everything = [topic for segment in segments for topic in segment]
    expected: list[dict[bytes, int]] = []
    position = 0
    for segment in segments:
        beyond: dict[bytes, int] = {}
        for topic in segment:
            position += 1
            if everything[position:].count(topic) >= last:
                beyond[topic] = beyond.get(topic, 0) + 1
        expected.append(beyond)
    counts = [{topic: segment.count(topic) for topic in segment} for segment in segments]
    assert list(messages_beyond(reversed(counts), last)) == expected[::-1]


HOLDS = st.lists(
    st.builds(
        Pin,
        st.just("session"),
        st.tuples(st.integers(0, 60), st.integers(0, 30)),
        st.none() | st.integers(0, 700),
    ),
    max_size=4,
)


@given(
    st.integers(1, 6),
    st.none() | st.integers(0, 700),
    st.none() | st.integers(0, 10),
    st.integers(0, 100),
    HOLDS,
    st.integers(0, 6),
)
def test_what_must_stay_stays(
    count: int,
    bytes_max: int | None,
    age_s: int | None,
    snapshot: int,
    holds: list[Pin],
    superseded: int,
) -> None:
    segments = journal(count)
    decision = decided(
        segments,
        bytes_max=bytes_max,
        age_s=age_s,
        now_s=10,
        snapshot=snapshot,
        holds=holds,
        superseded=superseded,
    )
    removed, kept = segments[: decision.remove], segments[decision.remove :]
    assert kept
    assert kept[0].sequence <= snapshot or not removed
    assert decision.bytes_freed == sum(segment.size_bytes for segment in removed)
    lost = {id(hold): 0 for hold in holds}
    for hold in holds:
        if removed:
            pairs = zip(hold.positions, removed[-1].end_offsets, strict=True)
            lost[id(hold)] = sum(max(0, end - position) for position, end in pairs)
        # Who loses anything was behind by more than its limit.
        if lost[id(hold)]:
            assert hold.bytes_max is not None
            assert sum(segment.size_bytes for segment in [removed[-1], *kept]) > hold.bytes_max
    assert sum(loss.records for loss in decision.losses) == sum(lost.values())
