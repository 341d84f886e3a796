"""A count of all sessions, in slices: those away, those behind, their backlog, the slowest ones.

A node with 100,000 sessions may not look at all of them in one turn. The driver calls `step` with
some sessions at a time. The counts are therefore of no single moment, but no session is missed that
exists during the whole census.

The backlog of a session is the number of committed records above its cursor, whether they match its
subscriptions or not, and for a session on the live tail the messages in its outbox.
"""

import heapq
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from holdfast.node.session.session import Session
from holdfast.protocol.topics.names import is_queue

SLOWEST: Final = 100
"""The number of slowest sessions that a census keeps."""


class SlowSession:
    """A session with messages that its client has not taken yet."""

    def __init__(self, session: Session, backlog: int) -> None:
        self.client_id = session.client_id
        self.username = session.username or ""
        connection = session.connection
        self.remote = "" if connection is None else connection.remote
        self.is_connected = connection is not None
        self.is_behind = not session.tailing
        self.backlog_records = backlog
        self.inflight = len(session.inflight)
        self.dropped = session.dropped


class SessionCensus:
    """One count of the given sessions."""

    def __init__(self, sessions: Iterable[Session], high_watermark: Sequence[int]) -> None:
        self._sessions = iter(sessions)
        self._committed = sum(high_watermark)
        self._next = 0
        self._slowest: list[tuple[int, int, SlowSession]] = []
        self.count = 0
        self.away = 0
        self.behind = 0
        """Connected sessions that read the log."""
        self.backlog_records = 0
        self.backlog_max = 0

    def step(self, sessions: int) -> bool:
        """Counts some more sessions. Returns False once all are counted."""
        end = self._next + sessions
        for session in islice(self._sessions, sessions):
            if not session.is_internal:
                self._count(self._next, session)
            self._next += 1
        return self._next == end

    def slowest(self) -> list[SlowSession]:
        """Returns the sessions with the largest backlogs, the largest first."""
        return [each for _, _, each in sorted(self._slowest, reverse=True)]

    def _count(self, index: int, session: Session) -> None:
        if session.connection is not None:
            self.behind += not session.tailing
        elif session.owner or is_queue(session.client_id):
            # Its client is connected to a node of the cluster, or it has none.
            return
        else:
            self.away += 1
        self.count += 1
        backlog = session.outbox_count()
        if session.positions is not None and session.subscriptions:
            backlog += max(0, self._committed - sum(session.positions))
        if not backlog:
            return
        self.backlog_records += backlog
        self.backlog_max = max(self.backlog_max, backlog)
        slowest = self._slowest
        if len(slowest) < SLOWEST:
            heapq.heappush(slowest, (backlog, index, SlowSession(session, backlog)))
        elif backlog > slowest[0][0]:
            heapq.heapreplace(slowest, (backlog, index, SlowSession(session, backlog)))
