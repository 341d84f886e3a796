"""The run of the commands of dynamic security, in a thread, and their entry into force.

Invariants
- A command is answered after its change is on disk and in force: no client has rights, or keeps a
  connection, that the change has taken. Its audit record is committed then, or could not be.
- Commands count in the order in which they arrived. Those that arrive during a write share the
  next one.
"""

import logging
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from holdfast.broker.connections.reauthorize import UserDeparture
from holdfast.broker.effects import RunCommands
from holdfast.broker.publish.control import CommandPort, finish_commands
from holdfast.broker.rights import replace_rules
from holdfast.broker.session.connection import Connection
from holdfast.security.dynamic.commands import (
    CommandOutcome,
    SecurityChange,
    encode_responses,
    run_commands,
)
from holdfast.security.dynamic.document import DynamicSecurityError
from holdfast.security.dynamic.edit import SecurityChanges, SecurityEdit
from holdfast.security.dynamic.users import DynamicUsers
from holdfast.server.event_loop.broker import Broker

logger = logging.getLogger("holdfast")

TOGETHER_MAX: Final = 100
"""The most messages whose commands share one write of the file."""
STAMPS_MAX: Final = 1000
"""The most stamps of written files that are remembered."""


@dataclass(frozen=True)
class FinishedCommands:
    """The outcomes of the commands of some messages. `users`: those in force from now on; None: as
    before."""

    outcomes: list[tuple[RunCommands, list[CommandOutcome]]]
    users: DynamicUsers | None
    changes: SecurityChanges


class CommandRunner(CommandPort):
    """The commands of the clients of one broker."""

    def __init__(self, broker: Broker, users: DynamicUsers) -> None:
        self.users = users
        self._broker = broker
        self._thread = ThreadPoolExecutor(1, "commands")
        # As many as there are connections, because each has one message under way at most.
        self._waiting: deque[RunCommands] = deque()
        self._is_busy = False
        self._is_closed = False
        self._replacement: DynamicUsers | None = None
        self._stamps = deque((users.file.stamp,), STAMPS_MAX)

    def run(self, effect: RunCommands) -> None:
        self._waiting.append(effect)
        self._begin()

    def close(self) -> None:
        self._is_closed = True
        self._thread.shutdown(wait=False)
        while self._waiting:
            finish_commands(self._broker.node.state, self._waiting.popleft(), b"")

    def replace(self, users: DynamicUsers) -> None:
        """Use the users of a reload, which are in force already. If the file that it has read is an
        older one of this runner, its changes since then stay."""
        if self._is_busy:
            self._replacement = users
        else:
            self._adopt(users)

    def _adopt(self, users: DynamicUsers) -> None:
        if users.file.stamp in self._stamps and users.file.stamp != self.users.file.stamp:
            # Commands have changed the file since the reload read it.
            users = DynamicUsers.of(self.users.file, users.password_file, users.acl_file)
            changes = SecurityChanges()
            changes.are_for_all = True
            self._is_busy = True
            self._put_in_force(FinishedCommands([], users, changes))
            return
        self._use(users)

    def _use(self, users: DynamicUsers) -> None:
        self.users = users
        if users.file.stamp not in self._stamps:
            self._stamps.append(users.file.stamp)

    def _begin(self) -> None:
        if self._is_busy or not self._waiting:
            return
        self._is_busy = True
        batch = [self._waiting.popleft() for _ in range(min(TOGETHER_MAX, len(self._waiting)))]
        future = self._thread.submit(_run, self.users, batch)
        future.add_done_callback(partial(self._arrived, batch))

    def _arrived(self, batch: list[RunCommands], done: "Future[FinishedCommands]") -> None:
        """Pass the result to the loop. Runs in the thread."""
        if not done.cancelled():
            self._broker.loop.call_soon_threadsafe(self._finish, batch, done)

    def _finish(self, batch: list[RunCommands], done: "Future[FinishedCommands]") -> None:
        self._broker.touch()
        error = done.exception()
        if error is not None:
            # A defect. The commands may be on disk, so the next write must not undo them.
            self._broker.fail("commands_failed", error)
            return
        finished = done.result()
        for effect, outcomes in finished.outcomes:
            for each in outcomes:
                _note(effect.connection, each)
        if finished.users is None or self._is_closed:
            self._respond(finished)
        else:
            self._put_in_force(finished)

    def _put_in_force(self, finished: FinishedCommands) -> None:
        users, changes, broker = finished.users, finished.changes, self._broker
        assert users is not None
        self._use(users)
        state = broker.node.state
        broker.passwords.file = users.passwords
        state.admission.disabled_users = users.disabled
        state.admission.client_ids = users.client_ids
        replace_rules(
            state,
            users.rules,
            state.sessions.values(),
            None if changes.are_for_all else frozenset(changes.users),
            partial(self._expel, finished),
        )

    def _expel(self, finished: FinishedCommands) -> None:
        expelled = finished.changes.expelled
        if expelled:
            done = partial(self._respond, finished)
            state = self._broker.node.state
            state.start_work(UserDeparture(state, frozenset(expelled), done))
        else:
            self._respond(finished)

    def _respond(self, finished: FinishedCommands) -> None:
        changes = [
            _change(effect.connection, each)
            for effect, outcomes in finished.outcomes
            for each in outcomes
            if each.is_change
        ]
        record = self._broker.record_changes
        if record is None or not changes:
            self._reply(finished)
        else:
            record(changes, partial(self._reply, finished))

    def _reply(self, finished: FinishedCommands) -> None:
        self._broker.touch()
        for effect, outcomes in finished.outcomes:
            finish_commands(self._broker.node.state, effect, encode_responses(outcomes))
        self._is_busy = False
        replacement, self._replacement = self._replacement, None
        if self._is_closed:
            return
        if replacement is not None:
            self._adopt(replacement)
        self._begin()


def _run(users: DynamicUsers, batch: list[RunCommands]) -> FinishedCommands:
    """Run the commands of some messages, in the thread."""
    document = users.file.document.copy()
    changes = SecurityChanges()
    edit = SecurityEdit(document, changes)
    try:
        outcomes = [(effect, run_commands(edit, effect.payload)) for effect in batch]
    except Exception as error:
        # A defect. Nothing has been written, so only these messages suffer.
        logger.exception("commands_failed error=%r", str(error))
        return FinishedCommands([(effect, [_DEFECT]) for effect in batch], None, SecurityChanges())
    if not changes.count:
        return FinishedCommands(outcomes, None, changes)
    try:
        file = users.file.replaced(document)
    except DynamicSecurityError as error:
        logger.error("security_not_written error=%r", str(error))
        text = f"not changed: {error}"
        failed = [(effect, [_failed(each, text) for each in found]) for effect, found in outcomes]
        return FinishedCommands(failed, None, changes)
    return FinishedCommands(outcomes, users.changed(file, changes.users), changes)


_DEFECT: Final = CommandOutcome({"command": "Unknown command", "error": "internal error"})


def _failed(outcome: CommandOutcome, error: str) -> CommandOutcome:
    """The outcome of a command whose change could not be written. What the others of its message
    read may be of that change, so it is not shown."""
    response = {key: value for key, value in outcome.response.items() if key != "data"}
    response["error"] = outcome.error or error
    return replace(outcome, response=response, after=None)


def _change(connection: Connection, outcome: CommandOutcome) -> SecurityChange:
    names = (connection.client_id, connection.username or "")
    return SecurityChange(*names, connection.remote, outcome)


def _note(connection: Connection, outcome: CommandOutcome) -> None:
    if outcome.is_change:
        logger.info(
            "security_command client=%r user=%r remote=%r command=%r name=%r error=%r",
            connection.client_id,
            connection.username or "",
            connection.remote,
            outcome.name,
            outcome.target,
            outcome.error,
        )
