"""The users and roles of Mosquitto's dynamic security plugin as a password file and an ACL file.

The plugin decides which filters a client may subscribe to, Holdfast which topics it may receive. So
the filters of a role's `subscribe` rules become rights to read.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

WRITES: Final = "publishClientSend"
RECEIVES: Final = "publishClientReceive"
SUBSCRIBES: Final = ("subscribeLiteral", "subscribePattern")


class PluginRule(msgspec.Struct, rename="camel"):
    """One rule of a role."""

    acltype: str
    topic: str = ""
    priority: int = -1
    allow: bool = False


class PluginRole(msgspec.Struct):
    """A role of the plugin."""

    rolename: str
    acls: list[PluginRule] = []


class PluginRoleName(msgspec.Struct):
    """The name of a role that a user or a group has."""

    rolename: str
    priority: int = -1


class PluginName(msgspec.Struct):
    """The name of a group, or of a client in it."""

    groupname: str = ""
    username: str = ""


class PluginUser(msgspec.Struct):
    """A client of the plugin, which is a user."""

    username: str
    password: str = ""
    salt: str = ""
    iterations: int = 101
    roles: list[PluginRoleName] = []
    groups: list[PluginName] = []
    disabled: bool = False


class PluginGroup(msgspec.Struct):
    """A group of users with the same roles."""

    groupname: str
    roles: list[PluginRoleName] = []
    clients: list[PluginName] = []


class PluginDefaults(msgspec.Struct):
    """The rights of a client without a rule."""

    publishClientSend: bool = False
    publishClientReceive: bool = True
    subscribe: bool = False


class PluginFile(msgspec.Struct, rename="camel"):
    """The plugin's file."""

    clients: list[PluginUser] = []
    groups: list[PluginGroup] = []
    roles: list[PluginRole] = []
    anonymous_group: str = ""
    default_acl_access: PluginDefaults = msgspec.field(
        default_factory=PluginDefaults, name="defaultACLAccess"
    )


@dataclass
class DynamicSecurity:
    """The lines of both files, and what could not be carried over."""

    passwords: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_dynamic_security(path: Path) -> DynamicSecurity:
    """Read the plugin's file. Raises `OSError`, and `ValueError` with the reason."""
    try:
        document = msgspec.json.decode(path.read_bytes(), type=PluginFile)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    found = DynamicSecurity()
    roles = {role.rolename: role for role in document.roles}
    groups = {group.groupname: group for group in document.groups}
    defaults = document.default_acl_access
    if document.anonymous_group in groups:
        found.rules += _rules(groups[document.anonymous_group].roles, roles, defaults, found, "")
    elif document.anonymous_group:
        found.notes.append(f"{path}: there is no group {document.anonymous_group}")
    for user in document.clients:
        if user.disabled or not user.password:
            reason = "is disabled" if user.disabled else "has no password"
            found.notes.append(f"{path}: user {user.username} {reason}, and is left out")
            continue
        found.passwords.append(f"{user.username}:$7${user.iterations}${user.salt}${user.password}")
        names = list(user.roles)
        for group in document.groups:
            if group.groupname in {each.groupname for each in user.groups} or any(
                each.username == user.username for each in group.clients
            ):
                names += group.roles
        found.rules.append(f"user {user.username}")
        found.rules += _rules(names, roles, defaults, found, user.username)
    return found


def _rules(
    names: list[PluginRoleName],
    roles: dict[str, PluginRole],
    defaults: PluginDefaults,
    found: DynamicSecurity,
    username: str,
) -> list[str]:
    lines: dict[str, None] = {}
    if defaults.publishClientSend:
        lines["topic write #"] = None
    if defaults.publishClientReceive and defaults.subscribe:
        lines["topic read #"] = None
    for name in names:
        role = roles.get(name.rolename, PluginRole(name.rolename))
        lines |= dict.fromkeys(_rules_of(role, defaults, found, username))
    return list(lines)


def _rules_of(
    role: PluginRole, defaults: PluginDefaults, found: DynamicSecurity, username: str
) -> Iterator[str]:
    reads = SUBSCRIBES if defaults.publishClientReceive else (RECEIVES,)
    for rule in role.acls:
        topic = rule.topic.replace("%u", username)
        if rule.acltype == WRITES:
            access = "write"
        elif rule.acltype in reads:
            access = "read"
        else:
            continue
        if not rule.allow or "%c" in topic or topic.startswith("$CONTROL/"):
            note = (
                f"role {role.rolename}: {json.dumps(rule.topic)} ({rule.acltype},"
                f" {'allow' if rule.allow else 'deny'}) is not carried over"
            )
            if note not in found.notes and not topic.startswith("$CONTROL/"):
                found.notes.append(note)
            continue
        yield f"topic {access} {topic}"
