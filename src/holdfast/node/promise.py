"""The promise: an acknowledgement or a delivery that leaves only after a record is committed."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.node.session.connection import Connection

if TYPE_CHECKING:
    from holdfast.log.record import Record
    from holdfast.node.node_state import NodeState

PROMISE_BYTES: Final = 300
"""The memory in bytes of one promise that waits for the log, approximately."""


class Promise:
    """A PUBACK, a SUBACK, a delivery, or whatever else waits for the commit of its record.

    It goes to `connection`, if there is one.
    """

    def __init__(self, connection: Connection | None = None) -> None:
        self.connection = connection
        # The number of conditions that are not met yet: records without a commit, and others.
        self.waiting = 0
        # In a cluster whose only node this is: the appended record whose commit it waits for.
        self.appended: Record | None = None
        # From 0x80 on: the promise is refused, for the reason `text`.
        self.reason = 0
        self.text = ""

    def release(self, state: "NodeState") -> None:
        """Keeps the promise: its record is committed."""
        raise NotImplementedError

    def refuse(self, state: "NodeState", reason: int, text: str) -> None:
        """Takes the place of `release`: the leader of the record's partition refuses the message,
        or the partition has no leader."""
        raise NotImplementedError


class CallbackPromise(Promise):
    """The promise of a record's outcome to a part of the process: `done` is called with "" once it
    is committed, or with the reason of a refusal. Interpreted code cannot derive from `Promise`."""

    def __init__(self, done: Callable[[str], None]) -> None:
        super().__init__()
        self.done = done

    def release(self, state: "NodeState") -> None:
        self.done("")

    def refuse(self, state: "NodeState", reason: int, text: str) -> None:
        self.done(text or "refused")
