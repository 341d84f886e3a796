"""The wall clock that nodes agree on, whatever one of them thinks."""

import itertools

import pytest

from holdfast.node.failure.cluster_clock import SAMPLE_S, SKEW_S, ClusterClock

TRUE_US = 1_790_000_000_000_000
DAY_US = 86_400_000_000


class Nodes:
    """`off_us`: by node how far its clock is ahead. Each has a monotonic clock of its own."""

    def __init__(self, *names: str) -> None:
        self.now = 0.0
        self.off_us = dict.fromkeys(names, 0)
        self.boot = {name: 1000.0 * number for number, name in enumerate(names)}
        self.clocks = {name: ClusterClock(name) for name in names}

    def wall(self, name: str) -> int:
        return TRUE_US + int(self.now * 1e6) + self.off_us[name]

    def mono(self, name: str) -> float:
        return self.now + self.boot[name]

    def error_s(self, name: str) -> float:
        agreed = self.clocks[name].tick(self.mono(name), self.wall(name))
        return (agreed - TRUE_US) / 1e6 - self.now

    def errors_s(self) -> dict[str, float]:
        return {name: round(self.error_s(name), 3) for name in self.clocks}

    def meet(self, *names: str) -> None:
        """Every one of these tells every other one."""
        for name in names:
            self.error_s(name)
        for sender, receiver in itertools.permutations(names, 2):
            mono = self.mono(sender)
            wall, agreed = self.clocks[sender].own_us(mono), self.clocks[sender].agreed_us(mono)
            self.clocks[receiver].add_sample(sender, wall, agreed, self.mono(receiver))

    def settle(self) -> None:
        for clock in self.clocks.values():
            clock.has_agreed = True

    def restart(self, name: str) -> None:
        self.clocks[name] = ClusterClock(name)
        self.boot[name] += 77


@pytest.mark.parametrize("off_us", [3_600_000_000, 2 * DAY_US, -TRUE_US, -5_000_000])
def test_one_wrong_clock_of_three_counts_for_nothing(off_us: int) -> None:
    nodes = Nodes("n1", "n2", "n3")
    nodes.off_us["n2"] = off_us
    nodes.meet("n1", "n2", "n3")
    nodes.settle()
    assert nodes.errors_s() == {"n1": 0, "n2": 0, "n3": 0}
    nodes.now += 3600
    assert nodes.errors_s() == {"n1": 0, "n2": 0, "n3": 0}
    assert nodes.clocks["n1"].skews_s() == {"n1": 0, "n2": off_us / 1e6, "n3": 0}


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_a_jump_moves_nothing(count: int) -> None:
    names = [f"n{number}" for number in range(1, count + 1)]
    nodes = Nodes(*names)
    nodes.meet(*names)
    nodes.settle()
    nodes.meet(*names)
    for jump_us in (3_600_000_000, -2 * DAY_US):
        nodes.off_us["n2"] = jump_us
        assert not any(nodes.errors_s().values()), "before anybody knows"
        for _ in range(3):
            nodes.now += SAMPLE_S
            nodes.meet(*names)
            assert not any(nodes.errors_s().values())
    nodes.off_us["n2"] = 0
    nodes.now += 2 * SAMPLE_S
    nodes.meet(*names)
    assert not any(nodes.errors_s().values())


def test_who_has_just_started_believes_the_one_that_runs() -> None:
    nodes = Nodes("n1", "n3")
    nodes.clocks["n3"].has_agreed = True
    nodes.off_us["n1"] = 2 * DAY_US
    for _ in range(3):
        nodes.meet("n1", "n3")
        assert nodes.errors_s() == {"n1": 0, "n3": 0}
    nodes.settle()
    nodes.restart("n1")
    nodes.meet("n1", "n3")
    assert nodes.errors_s() == {"n1": 0, "n3": 0}


@pytest.mark.parametrize(
    ("wrong", "off_us"), [*itertools.product(("n1", "n2"), (DAY_US, -TRUE_US))]
)
def test_two_that_start_together_end_nothing_too_soon(wrong: str, off_us: int) -> None:
    nodes = Nodes("n1", "n2")
    nodes.off_us[wrong] = off_us
    nodes.meet("n1", "n2")
    nodes.settle()
    nodes.meet("n1", "n2")
    assert nodes.errors_s() == {"n1": 0, "n2": 0}


def test_a_node_alone_goes_by_its_own_clock() -> None:
    nodes = Nodes("n1")
    nodes.settle()
    nodes.off_us["n1"] = DAY_US
    assert nodes.error_s("n1") == 86_400


def test_a_node_that_is_left_alone_goes_on_with_the_agreed_clock() -> None:
    nodes = Nodes("n1", "n2")
    nodes.meet("n1", "n2")
    nodes.settle()
    nodes.off_us["n2"] = DAY_US
    nodes.meet("n1", "n2")
    assert nodes.error_s("n2") == 0
    nodes.clocks["n2"].forget({"n2"}, nodes.mono("n2"))
    nodes.now += 3600
    assert nodes.error_s("n2") == 0
    # Its clock is set right, and from then on counts as that of any node without others.
    nodes.off_us["n2"] = 0
    for _ in range(5):
        nodes.now += 86_400
        nodes.off_us["n2"] += 900_000
        assert round(nodes.error_s("n2"), 3) == nodes.off_us["n2"] / 1e6


def test_a_clock_that_was_set_is_told() -> None:
    clock = ClusterClock("n1")
    for now, off_s in ((1.0, 0.0), (2.0, 0.5), (3.0, SKEW_S), (4.0, -7200.0), (5.0, -7200.0)):
        clock.tick(now, TRUE_US + int((now + off_s) * 1e6))
    assert clock.stepped_s == -7200 - SKEW_S


def test_what_was_under_way_for_long_is_no_sign_of_a_wrong_clock() -> None:
    """As after a pause: all that has come meanwhile is read at once."""
    nodes = Nodes("n1", "n2", "n3")
    nodes.meet("n1", "n2", "n3")
    clock = nodes.clocks["n1"]
    for number in range(30):
        for name in ("n2", "n3"):
            clock.add_sample(name, TRUE_US + number * 100_000, 0, 3.0)
    assert clock.pop_changes() == []
    nodes.now = 3.0
    assert nodes.error_s("n1") == 0


def test_it_is_told_once_when_it_begins_and_when_it_ends() -> None:
    nodes = Nodes("n1", "n2", "n3")
    clock = nodes.clocks["n1"]
    told = []
    for off_s in (0.0, SKEW_S * 0.9, SKEW_S + 1, SKEW_S * 3, SKEW_S * 0.8, 0.0, 0.0):
        nodes.off_us["n2"] = int(off_s * 1e6)
        nodes.now += SAMPLE_S + 1
        nodes.meet("n1", "n2", "n3")
        told += clock.pop_changes()
    assert told == [("n2", SKEW_S + 1, True), ("n2", 0.0, False)]
    nodes.off_us["n1"] = -DAY_US
    nodes.meet("n1", "n2", "n3")
    assert clock.pop_changes() == [("n1", -86_400, True)]
    clock.forget({"n1", "n3"}, nodes.mono("n1"))
    assert set(clock.skews_s()) == {"n1", "n3"}
