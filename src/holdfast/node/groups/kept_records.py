"""QoS 2 records that the sessions of members which have left may have kept."""

from collections.abc import Callable

from holdfast.log.partition import partition_of
from holdfast.node.groups.assignments import AgentContext, NodeAssignments
from holdfast.node.groups.control_frames import Place
from holdfast.node.session.session import Session, tag_of


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
        self._after_newest = context.after_newest
        self._replicated = context.replicated
        self._finish = finish
        self._return = return_record
        # The client ids.
        self.records: dict[tuple[NodeAssignments, Place], str] = {}

    def add(self, share: NodeAssignments, session: Session, place: Place) -> None:
        """Handles a QoS 2 record that the session of a leaving member keeps."""
        home = partition_of(session.key, self._state.config.partitions)
        client_id = session.client_id
        self.records[(share, place)] = client_id
        self._after_newest(home, lambda: self._resolve(share, client_id, place))

    def _resolve(self, share: NodeAssignments, client_id: str, place: Place) -> None:
        """Finishes or returns a kept record, once the session's record that contains it is applied.

        That record is ignored if another node owned the session by then, and the place is returned.
        The exception is a record that the group has finished. The session may have completed it at
        the other node, so that its packet id is free again.
        """
        if self.records.get((share, place)) != client_id:
            # Another session has it now.
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
        """Forgets the records that are resolved otherwise, every `node.TIDY_S`.

        The others wait for the record of the session for as long as its home has no leader.
        Counter-example with a time-out: the record is given to another member, the lost leader
        returns with the session's record, and two sessions have the QoS 2 record.
        """
        for share, place in list(self.records):
            if place not in share.assigned:
                del self.records[(share, place)]
