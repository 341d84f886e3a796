"""The promises that wait until a shared group has finished with a record."""

from holdfast.broker.promise import Promise
from holdfast.broker.session.connection import CLOSED
from holdfast.broker.session.session import Group, Inflight, Session
from holdfast.cluster.publish.promises import PromiseQueues
from holdfast.cluster.shared_groups.codec import Place
from holdfast.cluster.state.replicated import ReplicatedState


class FinishWait:
    """A promise that waits until `group` has finished, by the log, with the record that it gave to
    `session`."""

    def __init__(self, group: Group, session: Session, place: Place, promise: Promise) -> None:
        self.group = group
        self.session = session
        self.place = place
        self.promise = promise


class FinishWaits:
    """The promises of this node's sessions that wait for the groups of their records."""

    def __init__(self, replicated: ReplicatedState, promises: PromiseQueues) -> None:
        self._replicated = replicated
        self._promises = promises
        self._waiting: list[FinishWait] = []
        # The version of the group positions at the last check of `_waiting`.
        self._version = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_due(self) -> bool:
        """True if the group positions have changed since the last check."""
        return self._version != self._replicated.groups.version

    def unfinished(self, session: Session, entry: Inflight) -> list[Group]:
        """Returns the groups of the session that may have given it the record and have not finished
        it in the log.

        There is more than one only when the tags of two groups are equal by chance.
        """
        groups = self._replicated.groups
        found: list[Group] = []
        for group in session.groups or ():
            is_its = group.tag == entry.group_tag
            if is_its and not groups.is_finished(group.key, entry.partition, entry.offset):
                found.append(group)
        return found

    def wait(self, session: Session, entry: Inflight, promise: Promise) -> None:
        """Makes the promise wait until the log has the record as finished by its group, or the
        group ends.

        Without a coordinator the packet id is all that shows the next one which session has the
        record.
        """
        for group in self.unfinished(session, entry):
            promise.waiting += 1
            place = (entry.partition, entry.offset)
            self._waiting.append(FinishWait(group, session, place, promise))

    def resolve(self) -> None:
        groups = self._replicated.groups
        self._version = groups.version
        dropped = groups.pop_dropped()
        waiting = self._waiting
        self._waiting = []
        for each in waiting:
            if each.group.key in dropped or self._is_over(each):
                self._promises.settle(each.promise)
            else:
                self._waiting.append(each)

    def _is_over(self, waiting: FinishWait) -> bool:
        groups = self._replicated.groups
        key = waiting.group.key
        connection = waiting.promise.connection
        if connection is None or connection.state == CLOSED:
            return True
        if groups.is_finished(key, *waiting.place) or groups.is_full(key):
            return True
        # A group without a logged position ends without a record, once its members have left.
        return key not in groups.positions and waiting.group not in (waiting.session.groups or ())
