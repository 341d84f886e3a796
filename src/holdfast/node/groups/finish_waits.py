"""Promises that wait until a shared group has finished with a record."""

from collections.abc import Callable

from holdfast.node.groups.control_frames import Place
from holdfast.node.node_state import Promise
from holdfast.node.publish.promises import PromiseQueues
from holdfast.node.session.connection import CLOSED
from holdfast.node.session.session import Inflight, Session, tag_of
from holdfast.node.state.replicated import ReplicatedState


class FinishWait:
    """A promise that waits until the group `key` has finished, by the log, with the record that it
    gave to `session`."""

    def __init__(self, key: str, session: Session, place: Place, promise: Promise) -> None:
        self.key = key
        self.session = session
        self.place = place
        self.promise = promise


class FinishWaits:
    """The promises of this node's sessions that wait for the groups of their records."""

    def __init__(
        self,
        replicated: ReplicatedState,
        promises: PromiseQueues,
        unlogged: Callable[[int, Place], list[str]],
    ) -> None:
        """`unlogged(tag, place)`: the groups with this tag whose record is with this node, and not
        finished in the log."""
        self._replicated = replicated
        self._unlogged = unlogged
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

    def unfinished(self, session: Session, entry: Inflight) -> list[str]:
        """Returns the groups that may have given the record to the session and have not finished it
        in the log. The session may have left its group.

        There is more than one only when the tags of two groups are equal by chance.
        """
        groups = self._replicated.groups
        tag, place = entry.group_tag, (entry.partition, entry.offset)
        keys = {group.key for group in session.groups or () if group.tag == tag}
        if not keys:
            keys = groups.keys_of(tag).union(self._unlogged(tag, place))
        return [key for key in keys if not groups.is_finished(key, *place)]

    def wait(self, session: Session, entry: Inflight, promise: Promise) -> None:
        """Makes the promise wait until the log has the record as finished by its group, or the
        group ends.

        Without a coordinator the packet id is all that shows the next one which session has the
        record.
        """
        for key in self.unfinished(session, entry):
            promise.waiting += 1
            place = (entry.partition, entry.offset)
            self._waiting.append(FinishWait(key, session, place, promise))

    def resolve(self) -> None:
        groups = self._replicated.groups
        self._version = groups.version
        dropped = groups.pop_dropped()
        waiting = self._waiting
        self._waiting = []
        for each in waiting:
            if each.key in dropped or self._is_over(each):
                self._promises.settle(each.promise)
            else:
                self._waiting.append(each)

    def _is_over(self, waiting: FinishWait) -> bool:
        groups = self._replicated.groups
        key = waiting.key
        connection = waiting.promise.connection
        if connection is None or connection.state == CLOSED:
            return True
        if groups.is_finished(key, *waiting.place):
            return True
        if key in groups.positions or key in self._unlogged(tag_of(key), waiting.place):
            return False
        # A group without a logged position ends without a record, once its members have left.
        return all(group.key != key for group in waiting.session.groups or ())
