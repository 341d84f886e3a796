"""Reports this node's sessions to the coordinators of their home partitions.

This node may have hundreds of thousands of sessions, so a report leaves in pieces.

Invariant: a report names each session that this node had when its first piece left, and still has.
The first piece leaves in the call that lists the sessions, with the clients that wait for one. So a
session that begins later was requested before and is among those clients, or was requested behind
that piece. Counter-example: the list is made in one turn and the first piece leaves in the next.
The session of a reply between the two is in no piece, and the coordinator closes it.

A coordinator of an older version counts each piece as a complete report. It gets one piece.
"""

from typing import Final

from holdfast.node.context import ClusterContext
from holdfast.node.frame_kinds import SESSION_OWNED
from holdfast.node.frames import OwnedSessions
from holdfast.node.node_state import NodeState
from holdfast.node.ownership.coordinator import SessionCoordinator
from holdfast.node.ownership.reports import FEATURE
from holdfast.node.session.session import Session
from holdfast.node.sweep import Sweep

OWNED_MAX: Final = 1000
"""The most sessions in one piece."""


class _OwnReport:
    """A report to one leader, and the sessions of its next piece."""

    def __init__(self, leader: str, partitions: list[int], asking: list[str]) -> None:
        self.leader = leader
        self.homes = set(partitions)
        self.asking = asking
        self.owned: list[tuple[str, int]] = []
        self.users: dict[str, str | None] = {}
        self.follows = False


class OwnReports:
    """The reports of this node that are under way, one after the other."""

    def __init__(
        self, state: NodeState, context: ClusterContext, coordinator: SessionCoordinator
    ) -> None:
        self._state = state
        self._context = context
        self._coordinator = coordinator
        self._reports: list[_OwnReport] = []

    def begin(self, leader: str, partitions: list[int], asking: list[str]) -> None:
        """Reports to `leader` the sessions with these home partitions. `asking`: the clients that
        wait for such a session."""
        for earlier in self._reports:
            if earlier.leader == leader:
                earlier.homes.difference_update(partitions)
        report = _OwnReport(leader, partitions, asking)
        sessions = self._state.list_sessions()
        if leader != self._context.node_id and not self._context.understands(leader, FEATURE):
            for session in sessions:
                self._add(report, session)
            self._send(report, is_last=True)
            return
        self._reports.append(report)
        sweep: Sweep[Session] = Sweep(self._state)
        if len(sessions) > self._state.steps_at_once:
            self._send(report, is_last=False)
        sweep.begin(
            sessions, lambda session: self._visit(report, session), lambda: self._finish(report)
        )

    def disconnected(self, node: str) -> None:
        """Ends the reports to a node whose link is lost. The next link brings another one."""
        for report in self._reports:
            if report.leader == node:
                report.homes.clear()

    def _add(self, report: _OwnReport, session: Session) -> None:
        client_id = session.client_id
        if self._state.sessions.get(client_id) is not session:
            return
        if self._coordinator.home(client_id) in report.homes:
            report.owned.append((client_id, session.epoch))
            if session.is_owned:
                report.users[client_id] = session.username

    def _visit(self, report: _OwnReport, session: Session) -> int:
        if report.homes:
            self._add(report, session)
            if len(report.owned) >= OWNED_MAX:
                self._send(report, is_last=False)
        return 1

    def _finish(self, report: _OwnReport) -> None:
        self._reports.remove(report)
        if report.homes:
            self._send(report, is_last=True)

    def _send(self, report: _OwnReport, *, is_last: bool) -> None:
        leader = report.leader
        partitions = sorted(report.homes)
        owned, report.owned = report.owned, []
        users, report.users = report.users, {}
        asking, report.asking = report.asking, []
        follows, report.follows = report.follows, True
        if leader == self._context.node_id:
            self._coordinator.reports.receive(
                leader,
                partitions,
                dict(owned),
                asking,
                users,
                is_first=not follows,
                is_last=is_last,
            )
            return
        frame = OwnedSessions(
            partitions=partitions,
            owned=owned,
            asking=asking,
            users=users,
            follows=follows,
            more=not is_last,
        )
        self._context.send_frame(leader, SESSION_OWNED, frame)
