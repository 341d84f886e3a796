"""Judges members' health by the manager's probes and the reports of neighbours.

A member is dead when two probes in a row have failed and no neighbour reports its link as up. When
more than half of the members fail at once, the manager is probably cut off itself, so no member
counts as dead. Nothing of this is stored: a restart of the manager removes no member.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import Final

from holdfast_federation.manager.graph.graph import Link, link_of
from holdfast_federation.manager.messages import Report

UNKNOWN_MS: Final = 10_000.0
"""The round trip of a member that could not be measured. It is chosen last."""


def measured_ms(value: float | None) -> float | None:
    """Returns the value, or None if it is no measurement: absent, negative, infinite, or the mean
    of nothing."""
    return value if value is not None and isfinite(value) and value >= 0 else None


@dataclass
class RoundTrips:
    """The newest round trips, in milliseconds."""

    of_members: dict[int, float] = field(default_factory=dict)
    """From the manager through the member's broker and back."""
    of_links: dict[Link, float] = field(default_factory=dict)
    """The round trips that the members report."""

    def latency(self, node: int) -> float:
        return self.of_members.get(node, UNKNOWN_MS)

    def cost(self, one: int, other: int) -> float:
        """Returns the cost of a link. Without a measurement it is the way over the manager, an
        upper bound."""
        known = self.of_links.get(link_of(one, other))
        return self.latency(one) + self.latency(other) if known is None else known

    def add_measurement(self, node: int, round_trip_ms: float | None) -> None:
        known = measured_ms(round_trip_ms)
        if known is None:
            self.of_members.pop(node, None)
        else:
            self.of_members[node] = known

    def link_measured(self, one: int, other: int, round_trip_ms: float | None) -> None:
        known = measured_ms(round_trip_ms)
        if known is not None and one != other:
            self.of_links[link_of(one, other)] = known

    def forget(self, node: int) -> None:
        self.of_members.pop(node, None)
        for link in [link for link in self.of_links if node in link]:
            del self.of_links[link]


class Reports:
    """The newest report of each member."""

    def __init__(self, clock: Callable[[], float], fresh_s: float) -> None:
        """`fresh_s`: the age in seconds above which a report is ignored."""
        self._clock = clock
        self._fresh_s = fresh_s
        self._newest: dict[int, tuple[float, Report]] = {}

    def __contains__(self, node: object) -> bool:
        """True if the member has ever reported."""
        return node in self._newest

    def received(self, node: int, report: Report) -> None:
        self._newest[node] = (self._clock(), report)

    def forget(self, node: int) -> None:
        self._newest.pop(node, None)

    def clear(self) -> None:
        self._newest.clear()

    def newest(self, node: int) -> tuple[float, Report] | None:
        """Returns the age in seconds of the newest report and the report, or None."""
        found = self._newest.get(node)
        return None if found is None else (self._clock() - found[0], found[1])

    def fresh(self, node: int) -> Report | None:
        """Returns the newest report unless it is too old."""
        found = self.newest(node)
        return found[1] if found is not None and found[0] <= self._fresh_s else None

    def is_up(self, node: int, neighbours: Iterable[int]) -> bool:
        """True if a neighbour has recently reported its link to this member as up."""
        for neighbour in neighbours:
            report = self.fresh(neighbour)
            if report and any(link.peer == node and link.up for link in report.links):
                return True
        return False

    def link_up(self, link: Link) -> bool | None:
        """Returns the state of a link; None if neither end has recently reported it."""
        said = [
            each.up
            for node, other in (link, link[::-1])
            if (report := self.fresh(node)) is not None
            for each in report.links
            if each.peer == other
        ]
        return all(said) if said else None


FAILURES_DEAD: Final = 2
"""The published rule: a member is removed when its check fails twice in a row."""


class MemberState(StrEnum):
    NEW = "new"
    """Not probed since the manager started."""
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """One probe has failed."""
    UNKNOWN = "unknown"
    """Probes fail, but a neighbour reports the link up, or too many fail at once."""
    DEAD = "dead"


@dataclass(frozen=True)
class HealthVerdict:
    """The state of each member, and the members that count as dead."""

    states: dict[int, MemberState]
    dead: tuple[int, ...]
    is_frozen: bool


@dataclass
class MemberHealth:
    """The failed probes of each member."""

    failures: dict[int, int] = field(default_factory=dict)
    """In a row."""

    def probed(self, node: int, succeeded: bool) -> None:
        self.failures[node] = 0 if succeeded else self.failures.get(node, 0) + 1

    def forget(self, node: int) -> None:
        self.failures.pop(node, None)

    def judge(self, nodes: Iterable[int], is_reported_up: Callable[[int], bool]) -> HealthVerdict:
        """Returns the verdict on all members. `is_reported_up`: returns whether a neighbour has
        recently reported its link to the member as up."""
        members = list(nodes)
        failing = [node for node in members if self.failures.get(node, 0)]
        is_frozen = 2 * len(failing) > len(members)
        states = {node: self._state(node, is_frozen, is_reported_up) for node in members}
        dead = tuple(node for node in members if states[node] is MemberState.DEAD)
        return HealthVerdict(states, dead, is_frozen)

    def _state(
        self, node: int, is_frozen: bool, is_reported_up: Callable[[int], bool]
    ) -> MemberState:
        failures = self.failures.get(node)
        if failures is None:
            return MemberState.NEW
        if failures == 0:
            return MemberState.HEALTHY
        if failures < FAILURES_DEAD:
            return MemberState.SUSPECT
        return MemberState.UNKNOWN if is_frozen or is_reported_up(node) else MemberState.DEAD
