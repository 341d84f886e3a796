"""What the failover benchmarks make of their rounds, without running any."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench import durable_data, failover, takeover
from bench.failover import Campaign
from bench.failover_run import Round, schedule
from bench.failover_sending import payload_of, sequence_of
from bench.ledger import Findings, StoredFindings
from bench.pair import Fault
from bench.takeover import Stage

CLEAN = Findings(10, 10, 10, 0, 0, 0, 0, 0, 0, 0)
STORED = StoredFindings(10, 0, 0, 0)


def campaign(library: str, *downtimes_s: float | None) -> Campaign:
    rounds = [Round(Fault.KILL, each, 0.1) for each in downtimes_s]
    return Campaign(library, rounds, CLEAN, STORED)


@pytest.mark.parametrize(
    ("library", "downtimes_s", "met"),
    [
        ("holdfast", (0.2, 0.3, 0.9), True),
        ("holdfast", (0.2, 0.7, 0.9), False),
        ("holdfast", (0.2, 0.3, 1.0), False),
        ("holdfast", (0.2, 0.3, None), False),
        ("paho", (1.1, 1.2, 1.4), True),
        ("paho", (0.1, 0.1, 1.5), False),
    ],
)
def test_the_targets_of_downtime(
    library: str, downtimes_s: tuple[float | None, ...], met: bool
) -> None:
    assert campaign(library, *downtimes_s).is_met() is met


def broken(library: str, **counts: int) -> list[str]:
    """The violations when some counts are not zero."""
    of_log = {name: count for name, count in counts.items() if hasattr(STORED, name)}
    seen = {name: count for name, count in counts.items() if hasattr(CLEAN, name)}
    return Campaign(library, [], replace(CLEAN, **seen), replace(STORED, **of_log)).violations()


def test_only_the_publish_queue_promises_each_message_once() -> None:
    for library in ("holdfast", "paho"):
        assert broken(library, stored_twice=3, duplicates=2, redelivered=1) == []
    found = broken("queue", stored_twice=3, duplicates=2, redelivered=1)
    assert found == ["2 duplicates", "3 stored twice"]


def test_only_of_paho_is_the_sending_order_not_asked() -> None:
    assert broken("holdfast", reordered=1) == broken("queue", reordered=1) == ["1 reordered"]
    assert broken("paho", reordered=1) == []


def test_nothing_else_is_forgiven_anybody() -> None:
    for library in ("holdfast", "queue", "paho"):
        found = broken(library, lost=1, invented=2, failed=3, unstored=4, out_of_order=5)
        assert found == [
            "1 lost",
            "2 invented",
            "3 failed",
            "4 confirmed and not in the log",
            "5 delivered in another order than the log's",
        ]


def test_the_rounds_of_one_fault_are_told_from_the_others() -> None:
    rounds = [Round(Fault.KILL, 0.1, 0.1), Round(Fault.STOP, 0.6, 0.5)]
    mixed = Campaign("holdfast", rounds, CLEAN, STORED)
    assert mixed.downtimes_s(Fault.STOP) == [0.6]
    assert mixed.downtimes_s() == [0.1, 0.6]
    assert failover.as_json(mixed)["met"] is True


def test_a_schedule_has_every_round_once_and_is_repeatable() -> None:
    counts = {Fault.KILL: 20, Fault.STOP: 20, Fault.HANDOVER: 5}
    faults = schedule(counts, random.Random(1))
    assert Counter(faults) == counts
    assert faults == schedule(counts, random.Random(1))
    assert faults[:20] != [Fault.KILL] * 20


def test_rounds_are_chosen_on_the_command_line() -> None:
    arguments = failover.parse(["--rounds", "kill -9=3", "--rounds", "SIGSTOP=1"])
    assert arguments.counts == {Fault.KILL: 3, Fault.STOP: 1}
    assert failover.parse([]).counts == failover.COUNTS
    assert failover.parse(["--quick"]).counts == dict.fromkeys(Fault, 1)


@pytest.mark.parametrize("wrong", ["kill=3", "SIGSTOP", "SIGSTOP=0", "SIGSTOP=x"])
def test_a_wrong_round_is_refused_with_an_example(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        failover.parse(["--rounds", wrong])
    assert "give FAULT=COUNT, as 'handover=3'" in capsys.readouterr().err


def test_a_payload_is_told_from_a_stranger() -> None:
    assert [sequence_of(payload_of(number)) for number in (1, 12345678)] == [1, 12345678]
    for stranger in (b"", b"00000001", payload_of(1)[:-1] + b"x", b"x" * 26):
        with pytest.raises(ValueError):
            sequence_of(stranger)


@pytest.mark.parametrize(("text", "size"), [("1MB", 10**6), ("5GB", 5 * 10**9), ("20kb", 20_000)])
def test_sizes_are_read(text: str, size: int) -> None:
    assert takeover.size_of(text) == size


@pytest.mark.parametrize("text", ["", "5", "GB", "0MB", "-1MB", "1.5GB", "5TB"])
def test_a_wrong_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give a whole number and one of KB, MB, GB"):
        takeover.size_of(text)


def test_the_largest_journal_is_filled_only_once() -> None:
    plan = list(takeover.order_of_stages([10_000, 1], [5000, 1, 20]))
    assert plan == [
        [(1, 1), (1, 20), (1, 5000), (10_000, 5000)],
        [(10_000, 1), (10_000, 20)],
    ]
    assert list(takeover.order_of_stages([1], [5])) == [[(1, 5)]]
    assert list(takeover.order_of_stages([1, 2, 3], [5])) == [[(1, 5), (2, 5), (3, 5)]]
    for directory in plan:
        # Neither sessions nor journal ever have to become fewer.
        assert directory == sorted(directory)


@pytest.mark.parametrize(
    ("medians_s", "growing"),
    [
        ((0.2, 0.21, 0.39), False),
        ((0.2, 0.21, 0.45), True),
        ((0.02, 0.02, 0.11), False),
        ((0.2, 0.2, None), True),
    ],
)
def test_growth_is_told_from_noise(medians_s: tuple[float | None, ...], growing: bool) -> None:
    stages = [Stage(1, 1, [Round(Fault.KILL, each, 0.1)]) for each in medians_s]
    assert takeover.grows(stages) is growing


def test_a_journal_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    takeover.check_space(tmp_path, 1)
    with pytest.raises(SystemExit, match="give another --directory or a smaller --journal"):
        takeover.check_space(tmp_path, 10**18)


def test_a_segment_that_two_epochs_share_counts_once(tmp_path: Path) -> None:
    for epoch in ("1", "2"):
        (tmp_path / epoch).mkdir()
    first = tmp_path / "1" / "0.log"
    first.write_bytes(b"x" * 100)
    (tmp_path / "2" / "0.log").hardlink_to(first)
    (tmp_path / "2" / "1.log").write_bytes(b"x" * 11)
    (tmp_path / "2" / "0.idx").write_bytes(b"x" * 1000)
    assert durable_data.journal_bytes(tmp_path) == 111
