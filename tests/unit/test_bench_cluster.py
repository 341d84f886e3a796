"""What the cluster's benchmark makes of its figures."""

import pytest

from bench.cluster import COUNTS, QUICK_COUNTS, misses, parse
from bench.cluster_speed import RATES, Comparison, Speed
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
