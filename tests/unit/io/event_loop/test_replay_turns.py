"""The turns of replays beside live messages."""

import pytest

from holdfast.io.event_loop.log_reads import (
    GAIN,
    LARGE_BYTES,
    LARGE_RECORDS,
    PAUSE_S,
    TURN_RECORDS,
    WAITING_MAX,
    WINDOW_S,
    ReplayTurns,
)
from holdfast.log.reading.cursor import ReadResult
from holdfast.log.record import MESSAGE, Record
from holdfast.node.delivery.log_replay import READ_RECORDS_MAX

NOW = 1000.0


def turns_at(rate_per_s: float) -> ReplayTurns:
    """Turns after a window with this rate, whose first turn has begun."""
    turns = ReplayTurns(NOW, 5_000_000)
    turns.observe(NOW + 1.0, int(rate_per_s), 5_000_000 + int(rate_per_s))
    turns.begin(NOW + 1.0)
    return turns


def result(count: int, payload_bytes: int) -> ReadResult:
    record = Record(
        0,
        MESSAGE,
        flags=0,
        timestamp_us=1,
        topic=b"t",
        client_id=b"c",
        payload=b"x" * payload_bytes,
    )
    return ReadResult([record] * count, [count], False, 0)


def test_without_publishes_a_replay_reads_at_full_speed() -> None:
    turns = turns_at(0.0)
    assert turns.records(0) == READ_RECORDS_MAX
    assert turns.wait_s(NOW + 1.0, 0) == 0.0


def test_beside_publishes_reads_are_small_and_pauses_separate_them() -> None:
    turns = turns_at(2000.0)
    assert turns.records(0) == TURN_RECORDS
    assert turns.wait_s(NOW + 1.0, 0) == pytest.approx(PAUSE_S)
    assert turns.wait_s(NOW + 1.0 + PAUSE_S / 2, 0) == pytest.approx(PAUSE_S / 2)
    assert turns.wait_s(NOW + 1.0 + 2 * PAUSE_S, 0) == 0.0


def test_turns_end_a_window_after_the_last_publish() -> None:
    turns = turns_at(2000.0)
    turns.observe(NOW + 1.0 + WINDOW_S / 2, 2000, 5_002_000)
    assert turns.wait_s(NOW + 1.0, 0) > 0.0
    turns.observe(NOW + 1.0 + 1.01 * WINDOW_S, 2000, 5_002_000)
    assert turns.records(0) == READ_RECORDS_MAX
    assert turns.wait_s(NOW + 1.0, 0) == 0.0


def test_publishes_long_ago_do_not_slow_a_replay() -> None:
    turns = ReplayTurns(NOW, 0)
    turns.observe(NOW + 3600.0, 20_000, 20_000)
    assert turns.records(0) == READ_RECORDS_MAX


@pytest.mark.parametrize("rate_per_s", [10.0, 2000.0, 50_000.0, 1_000_000.0])
@pytest.mark.parametrize("waiting", [0, 1, 10, 100, 1000])
def test_every_replay_reads_faster_than_records_arrive(rate_per_s: float, waiting: int) -> None:
    turns = turns_at(rate_per_s)
    records = turns.records(waiting)
    if turns.wait_s(NOW + 1.0, waiting) == 0.0:
        assert records == READ_RECORDS_MAX or waiting >= WAITING_MAX
    else:
        round_s = PAUSE_S * (waiting + 1)
        assert records > GAIN * rate_per_s * round_s - 1


def test_records_of_other_nodes_count_as_arrivals() -> None:
    turns = ReplayTurns(NOW, 0)
    turns.observe(NOW + 1.0, 100, 40_000)
    assert turns.records(0) == int(GAIN * 40_000 * PAUSE_S)


def test_few_results_wait_at_a_time() -> None:
    turns = turns_at(20.0)
    assert turns.wait_s(NOW + 1.0, WAITING_MAX - 1) > 0.0
    assert turns.wait_s(NOW + 1.0, WAITING_MAX) == 0.0
    assert turns.records(WAITING_MAX) == TURN_RECORDS


def test_small_results_take_no_turn() -> None:
    turns = turns_at(2000.0)
    assert not turns.takes_turn(result(0, 0))
    assert not turns.takes_turn(result(10, 1024))
    assert turns.takes_turn(result(LARGE_RECORDS, 0))
    assert turns.takes_turn(result(16, LARGE_BYTES))


def test_results_below_the_rate_of_arrivals_take_no_turn() -> None:
    needed = int(GAIN * 2000.0 * PAUSE_S)
    assert turns_at(2000.0).takes_turn(result(needed, LARGE_BYTES))
    assert not turns_at(2000.0).takes_turn(result(needed - 1, LARGE_BYTES))
