"""Judges members' health by the manager's probes and the reports of neighbours.

A member is dead when two probes in a row have failed and no neighbour reports its link as up. When
more than half of the members fail at once, the manager is probably cut off itself, so no member
counts as dead. Nothing of this is stored: a restart of the manager removes no member.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

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
