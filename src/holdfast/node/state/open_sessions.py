"""Finds sessions of the replicated state by owner and home partition.

Invariant: a session is in one bucket, that of its owner and home. One without a connection has the
owner "". A node that goes down then costs a walk over its own sessions. Without the index it costs
one over all sessions: with 1,000,000 of them the event loop stops for longer than `suspect_s`. A
snapshot lists one home at a time, because a list of all sessions takes 70 ms.
"""

from collections.abc import Iterable

from holdfast.log.partition import partition_of
from holdfast.node.session.session import Session


class OpenSessions:
    """The open sessions of each node, and those without a connection."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        # In the order of opening. That of a set of sessions differs from one process to the next.
        self._of: dict[str, dict[int, dict[Session, None]]] = {}
        # The number of clients' open sessions of each owner that has had one.
        self.counts: dict[str, int] = {}

    def add(self, session: Session) -> None:
        """Adds a session for its present owner, if it has one."""
        home = partition_of(session.key, self._partitions)
        self._of.setdefault(session.owner, {}).setdefault(home, {})[session] = None
        if session.owner:
            counts = self.counts
            counts[session.owner] = counts.get(session.owner, 0) + (not session.is_internal)

    def discard(self, session: Session) -> None:
        """Removes a session from its present owner, if it is there."""
        homes = self._of.get(session.owner)
        home = partition_of(session.key, self._partitions)
        sessions = None if homes is None else homes.get(home)
        if homes is None or sessions is None or session not in sessions:
            return
        del sessions[session]
        if session.owner:
            self.counts[session.owner] -= not session.is_internal
        if not sessions:
            del homes[home]
            if not homes:
                del self._of[session.owner]

    def check(self, sessions: Iterable[Session]) -> None:
        """Raises `AssertionError` unless these sessions, which are all, are in the buckets of their
        owners."""
        known = list(sessions)
        assert all(map(self._is_known, known)), "a session is missing"
        count = len(known)
        for owner, homes in self._of.items():
            clients = [not each.is_internal for bucket in homes.values() for each in bucket]
            assert not owner or self.counts[owner] == sum(clients), "the number of the open"
            for bucket in homes.values():
                count -= len(bucket)
                assert bucket, "an empty bucket"
                assert all(session.owner == owner for session in bucket), "another's session"
        assert count == 0, "a session that has ended is here"

    def owners(self) -> list[str]:
        """Returns the nodes with open sessions."""
        return [owner for owner in self._of if owner]

    def homes(self, owner: str) -> list[int]:
        """Returns the home partitions of the open sessions of a node."""
        return list(self._of.get(owner, ()))

    def has(self, session: Session) -> bool:
        """True if the session is open, and belongs to its owner therefore."""
        return session.owner != "" and self._is_known(session)

    def _is_known(self, session: Session) -> bool:
        home = partition_of(session.key, self._partitions)
        return session in self._of.get(session.owner, {}).get(home, ())

    def of(self, owner: str, home: int) -> list[Session]:
        """Returns a copy of the open sessions of a node with one home partition."""
        return list(self._of.get(owner, {}).get(home, ()))

    def all_of(self, home: int) -> list[Session]:
        """Returns a copy of all sessions with one home partition."""
        return [session for homes in self._of.values() for session in homes.get(home, ())]
