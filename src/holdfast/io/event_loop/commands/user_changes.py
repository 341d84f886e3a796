"""Changed users of dynamic security: their entry into force, their audit, their log lines."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec.structs import replace

from holdfast.io.event_loop.broker import Broker
from holdfast.node.connections.reauthorize import UserDeparture
from holdfast.node.effects import RunCommands
from holdfast.node.rights import replace_rules
from holdfast.node.session.connection import Connection
from holdfast.security.dynamic.commands import CommandOutcome, SecurityChange
from holdfast.security.dynamic.edit import SecurityChanges
from holdfast.security.dynamic.users import DynamicUsers

logger = logging.getLogger("holdfast")

Outcomes = list[tuple[RunCommands, list[CommandOutcome]]]
"""The outcomes of the commands of some messages."""
DEFECT: Final = CommandOutcome({"command": "Unknown command", "error": "internal error"})


def put_in_force(
    broker: Broker, users: DynamicUsers, changes: SecurityChanges, done: Callable[[], None]
) -> None:
    """Authenticates clients by these users from now on, gives connected clients their rights, and
    closes the connections of those that have to connect again. `done` is called after the last."""
    state = broker.node.state
    broker.passwords.file = users.passwords
    state.admission.disabled_users = users.disabled
    state.admission.client_ids = users.client_ids
    replace_rules(
        state,
        users.rules,
        broker.runtime.cluster_node.replicated.all_sessions(),
        None if changes.are_for_all else frozenset(changes.users),
        partial(_expel, broker, frozenset(changes.expelled), done),
    )


def _expel(broker: Broker, usernames: frozenset[str], done: Callable[[], None]) -> None:
    if usernames:
        state = broker.node.state
        state.start_work(UserDeparture(state, usernames, done))
    else:
        done()


def audit(broker: Broker, outcomes: Outcomes, done: Callable[[], None]) -> None:
    """Puts the changes into the audit, if there is one, then calls `done`."""
    changes = [
        _change(effect.connection, each)
        for effect, found in outcomes
        for each in found
        if each.is_change
    ]
    record = broker.record_changes
    if record is None or not changes:
        done()
    else:
        record(changes, done)


def note(outcomes: Outcomes) -> None:
    """Logs the changes, one line for each."""
    for effect, found in outcomes:
        for each in found:
            if each.is_change:
                logger.info(
                    "security_command client=%r user=%r remote=%r command=%r name=%r error=%r",
                    effect.connection.client_id,
                    effect.connection.username or "",
                    effect.connection.remote,
                    each.name,
                    each.target,
                    each.error,
                )


def refused(outcomes: Outcomes, error: str) -> Outcomes:
    """The outcomes of commands whose change was not made. What the others of their message read may
    be of that change, so it is not shown."""
    return [(effect, [_refused(each, error) for each in found]) for effect, found in outcomes]


def _refused(outcome: CommandOutcome, error: str) -> CommandOutcome:
    response = {key: value for key, value in outcome.response.items() if key != "data"}
    response["error"] = outcome.error or error
    return replace(outcome, response=response, after=None)


def _change(connection: Connection, outcome: CommandOutcome) -> SecurityChange:
    names = (connection.client_id, connection.username or "")
    return SecurityChange(*names, connection.remote, outcome)
