"""The judgement of the failover benchmarks: a checker that finds nothing proves nothing."""

import random
from pathlib import Path

import pytest

from bench.ledger import (
    Findings,
    StoredFindings,
    confirmed_at_s,
    examine,
    examine_log,
    longest_silence,
    median_and_worst,
)
from bench.trace import Entry, Event, TraceReader, TraceWriter


def entries(event: Event, *sequences: int) -> list[Entry]:
    return [Entry(event, sequence, float(at)) for at, sequence in enumerate(sequences)]


def judged(
    delivered: list[Entry], sent: int = 4, confirmed: tuple[int, ...] = (1, 2, 3, 4)
) -> Findings:
    published = entries(Event.SENT, *range(1, sent + 1)) + entries(Event.CONFIRMED, *confirmed)
    return examine(published, delivered)


def test_what_arrives_once_and_in_order_is_fine() -> None:
    findings = judged(entries(Event.DELIVERED, 1, 2, 3, 4))
    assert (findings.sent, findings.confirmed, findings.delivered) == (4, 4, 4)
    assert findings.violations(exactly_once=True) == []


@pytest.mark.parametrize(
    ("delivered", "exactly_once", "violations"),
    [
        (entries(Event.DELIVERED, 1, 2, 4), False, ["1 lost"]),
        (entries(Event.DELIVERED, 1, 3, 2, 4), False, ["1 reordered"]),
        (entries(Event.DELIVERED, 4, 1, 2, 3), False, ["3 reordered"]),
        (entries(Event.DELIVERED, 1, 2, 3, 4, 5), False, ["1 invented"]),
        (entries(Event.DELIVERED, 1, 2, 2, 3, 4, 2), True, ["2 duplicates"]),
        (entries(Event.DELIVERED, 1, 2, 2, 3, 4), False, []),
        (entries(Event.DELIVERED), False, ["4 lost"]),
    ],
)
def test_each_broken_promise_is_found(
    delivered: list[Entry], exactly_once: bool, violations: list[str]
) -> None:
    assert judged(delivered).violations(exactly_once=exactly_once) == violations


def test_a_message_that_was_never_confirmed_may_be_missing() -> None:
    findings = judged(entries(Event.DELIVERED, 1, 2, 3), confirmed=(1, 2, 3))
    assert findings.violations(exactly_once=True) == []
    assert (findings.lost, findings.undelivered) == (0, 1)


def test_a_repetition_with_dup_is_no_duplicate_and_no_reordering() -> None:
    delivered = entries(Event.DELIVERED, 1, 2, 3) + entries(Event.REDELIVERED, 2, 3, 4)
    findings = judged(delivered)
    assert findings.violations(exactly_once=True) == []
    assert (findings.redelivered, findings.delivered) == (2, 4)


def test_a_message_the_library_gave_up_is_a_violation() -> None:
    published = entries(Event.SENT, 1, 2) + entries(Event.CONFIRMED, 1) + entries(Event.FAILED, 2)
    findings = examine(published, entries(Event.DELIVERED, 1, 2))
    assert findings.violations(exactly_once=False) == ["1 failed"]


def test_a_library_that_overtakes_itself_is_no_broken_promise() -> None:
    findings = judged(entries(Event.DELIVERED, 1, 3, 2, 4))
    assert findings.violations(exactly_once=True, sent_in_order=False) == []


@pytest.mark.parametrize(
    ("records", "delivered", "stored"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], StoredFindings(4, 0, 0, 0)),
        ([1, 3, 2, 4], [1, 3, 2, 4], StoredFindings(4, 0, 0, 0)),
        ([1, 3, 2, 4], [1, 2, 3, 4], StoredFindings(4, 0, 0, 1)),
        ([1, 2, 2, 3, 1, 4], [1, 2, 2, 3, 4], StoredFindings(4, 2, 0, 0)),
        ([1, 2, 4], [1, 2, 3, 4], StoredFindings(3, 0, 1, 0)),
        ([], [], StoredFindings(0, 0, 4, 0)),
    ],
)
def test_the_log_is_compared_with_what_was_confirmed_and_delivered(
    records: list[int], delivered: list[int], stored: StoredFindings
) -> None:
    published = entries(Event.CONFIRMED, 1, 2, 3, 4)
    assert examine_log(records, published, entries(Event.DELIVERED, *delivered)) == stored


def test_every_planted_loss_of_a_long_history_is_counted() -> None:
    rng = random.Random(7)
    everything = range(1, 5001)
    lost = set(rng.sample(everything, 37))
    delivered = entries(Event.DELIVERED, *(each for each in everything if each not in lost))
    assert judged(delivered, 5000, tuple(everything)).lost == 37


def test_the_downtime_is_the_longest_silence_after_the_fault() -> None:
    # The fault at 10: the old holder still confirms at 10.1, the new one begins at 10.6.
    confirmed_s = [9.0, 9.9, 10.1, 10.6, 10.61, 10.8]
    silence = longest_silence(confirmed_s, 10.0, 11.0)
    assert silence is not None
    assert (silence.from_s, silence.to_s) == (10.1, 10.6)
    assert silence.duration_s == pytest.approx(0.5)


def test_a_silence_that_began_before_the_fault_counts_in_full() -> None:
    silence = longest_silence([9.7, 10.2], 10.0, 11.0)
    assert silence is not None
    assert silence.duration_s == pytest.approx(0.5)


def test_a_silence_of_another_round_does_not_count() -> None:
    silence = longest_silence([1.0, 9.0, 10.2, 10.3, 20.0], 10.0, 11.0)
    assert silence is not None
    assert silence.to_s == 10.2


def test_without_a_confirmation_after_the_fault_there_is_no_downtime_but_no_end() -> None:
    assert longest_silence([8.0, 9.0], 10.0, 11.0) is None
    assert longest_silence([], 10.0, 11.0) is None
    assert median_and_worst([0.2, None, 0.1]) == (0.2, float("inf"))


def test_a_trace_is_followed_while_it_is_written(tmp_path: Path) -> None:
    reader = TraceReader(tmp_path / "trace")
    assert reader.read() == []
    writer = TraceWriter(tmp_path / "trace")
    writer.write(Event.SENT, 1)
    assert [entry[:2] for entry in reader.read()] == [(Event.SENT, 1)]
    writer.write(Event.SENT, 2)
    writer.write(Event.CONFIRMED, 1)
    assert [entry[:2] for entry in reader.read()] == [(Event.SENT, 2), (Event.CONFIRMED, 1)]
    assert reader.read() == []
    writer.close()
    assert len(reader.entries) == 3
    assert len(confirmed_at_s(reader.entries)) == 1
    times = [entry.at_s for entry in reader.entries]
    assert times == sorted(times)


def test_a_torn_entry_is_left_for_later(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "whole")
    writer.write(Event.SENT, 1)
    writer.close()
    data = (tmp_path / "whole").read_bytes()
    torn = tmp_path / "torn"
    torn.write_bytes(data + data[:5])
    reader = TraceReader(torn)
    assert len(reader.read()) == 1
    torn.write_bytes(data + data)
    assert len(reader.read()) == 1
