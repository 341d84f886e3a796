"""Runs commands of dynamic security in a thread and applies the result.

Invariants
- A command is answered after its change is on disk and in force: no client has rights, or keeps a
  connection, that the change has taken. Its audit record is committed then, or could not be.
- Commands count in the order in which they arrived. Those that arrive during a write share the
  next one.
"""

import logging
from collections import deque
from functools import partial
from typing import Final

from msgspec import Struct

from holdfast.io.event_loop.broker import Broker
from holdfast.io.event_loop.commands.queue import CommandQueue
from holdfast.io.event_loop.commands.thread import CommandThread
from holdfast.io.event_loop.commands.user_changes import (
    DEFECT,
    Outcomes,
    audit,
    note,
    put_in_force,
    refused,
)
from holdfast.node.effects import RunCommands
from holdfast.node.publish.control import CommandPort
from holdfast.security.dynamic.commands import run_commands
from holdfast.security.dynamic.document import DynamicSecurityError
from holdfast.security.dynamic.edit import SecurityChanges, SecurityEdit
from holdfast.security.dynamic.users import DynamicUsers

logger = logging.getLogger("holdfast")

STAMPS_MAX: Final = 1000
"""The most stamps of written files that are remembered."""


class FinishedCommands(Struct, frozen=True):
    """The outcomes of the commands of some messages. `users`: those in force from now on; None: as
    before."""

    outcomes: Outcomes
    users: DynamicUsers | None
    changes: SecurityChanges


class CommandRunner(CommandPort):
    """The commands of the clients of one broker."""

    def __init__(self, broker: Broker, users: DynamicUsers) -> None:
        self.users = users
        self._broker = broker
        self._thread = CommandThread(broker)
        self._queue = CommandQueue(broker, self._start)
        self._replacement: DynamicUsers | None = None
        self._stamps = deque((users.file.stamp,), STAMPS_MAX)

    def run(self, effect: RunCommands) -> None:
        self._queue.append(effect)

    def close(self) -> None:
        self._thread.close()
        self._queue.close()

    def replace(self, users: DynamicUsers) -> None:
        """Uses the users of a reload, which are in force already. If the file that it has read is
        an older one of this runner, its changes since then stay."""
        if self._queue.is_busy:
            self._replacement = users
        else:
            self._adopt(users)

    def _adopt(self, users: DynamicUsers) -> None:
        if users.file.stamp in self._stamps and users.file.stamp != self.users.file.stamp:
            # Commands have changed the file since the reload read it.
            users = DynamicUsers.of(self.users.file, users.password_file, users.acl_file)
            changes = SecurityChanges()
            changes.are_for_all = True
            self._queue.is_busy = True
            self._put_in_force(FinishedCommands([], users, changes))
            return
        self._use(users)

    def _use(self, users: DynamicUsers) -> None:
        self.users = users
        if users.file.stamp not in self._stamps:
            self._stamps.append(users.file.stamp)

    def _start(self, batch: list[RunCommands]) -> None:
        self._thread(partial(_run, self.users, batch), self._finish)

    def _finish(self, finished: FinishedCommands) -> None:
        note(finished.outcomes)
        if finished.users is None or self._queue.is_closed:
            self._respond(finished)
        else:
            self._put_in_force(finished)

    def _put_in_force(self, finished: FinishedCommands) -> None:
        assert finished.users is not None
        self._use(finished.users)
        put_in_force(
            self._broker, finished.users, finished.changes, partial(self._respond, finished)
        )

    def _respond(self, finished: FinishedCommands) -> None:
        audit(self._broker, finished.outcomes, partial(self._reply, finished))

    def _reply(self, finished: FinishedCommands) -> None:
        self._queue.reply(finished.outcomes)
        replacement, self._replacement = self._replacement, None
        if replacement is not None and not self._queue.is_closed:
            self._adopt(replacement)
        self._queue.begin()


def _run(users: DynamicUsers, batch: list[RunCommands]) -> FinishedCommands:
    """Runs the commands of some messages, in the thread."""
    document = users.file.document.copy()
    changes = SecurityChanges()
    edit = SecurityEdit(document, changes)
    try:
        outcomes = [(effect, run_commands(edit, effect.payload)) for effect in batch]
    except Exception as error:
        # A defect. Nothing has been written, so only these messages suffer.
        logger.exception("commands_failed error=%r", str(error))
        return FinishedCommands([(effect, [DEFECT]) for effect in batch], None, SecurityChanges())
    if not changes.count:
        return FinishedCommands(outcomes, None, changes)
    try:
        file = users.file.replaced(document)
    except DynamicSecurityError as error:
        logger.error("security_not_written error=%r", str(error))
        text = f"not changed: {error}"
        return FinishedCommands(refused(outcomes, text), None, changes)
    return FinishedCommands(outcomes, users.changed(file, changes.users), changes)
