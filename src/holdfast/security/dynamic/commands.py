"""Applies the commands of Mosquitto's dynamic security to a document.

A message is `{"commands": [{"command": NAME, ...}, ...]}`, and its response `{"responses":
[{"command": NAME, "data" or "error": ..., "correlationData": ...}, ...]}`. The names, the keys and
the error texts are those of Mosquitto 2.0. A command that fails changes nothing, and the others of
its message still count.
"""

from dataclasses import dataclass
from typing import Final

import msgspec

from holdfast.security.dynamic.client_commands import CLIENT_COMMANDS
from holdfast.security.dynamic.document import DynamicSecurityError
from holdfast.security.dynamic.edit import SecurityEdit
from holdfast.security.dynamic.fields import Fields, Json
from holdfast.security.dynamic.group_commands import GROUP_COMMANDS
from holdfast.security.dynamic.role_commands import ROLE_COMMANDS
from holdfast.security.dynamic.shown_state import NamedState

COMMANDS_MAX: Final = 1000
"""The most commands of a message."""
RESPONSE_BYTES_MAX: Final = 4 << 20
"""The most bytes of the response to one command."""
COMMANDS: Final = CLIENT_COMMANDS | GROUP_COMMANDS | ROLE_COMMANDS
"""The commands by name."""
UNKNOWN: Final = "Unknown command"


@dataclass(frozen=True)
class CommandOutcome:
    """The response to one command. `is_change`: it was to change something; `target`: whose;
    `before` and `after`: its state, without passwords."""

    response: Fields
    is_change: bool = False
    target: str = ""
    before: Fields | None = None
    after: Fields | None = None

    @property
    def name(self) -> str:
        """The name of the command."""
        return str(self.response["command"])

    @property
    def error(self) -> str:
        """The reason of a failure, or ""."""
        return str(self.response.get("error", ""))


@dataclass(frozen=True)
class SecurityChange:
    """A command that was to change users, groups or roles, for the audit."""

    client_id: str
    username: str
    remote: str
    outcome: CommandOutcome


def run_commands(edit: SecurityEdit, payload: bytes) -> list[CommandOutcome]:
    """Runs the commands of a message in their order."""
    try:
        message = msgspec.json.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return [_failed("Payload not valid JSON")]
    commands = message.get("commands") if isinstance(message, dict) else None
    if not isinstance(commands, list):
        return [_failed("Invalid/missing commands")]
    if len(commands) > COMMANDS_MAX:
        return [_failed(f"a message has at most {COMMANDS_MAX} commands")]
    return [_run(edit, each) for each in commands]


def encode_responses(outcomes: list[CommandOutcome]) -> bytes:
    """The message with the responses."""
    return msgspec.json.encode({"responses": [each.response for each in outcomes]})


def _failed(error: str) -> CommandOutcome:
    return CommandOutcome({"command": UNKNOWN, "error": error})


def _run(edit: SecurityEdit, command: Json) -> CommandOutcome:
    if not isinstance(command, dict):
        return _failed("Command not an object")
    name = command.get("command")
    if not isinstance(name, str):
        return _failed("Missing command")
    response: Fields = {"command": name[:100]}
    run = COMMANDS.get(name)
    is_change = run is not None and not name.startswith(("get", "list"))
    before = NamedState(edit.document, command) if is_change else None
    after: Fields | None = None
    try:
        if run is None:
            raise DynamicSecurityError(UNKNOWN)
        data = run(edit, command)
        if data is not None:
            if len(msgspec.json.encode(data)) > RESPONSE_BYTES_MAX:
                raise DynamicSecurityError("the list is too long: use count and offset")
            response["data"] = data
        if before is not None:
            edit.changes.count += 1
            state = NamedState(edit.document, command)
            state.mark_password(before)
            after = state.shown
    except DynamicSecurityError as failure:
        response["error"] = str(failure)
    if isinstance(command.get("correlationData"), str):
        response["correlationData"] = command["correlationData"]
    shown = None if before is None else before.shown
    return CommandOutcome(response, is_change, _target_of(command), shown, after)


def _target_of(command: Fields) -> str:
    names = [command.get(key) for key in ("username", "groupname", "rolename")]
    return " ".join(name[:100] for name in names if isinstance(name, str))
