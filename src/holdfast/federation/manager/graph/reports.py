"""Keeps the reports of members about their links, and their age. Pure."""

from collections.abc import Callable, Iterable

from holdfast.federation.manager.graph.graph import Link
from holdfast.federation.manager.messages import Report


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
