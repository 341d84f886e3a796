"""The QoS 2 records that the sessions of members which have left may have kept."""

from collections.abc import Callable
from typing import Final

from holdfast.broker.session.session import Session, tag_of
from holdfast.cluster.shared_groups.assignments import AgentContext, NodeAssignments
from holdfast.cluster.shared_groups.codec import Place
from holdfast.storage.partition import partition_of

KEPT_WAIT_S: Final = 60.0
"""The longest time in seconds that a QoS 2 record waits for the record of the session that has kept
it. It applies while the home partition of that session has no leader.

Then it is given to another member, unless the log has it as kept. It may arrive twice if the lost
leader returns with the session's record. That is better than a record that never arrives.
"""


class KeptRecords:
    """The records whose session's own record is on its way to the log.

    Once that record is applied, the log shows whether the session has kept the record.
    """

    def __init__(
        self,
        context: AgentContext,
        finish: Callable[[NodeAssignments, Place], None],
        return_record: Callable[[NodeAssignments, Place], None],
    ) -> None:
        self._state = context.state
        self._context = context.cluster
        self._forwarding = context.forwarding
        self._replicated = context.replicated
        self._finish = finish
        self._return = return_record
        # Client id and time, oldest first.
        self.records: dict[tuple[NodeAssignments, Place], tuple[str, float]] = {}

    def add(self, share: NodeAssignments, session: Session, place: Place) -> None:
        """Handles a QoS 2 record that the session of a leaving member keeps."""
        home = partition_of(session.key, self._state.config.partitions)
        client_id = session.client_id
        self.records.pop((share, place), None)
        self.records[(share, place)] = (client_id, self._state.now)
        self._forwarding.after_newest(home, lambda: self._resolve(share, client_id, place))

    def _resolve(self, share: NodeAssignments, client_id: str, place: Place) -> None:
        """Finishes or returns a kept record, once the session's record that contains it is applied.

        That record is ignored if another node owned the session by then, and the place is returned.
        The exception is a record that the group has finished. The session may have completed it at
        the other node, so that its packet id is free again.
        """
        if self.records.get((share, place), ("", 0.0))[0] != client_id:
            # The record has waited too long, and another session has it now.
            return
        del self.records[(share, place)]
        if place not in share.assigned:
            return
        is_finished = self._replicated.groups.is_finished(share.key, *place)
        if is_finished or self._replicated.has_inflight(client_id, tag_of(share.key), place):
            self._finish(share, place)
        else:
            self._return(share, place)

    def tidy(self) -> None:
        """Resolves the records that have waited too long for a leader, every `node.TIDY_S`."""
        limit = self._state.now - KEPT_WAIT_S
        for (share, place), (client_id, since) in list(self.records.items()):
            if since > limit:
                return
            home = partition_of(client_id.encode(), self._state.config.partitions)
            if place not in share.assigned:
                del self.records[(share, place)]
            elif not self._context.leader(home):
                self._resolve(share, client_id, place)
                fields = {"group": share.key, "partition": place[0], "offset": place[1]}
                self._state.note("warning", "kept_record_settled", {"client": client_id, **fields})
