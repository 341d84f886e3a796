"""A count of all sessions, in slices: those away, those behind, their backlog.

A node with 100,000 sessions may not look at all of them in one turn. The driver calls `step` with
some sessions at a time. The counts are therefore of no single moment, but no session is missed that
exists during the whole census.

The backlog of a session is the number of committed records above its cursor, whether they match its
subscriptions or not, and for a session on the live tail the messages in its outbox.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from holdfast.node.session.session import Session
from holdfast.protocol.topics.names import is_queue


class SessionCensus:
    """One count of the given sessions."""

    def __init__(self, sessions: Iterable[Session], high_watermark: Sequence[int]) -> None:
        self._sessions = iter(sessions)
        self._committed = sum(high_watermark)
        self.count = 0
        self.away = 0
        self.behind = 0
        """Connected sessions that read the log."""
        self.backlog_records = 0
        self.backlog_max = 0

    def step(self, sessions: int) -> bool:
        """Counts some more sessions. Returns False once all are counted."""
        seen = 0
        for session in islice(self._sessions, sessions):
            seen += 1
            if not session.is_internal:
                self._count(session)
        return seen == sessions

    def _count(self, session: Session) -> None:
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
        self.backlog_records += backlog
        self.backlog_max = max(self.backlog_max, backlog)
