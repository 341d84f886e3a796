"""Tracks for which home partitions and clients a coordinator of sessions may decide."""

from collections.abc import Callable

from holdfast.node.context import ClusterContext
from holdfast.node.node_state import NodeState

Key = tuple[str, str, int]
"""The key of a postponed call: the kind of call, a node or client id, and a number."""


class Decisions:
    """The home partitions that this node leads, and the calls for those that are not ready.

    Invariant: this node decides nothing for a partition before it has applied what earlier leaders
    have appended to it, and nothing for a client before it has applied the client's SESSION
    records in its own log (`is_changing`), whichever node sent them. So every decision is one on
    the state that it changes. Counter-example: a session expires, and its end is appended. The
    client connects before the commit, finds its session, and receives Session Present. When both
    records are applied the session is empty.
    """

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        changes_session: Callable[[int, str], bool],
        home: Callable[[str], int],
    ) -> None:
        """`changes_session`: see `Admission`."""
        self._state = state
        self._context = context
        self._changes_session = changes_session
        self._home = home
        # Per newly led partition: the offset that must be applied before this node decides.
        self.begins_at: dict[int, int] = {}
        # The calls that arrive meanwhile. Of repeated calls only the last is kept.
        self.postponed: dict[int, dict[Key, Callable[[], None]]] = {}

    def decides(self, partition: int) -> bool:
        """True if this node leads `partition` and has applied all records of earlier leaders."""
        return self._context.leads(partition) and partition not in self.begins_at

    def decides_for(self, client_id: str) -> bool:
        """`decides` for the home partition of a client."""
        return self.decides(self._home(client_id))

    def is_changing(self, client_id: str) -> bool:
        """True if a SESSION record of the client is in this leader's log and not applied. The
        decision then waits for `SessionCoordinator.applied`."""
        return self._changes_session(self._home(client_id), client_id)

    def start_leading(self, partition: int) -> None:
        self.begins_at[partition] = self._context.journal.next_offset[partition]
        self.postponed[partition] = {}

    def is_ready(self, partition: int) -> bool:
        """True if this node may decide from now on, because enough is applied."""
        begins_at = self.begins_at.get(partition)
        if begins_at is None or self._state.delivered[partition] < begins_at:
            return False
        del self.begins_at[partition]
        return True

    def pop_postponed(self, partition: int) -> list[Callable[[], None]]:
        return list(self.postponed.pop(partition).values())

    def stop_leading(self, partition: int) -> None:
        self.begins_at.pop(partition, None)
        self.postponed.pop(partition, None)

    def postpone(self, home: int, key: tuple[str, str, int], again: Callable[[], None]) -> None:
        """Postpones a call until this node may decide for the partition `home`.

        A repeated call replaces the earlier one with the same key, because nodes repeat requests as
        long as the replicas are away. Without this the queue would grow without limit.
        """
        early = self.postponed[home]
        early.pop(key, None)
        early[key] = again
