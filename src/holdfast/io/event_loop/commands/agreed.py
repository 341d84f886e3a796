"""Runs dynamic security commands in a cluster, whose nodes agree on the users.

A node runs commands on the users in force here, and proposes the result as the successor of their
version. The metadata accepts it if no other node was first. Otherwise the node waits for the other
node's users and runs the commands again on those.

Invariants
- A command is answered after its change is agreed on, and in force at this node. The other nodes
  put it in force when the metadata brings it to them.
- A change is made from the version that it replaces, so no change of another node is undone.
- The users in force never go back to those of the file once there are agreed ones.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, TypeVar

from msgspec import Struct

from holdfast.io.event_loop.broker import Broker
from holdfast.io.event_loop.commands.agreement import UserAgreement
from holdfast.io.event_loop.commands.queue import CommandQueue
from holdfast.io.event_loop.commands.user_changes import (
    DEFECT,
    Outcomes,
    audit,
    note,
    put_in_force,
    refused,
)
from holdfast.node.effects import RunCommands
from holdfast.node.metadata.model import USERS_BYTES_MAX, AgreedUsers
from holdfast.node.metadata.requests import Accepted, Outcome, RequestRefused
from holdfast.node.publish.control import CommandPort
from holdfast.security.dynamic.agreed import differences, pack, unpack, with_document
from holdfast.security.dynamic.commands import run_commands
from holdfast.security.dynamic.document import DynamicSecurityError
from holdfast.security.dynamic.edit import SecurityChanges, SecurityEdit
from holdfast.security.dynamic.users import DynamicUsers

logger = logging.getLogger("holdfast")

ATTEMPTS_MAX: Final = 20
"""The most times that commands are run because other nodes have changed the users meanwhile."""
OVERTAKEN: Final = "not changed: other nodes change the users all the time, try again"
CLOSED: Final = "this node stops, or its users come from elsewhere now"
UNKNOWN: Final = "maybe changed"
"""The beginning of the error of a change that may still be made."""

T = TypeVar("T")


class CommandWorker(Protocol):
    """A thread, whose results come back to the event loop: `CommandThread`."""

    def __call__(self, work: Callable[[], T], done: Callable[[T], None]) -> None: ...

    def close(self) -> None: ...


class Attempt(Struct, frozen=True):
    """The result of commands that were run on the users of one version. `data`: the users after
    them, packed; b"": they change nothing."""

    batch: list[RunCommands]
    number: int
    version: int
    outcomes: Outcomes
    data: bytes


class AgreedCommandRunner(CommandPort):
    """The commands of the clients of one node of a cluster."""

    def __init__(
        self, broker: Broker, users: DynamicUsers, agreement: UserAgreement, worker: CommandWorker
    ) -> None:
        """`users`: those in force."""
        self.users = users
        self._broker = broker
        self._agreement = agreement
        self._worker = worker
        self._queue = CommandQueue(broker, partial(self._try, number=1))
        self._is_adopting = False
        # The agreed version that this process cannot read.
        self._unreadable = 0
        # The last version in force whose clients without rights have left.
        self._enforced = users.version
        # What waits for a version to be in force here.
        self._next: tuple[int, Callable[[], None]] | None = None

    def run(self, effect: RunCommands) -> None:
        self._queue.append(effect)

    def close(self) -> None:
        self._worker.close()
        self._queue.close()
        # No version is put in force any more.
        self._enforced_to(self._enforced)

    def merged(self, users: DynamicUsers) -> DynamicUsers:
        """The users of a reload, with the agreed ones in place of those of its file."""
        if not self.users.version:
            return users
        return with_document(users, self.users.file.document, self.users.version)

    def replace(self, users: DynamicUsers) -> None:
        """Uses users made by `merged`, which are in force already."""
        self.users = users

    def changed(self) -> None:
        """Puts the users in force that the nodes have agreed on, unless they are."""
        current = self._agreement.current()
        if current is None or self._queue.is_closed or self._is_adopting:
            return
        if current.version in (self.users.version, self._unreadable):
            return
        self._is_adopting = True
        self._worker(partial(_adopted, self.users, current), partial(self._adopt, self.users))

    def _adopt(
        self, base: DynamicUsers, adopted: "tuple[DynamicUsers, SecurityChanges] | int"
    ) -> None:
        self._broker.touch()
        self._is_adopting = False
        if isinstance(adopted, int):
            self._unreadable = adopted
            self._enforced_to(self._enforced)
        elif base is not self.users:
            # A reload has brought other files meanwhile.
            self.changed()
        else:
            users, changes = adopted
            self.users = users
            self._unreadable = 0
            self._is_adopting = True
            put_in_force(self._broker, users, changes, partial(self._is_in_force, users.version))

    def _is_in_force(self, version: int) -> None:
        self._is_adopting = False
        self._enforced_to(version)
        self.changed()

    def _enforced_to(self, version: int) -> None:
        self._enforced = version
        if self._next is not None and (version >= self._next[0] or self._is_adrift()):
            proceed = self._next[1]
            self._next = None
            proceed()

    def _is_adrift(self) -> bool:
        """Whether no agreed version will be in force here."""
        return self._unreadable > 0 or self._queue.is_closed

    def _when_in_force(self, version: int, proceed: Callable[[], None]) -> None:
        if self._enforced >= version or self._is_adrift():
            proceed()
        else:
            self._next = (version, proceed)
            self.changed()

    def _try(self, batch: list[RunCommands], number: int) -> None:
        self._worker(partial(_run, self.users, batch, number), self._ran)

    def _ran(self, attempt: Attempt) -> None:
        self._broker.touch()
        if not attempt.data:
            self._finish(attempt.outcomes)
            return
        refusal = CLOSED if self._queue.is_closed else self._agreement.refusal()
        if refusal:
            self._refuse(attempt, refusal)
            return
        self._agreement.propose(attempt.version, attempt.data, partial(self._decided, attempt))

    def _decided(self, attempt: Attempt, outcome: Outcome) -> None:
        self._broker.touch()
        if isinstance(outcome, Accepted):
            done = partial(self._finish, attempt.outcomes)
            self._when_in_force(outcome.version, done)
            return
        current = self._agreement.current()
        present = 0 if current is None else current.version
        if not isinstance(outcome, RequestRefused):
            self._finish(refused(attempt.outcomes, f"{UNKNOWN}: {outcome.text}"))
        elif present == attempt.version:
            self._refuse(attempt, outcome.text)
        elif self._unreadable:
            self._refuse(attempt, "this node cannot read the users of the cluster")
        elif attempt.number >= ATTEMPTS_MAX:
            self._finish(refused(attempt.outcomes, OVERTAKEN))
        else:
            self._when_in_force(present, partial(self._try_again, attempt))

    def _try_again(self, attempt: Attempt) -> None:
        if self._queue.is_closed:
            self._refuse(attempt, CLOSED)
        else:
            self._try(attempt.batch, attempt.number + 1)

    def _refuse(self, attempt: Attempt, error: str) -> None:
        self._finish(refused(attempt.outcomes, f"not changed: {error}"))

    def _finish(self, outcomes: Outcomes) -> None:
        note(outcomes)
        audit(self._broker, outcomes, partial(self._reply, outcomes))

    def _reply(self, outcomes: Outcomes) -> None:
        self._queue.reply(outcomes)
        self._queue.begin()


def agreed_users(users: DynamicUsers, agreement: UserAgreement) -> DynamicUsers:
    """The users of a node that starts: the agreed ones, or those of its file. Raises
    `DynamicSecurityError` for those of a later version."""
    current = agreement.current()
    if current is None:
        return users
    logger.info("agreed_users version=%d text='dynamic_security_file is not used'", current.version)
    return with_document(users, unpack(current.data), current.version)


def _adopted(
    users: DynamicUsers, current: AgreedUsers
) -> "tuple[DynamicUsers, SecurityChanges] | int":
    """The agreed users, and how they differ from those in force, made in the thread. An int: the
    version that cannot be read."""
    try:
        document = unpack(current.data)
    except DynamicSecurityError as error:
        logger.error("agreed_users_not_understood version=%d error=%r", current.version, str(error))
        return current.version
    changes = differences(users.file.document, document)
    return with_document(users, document, current.version), changes


def _run(users: DynamicUsers, batch: list[RunCommands], number: int) -> Attempt:
    """Runs the commands of some messages, in the thread."""
    document = users.file.document.copy()
    changes = SecurityChanges()
    edit = SecurityEdit(document, changes)
    outcomes: Outcomes = []
    try:
        outcomes = [(effect, run_commands(edit, effect.payload)) for effect in batch]
        data = pack(document, USERS_BYTES_MAX) if changes.count else b""
    except DynamicSecurityError as error:
        text = f"not changed: {error}"
        return Attempt(batch, number, users.version, refused(outcomes, text), b"")
    except Exception as error:
        # A defect. Nothing has been proposed, so only these messages suffer.
        logger.exception("commands_failed error=%r", str(error))
        outcomes = [(effect, [DEFECT]) for effect in batch]
        return Attempt(batch, number, users.version, outcomes, b"")
    return Attempt(batch, number, users.version, outcomes, data)
