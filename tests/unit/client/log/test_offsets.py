import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.log.reading.offsets import (
    DataLossError,
    OffsetError,
    OffsetRange,
    Offsets,
    PartitionBounds,
    admit,
    available,
    divide,
    from_json,
    group,
    parse_position,
    ranges_to_read,
    resolve,
    to_json,
)

BOUNDS = {0: PartitionBounds(5, 20), 1: PartitionBounds(0, 0), 2: PartitionBounds(0, 7)}
LAGS = st.dictionaries(st.integers(0, 63), st.integers(0, 2000), max_size=20)


def ranges_between(
    start: Offsets, end: Offsets, bounds: dict[int, PartitionBounds], *, fail_on_data_loss: bool
) -> list[OffsetRange]:
    """What a read between two positions gets of the log."""
    ranges = ranges_to_read(start, end, bounds)
    return divide(ranges, bounds, fail_on_data_loss=fail_on_data_loss)[0]


def test_json_round_trip_sorts_by_number() -> None:
    assert list(to_json({10: 1, 9: 2})) == ["9", "10"]
    assert from_json(to_json({10: 1, 9: 2})) == {10: 1, 9: 2}


@pytest.mark.parametrize(
    "text", ["soon", "7", "[1]", '{"x": 1}', '{"0": -1}', '{"0": true}', '{"0": 1.5}', "{", ""]
)
def test_position_that_is_none(text: str) -> None:
    with pytest.raises(OffsetError, match="startingOffsets"):
        parse_position("startingOffsets", text)


def test_positions() -> None:
    assert resolve(parse_position("s", " Earliest "), BOUNDS) == {0: 5, 1: 0, 2: 0}
    assert resolve(parse_position("s", "latest"), BOUNDS) == {0: 20, 1: 0, 2: 7}
    assert resolve(parse_position("s", '{"2": 3}'), BOUNDS) == {0: 5, 1: 0, 2: 3}
    with pytest.raises(OffsetError, match="partition 9"):
        resolve({9: 0}, BOUNDS)


def test_ranges_leave_empty_ones_out() -> None:
    found = ranges_between({0: 6, 1: 0, 2: 7}, {0: 9, 1: 0, 2: 7}, BOUNDS, fail_on_data_loss=True)
    assert found == [OffsetRange(0, 6, 9)]


def test_partition_missing_in_start_begins_at_its_first_offset() -> None:
    assert ranges_between({}, {0: 9}, BOUNDS, fail_on_data_loss=True) == [OffsetRange(0, 5, 9)]


@pytest.mark.parametrize(("start", "end"), [({0: 4}, {0: 9}), ({2: 0}, {2: 8}), ({7: 0}, {7: 1})])
def test_missing_offsets_are_an_error(start: dict[int, int], end: dict[int, int]) -> None:
    with pytest.raises(DataLossError, match="failOnDataLoss=false"):
        ranges_between(start, end, BOUNDS, fail_on_data_loss=True)


def test_missing_offsets_can_be_skipped() -> None:
    start, end = {0: 0, 2: 3, 7: 0}, {0: 9, 2: 99, 7: 1}
    found = ranges_between(start, end, BOUNDS, fail_on_data_loss=False)
    assert found == [OffsetRange(0, 5, 9), OffsetRange(2, 3, 7)]


def test_a_log_that_went_back_is_an_error() -> None:
    assert available({0: 7, 2: 7}, BOUNDS, fail_on_data_loss=True) == {0: 20, 1: 0, 2: 7}
    with pytest.raises(DataLossError, match="new checkpoint"):
        available({2: 8}, BOUNDS, fail_on_data_loss=True)
    assert available({2: 8}, BOUNDS, fail_on_data_loss=False)[2] == 8


def test_a_partition_that_disappeared_keeps_its_position() -> None:
    assert available({5: 12}, BOUNDS, fail_on_data_loss=True)[5] == 12


@given(LAGS, st.integers(1, 3000))
def test_admission_takes_exactly_what_it_may(lags: dict[int, int], records_max: int) -> None:
    start = {partition: 100 + partition for partition in lags}
    end = {partition: start[partition] + lag for partition, lag in lags.items()}
    admitted = admit(start, end, {}, records_max)
    assert sum(admitted.values()) - sum(start.values()) == min(records_max, sum(lags.values()))
    assert all(start[p] <= admitted[p] <= end[p] for p in lags)


@given(LAGS, st.integers(1, 3000))
def test_admission_is_fair(lags: dict[int, int], records_max: int) -> None:
    admitted = admit({}, lags, dict.fromkeys(lags, 0), records_max)
    # Whoever did not get all it wants got at least as much as everybody else, but for one.
    for partition, lag in lags.items():
        if admitted[partition] < lag:
            assert admitted[partition] >= max(admitted.values()) - 1


def test_admission_serves_everybody_in_the_end() -> None:
    start, end = dict.fromkeys(range(5), 0), dict.fromkeys(range(5), 3)
    for _ in range(8):
        start = admit(start, end, {}, 2)
    assert start == end


@given(LAGS, st.integers(1, 12))
def test_groups(lags: dict[int, int], tasks: int) -> None:
    ranges = [OffsetRange(p, 0, lag) for p, lag in sorted(lags.items()) if lag]
    groups = group(ranges, tasks)
    assert len(groups) == min(tasks, len(ranges))
    assert all(groups)
    assert sorted((r for members in groups for r in members), key=lambda r: r.partition) == ranges
    sizes = [sum(item.records for item in members) for members in groups]
    if groups:
        assert max(sizes) - min(sizes) <= max(item.records for item in ranges)
