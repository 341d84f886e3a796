"""What the cluster's benchmark makes of its figures."""

from dataclasses import replace

import pytest

from bench.cluster import COUNTS, QUICK_COUNTS, misses, parse
from bench.cluster_scale import Cost, Join, Scale
from bench.cluster_speed import RATES, Comparison, Speed
from bench.cluster_steady import Changes, Steady, Stretch, changes_in, is_sustained
from bench.paced_load import Timings
from tests.e2e.chaos_campaign import Outcome, Round


def outcome(kind: str, *stalls_s: float) -> Outcome:
    return Outcome(1, [Round(kind, ("n1",), stall_s, 3.0) for stall_s in stalls_s])


def test_targets_of_stalls() -> None:
    assert misses(outcome("kill -9 leader", 0.1, 0.2, 0.9)) == []
    assert misses(outcome("kill -9 leader", 0.1, 0.2, 1.1)) == [
        "kill -9 leader: p99 1.100 s, target < 1 s"
    ]
    assert misses(outcome("kill -9 leader", 0.31, 0.31, 0.4))[0].startswith("kill -9 leader: med")
    assert misses(outcome("SIGSTOP", 1.4, 1.4)) == []
    assert len(misses(outcome("SIGSTOP", 1.6))) == 1
    assert misses(outcome("wiped disk", 99.0)) == []


def speed(rate: float, p99_ms: float, cpu_us: float, missing: int = 0) -> Speed:
    return Speed(rate, 1.0, p99_ms, 1.0, p99_ms, cpu_us, 0.1, missing, 0.0)


def comparison(p99_ms: float = 4.0, cpu_us: float = 39.0, missing: int = 0) -> Comparison:
    return Comparison(
        {rate: [speed(rate, 2.0, 10.0)] * 3 for rate in RATES},
        {rate: [speed(rate, p99_ms, cpu_us, missing)] * 3 for rate in RATES},
    )


def test_targets_of_speed() -> None:
    assert comparison().is_met()
    assert comparison().cpu_ratio(RATES[0]) == pytest.approx(3.9)
    assert not comparison(p99_ms=5.0).is_met()
    assert not comparison(cpu_us=41.0).is_met()
    assert not comparison(missing=1).is_met()


def test_rounds() -> None:
    assert parse([]).counts == COUNTS
    assert parse(["--quick"]).counts == QUICK_COUNTS
    assert parse(["--rounds", "SIGSTOP=2", "--rounds", "full disk=1"]).counts == {
        "SIGSTOP": 2,
        "full disk": 1,
    }


@pytest.mark.parametrize("text", ["SIGSTOP", "SIGSTOP=", "SIGSTOP=0", "fire=1"])
def test_wrong_rounds(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--rounds", text])
    assert "give FAULT=COUNT" in capsys.readouterr().err


def stretch(changes: Changes) -> Stretch:
    return Stretch(700.0, (1.0, 2.0, 3.0), (1.0, 2.0, 3.0), 0.1, changes, 0.5, 0.0, 60)


def test_verdict_of_a_steady_load() -> None:
    quiet = Steady(1000.0, 700.0, [stretch(Changes(suspicions=1))], 42_000)
    assert quiet.is_met()
    assert quiet.verdict().endswith(
        "of 42,000 messages 0 are missing, 0 repeated or out of order: pass"
    )
    for changes in (Changes(leaders=1), Changes(partitions=1), Changes(terms=1)):
        changed = Steady(1000.0, 700.0, [stretch(Changes()), stretch(changes)], 42_000)
        assert not changed.is_met()
    assert not Steady(1000.0, 700.0, [stretch(Changes())], 42_000, missing=1).is_met()
    assert not Steady(1000.0, 700.0, [stretch(Changes())], 42_000, strayed=1).is_met()
    assert not Steady(1000.0, 700.0).is_met()


def test_changes_are_counted_from_what_the_metadata_says() -> None:
    before = {"partitions": [{"epoch": 1, "version": 1}, {"epoch": 2, "version": 5}]}
    after = {"partitions": [{"epoch": 2, "version": 3}, {"epoch": 2, "version": 5}]}
    first = changes_in({**before, "metadata_term": 1})
    second = changes_in({**after, "metadata_term": 3}, suspicions=2)
    assert second.since(first) == Changes(leaders=1, partitions=1, terms=2, suspicions=2)


def test_what_counts_as_sustained() -> None:
    assert is_sustained(Timings([1.0] * 100, [], [0.1] * 100))
    assert not is_sustained(Timings())
    assert not is_sustained(Timings([1.0] * 98 + [51.0] * 2, [], [0.1] * 100))
    assert not is_sustained(Timings([1.0] * 100, [], [0.1] * 98 + [51.0] * 2))


@pytest.mark.parametrize("option", ["--minutes", "--load", "--rate"])
@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "many"])
def test_wrong_figures_of_a_steady_load(
    option: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([f"{option}={text}"])
    assert "give a number above 0" in capsys.readouterr().err


def test_minutes() -> None:
    assert parse([]).minutes == 20.0
    assert parse(["--quick"]).minutes == 1.0
    assert parse(["--minutes", "2"]).minutes == 2.0


def cost(nodes: int, cpu_us: float, stored_bytes: float, missing: int = 0) -> Cost:
    figures = (1.0, 0.1, 2.0, 500.0)
    return Cost(nodes, 0, 9000.0, False, cpu_us, *figures, stored_bytes, missing, 0.1)


def test_what_is_out_of_line_when_nodes_are_added() -> None:
    usual = [cost(1, 5, 140), cost(3, 20, 420), cost(5, 24, 430), cost(7, 26, 430)]
    joined = Join(5, 52e6, 50e6, 1.03)
    assert Scale(usual, joined).faults() == []
    slow = [*usual[:2], cost(5, 36.5, 430)]
    assert Scale(slow, joined).faults() == ["each node from 3 to 5 costs 8.2 µs, target < 8 µs"]
    disturbed = Scale([replace(slow[0], others_busy=1.5), *slow[1:]], joined)
    assert disturbed.is_disturbed()
    assert disturbed.faults() == []
    full = [*usual[:2], cost(5, 24, 700, missing=2)]
    assert len(Scale(full, joined).faults()) == 2
    assert len(Scale(usual, Join(5, 100e6, 50e6, 1.5)).faults()) == 2
