"""Applies the commands of Mosquitto's dynamic security to a document.

A message is `{"commands": [{"command": NAME, ...}, ...]}`, and its response `{"responses":
[{"command": NAME, "data" or "error": ..., "correlationData": ...}, ...]}`. The names, the keys and
the error texts are those of Mosquitto 2.0. A command that fails changes nothing, and the others of
its message still count.

The audit shows the state that a command changes. A password is "set", "none" or "changed". A
command about several things shows the one that it changes: `addGroupClient` shows the client with
its groups, `addGroupRole` the group.
"""

from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Struct

from holdfast.security.dynamic.document import (
    ACLS_MAX,
    CLIENTS_MAX,
    GROUPS_MAX,
    NO_PRIORITY,
    ROLES_EACH_MAX,
    ROLES_MAX,
    DefaultAccess,
    DynamicSecurityError,
    SecurityDocument,
    SecurityRole,
    SecurityUser,
    UserGroup,
    acls_by_priority,
)
from holdfast.security.dynamic.edit import (
    Fields,
    Json,
    SecurityEdit,
    acl_in,
    acls_in,
    listed,
    name_in,
    new_name_in,
    priority_in,
    shown_grant,
    shown_roles,
    shown_texts,
    text_in,
    texts_in,
    with_password,
    without,
)


def _create_client(edit: SecurityEdit, command: Fields) -> None:
    document = edit.document
    name = new_name_in(command, "username", "Client", document.users, CLIENTS_MAX)
    user = SecurityUser(
        name,
        text_in(command, "clientid"),
        text_in(command, "textname") or "",
        text_in(command, "textdescription") or "",
        roles=edit.grants(command) or (),
    )
    groups = edit.groups(command) or []
    password = text_in(command, "password")
    document.users[name] = with_password(user, password) if password else user
    for groupname, priority in groups:
        document.join(name, groupname, priority)
    edit.changes.users.add(name)


def _delete_client(edit: SecurityEdit, command: Fields) -> None:
    user = edit.user(command)
    for groupname in edit.document.groups_of.get(user.username, frozenset()):
        edit.document.leave(user.username, groupname)
    del edit.document.users[user.username]
    edit.expel(user.username)


def _enable_client(edit: SecurityEdit, command: Fields) -> None:
    edit.replace_user(edit.user(command), disabled=False)


def _disable_client(edit: SecurityEdit, command: Fields) -> None:
    user = edit.user(command)
    edit.replace_user(user, disabled=True)
    edit.expel(user.username)


def _modify_client(edit: SecurityEdit, command: Fields) -> None:
    user = edit.user(command)
    replace = msgspec.structs.replace
    changed = user
    if "clientid" in command:
        changed = replace(changed, clientid=text_in(command, "clientid"))
    changed = replace(changed, **texts_in(command))
    roles, groups = edit.grants(command), edit.groups(command)
    if roles is not None:
        changed = replace(changed, roles=roles)
    password = text_in(command, "password")
    if password:
        changed = with_password(changed, password)
    name = user.username
    edit.document.users[name] = changed
    if groups is not None:
        for groupname in edit.document.groups_of.get(name, frozenset()):
            edit.document.leave(name, groupname)
        for groupname, priority in groups:
            edit.document.join(name, groupname, priority)
    edit.changes.users.add(name)
    if password or changed.clientid != user.clientid:
        edit.expel(name)


def _set_client_id(edit: SecurityEdit, command: Fields) -> None:
    user = edit.user(command)
    edit.replace_user(user, clientid=text_in(command, "clientid"))
    edit.expel(user.username)


def _set_client_password(edit: SecurityEdit, command: Fields) -> None:
    user = edit.user(command)
    password = command.get("password")
    if not isinstance(password, str):
        raise DynamicSecurityError("Invalid/missing password")
    if not password:
        raise DynamicSecurityError("Empty password is not allowed")
    edit.document.users[user.username] = with_password(user, password)
    edit.expel(user.username)


def _add_client_role(edit: SecurityEdit, command: Fields) -> None:
    user = edit.user(command)
    edit.replace_user(user, roles=edit.with_grant(user.roles, command, "Client"))


def _remove_client_role(edit: SecurityEdit, command: Fields) -> None:
    user = edit.user(command)
    edit.replace_user(user, roles=edit.without_grant(user.roles, command))


def _get_client(edit: SecurityEdit, command: Fields) -> Json:
    return {"client": _shown_user(edit, edit.user(command))}


def _list_clients(edit: SecurityEdit, command: Fields) -> Json:
    users = edit.document.users
    return listed(command, "clients", users, lambda name: _shown_user(edit, users[name]))


def _shown_user(edit: SecurityEdit, user: SecurityUser) -> Json:
    shown: Fields = {"username": user.username}
    if user.clientid is not None:
        shown["clientid"] = user.clientid
    shown |= shown_texts(user)
    if user.disabled:
        shown["disabled"] = True
    groups = edit.document.groups_by_priority(user.username)
    shown["roles"] = shown_roles(user)
    shown["groups"] = [shown_grant("groupname", *each) for each in groups]
    return shown


CLIENT_COMMANDS: Final[dict[str, Callable[[SecurityEdit, Fields], Json]]] = {
    "createClient": _create_client,
    "deleteClient": _delete_client,
    "enableClient": _enable_client,
    "disableClient": _disable_client,
    "modifyClient": _modify_client,
    "setClientId": _set_client_id,
    "setClientPassword": _set_client_password,
    "addClientRole": _add_client_role,
    "removeClientRole": _remove_client_role,
    "getClient": _get_client,
    "listClients": _list_clients,
}


def _create_group(edit: SecurityEdit, command: Fields) -> None:
    document = edit.document
    name = new_name_in(command, "groupname", "Group", document.groups, GROUPS_MAX)
    roles = edit.grants(command) or ()
    clients = edit.members(command) or []
    document.groups[name] = msgspec.structs.replace(
        UserGroup(name, roles=roles), **texts_in(command)
    )
    for member in clients:
        document.join(member.username, name, member.priority)
        edit.changes.users.add(member.username)


def _delete_group(edit: SecurityEdit, command: Fields) -> None:
    group = edit.group(command)
    if group.groupname == edit.document.anonymous_group:
        raise DynamicSecurityError("Deleting the anonymousGroup is forbidden")
    edit.change_members(group)
    for username in group.members:
        edit.document.leave(username, group.groupname)
    del edit.document.groups[group.groupname]


def _modify_group(edit: SecurityEdit, command: Fields) -> None:
    group = edit.group(command)
    roles, clients = edit.grants(command), edit.members(command)
    changed = msgspec.structs.replace(group, **texts_in(command))
    if roles is not None:
        changed = msgspec.structs.replace(changed, roles=roles)
    edit.document.groups[group.groupname] = changed
    edit.change_members(group)
    if clients is not None:
        for username in group.members:
            edit.document.leave(username, group.groupname)
        for member in clients:
            edit.document.join(member.username, group.groupname, member.priority)
            edit.changes.users.add(member.username)


def _add_group_client(edit: SecurityEdit, command: Fields) -> None:
    user, group = edit.user(command), edit.group(command)
    if user.username in group.members:
        raise DynamicSecurityError("Client is already in this group")
    if len(edit.document.groups_of.get(user.username, frozenset())) >= ROLES_EACH_MAX:
        raise DynamicSecurityError(f"a client is in at most {ROLES_EACH_MAX} groups")
    edit.document.join(user.username, group.groupname, priority_in(command, NO_PRIORITY))
    edit.changes.users.add(user.username)


def _remove_group_client(edit: SecurityEdit, command: Fields) -> None:
    user, group = edit.user(command), edit.group(command)
    edit.document.leave(user.username, group.groupname)
    edit.changes.users.add(user.username)


def _add_group_role(edit: SecurityEdit, command: Fields) -> None:
    group = edit.group(command)
    edit.replace_grants(group, edit.with_grant(group.roles, command, "Group"))


def _remove_group_role(edit: SecurityEdit, command: Fields) -> None:
    group = edit.group(command)
    edit.replace_grants(group, edit.without_grant(group.roles, command))


def _get_group(edit: SecurityEdit, command: Fields) -> Json:
    return {"group": _shown_group(edit.group(command))}


def _list_groups(edit: SecurityEdit, command: Fields) -> Json:
    groups = edit.document.groups
    return listed(command, "groups", groups, lambda name: _shown_group(groups[name]))


def _set_anonymous_group(edit: SecurityEdit, command: Fields) -> None:
    edit.document.anonymous_group = edit.group(command).groupname
    edit.changes.are_for_all = True


def _get_anonymous_group(edit: SecurityEdit, command: Fields) -> Json:
    return {"group": {"groupname": edit.document.anonymous_group}}


def _shown_group(group: UserGroup) -> Json:
    shown: Fields = {"groupname": group.groupname}
    shown |= shown_texts(group)
    shown["clients"] = [{"username": name} for name in sorted(group.members)]
    shown["roles"] = shown_roles(group)
    return shown


GROUP_COMMANDS: Final[dict[str, Callable[[SecurityEdit, Fields], Json]]] = {
    "createGroup": _create_group,
    "deleteGroup": _delete_group,
    "modifyGroup": _modify_group,
    "addGroupClient": _add_group_client,
    "removeGroupClient": _remove_group_client,
    "addGroupRole": _add_group_role,
    "removeGroupRole": _remove_group_role,
    "getGroup": _get_group,
    "listGroups": _list_groups,
    "setAnonymousGroup": _set_anonymous_group,
    "getAnonymousGroup": _get_anonymous_group,
}


def _create_role(edit: SecurityEdit, command: Fields) -> None:
    roles = edit.document.roles
    name = new_name_in(command, "rolename", "Role", roles, ROLES_MAX)
    roles[name] = SecurityRole(name, **texts_in(command), acls=acls_in(command) or ())


def _delete_role(edit: SecurityEdit, command: Fields) -> None:
    document, name = edit.document, edit.role(command).rolename
    replace = msgspec.structs.replace
    for username, user in document.users.items():
        if any(each.rolename == name for each in user.roles):
            document.users[username] = replace(user, roles=without(user.roles, name))
    for groupname, group in document.groups.items():
        if any(each.rolename == name for each in group.roles):
            document.groups[groupname] = replace(group, roles=without(group.roles, name))
    del document.roles[name]
    edit.changes.are_for_all = True


def _modify_role(edit: SecurityEdit, command: Fields) -> None:
    name = name_in(command, "rolename")
    role = edit.document.roles.get(name)
    if role is None:
        raise DynamicSecurityError("Role does not exist")
    acls = acls_in(command)
    changed = msgspec.structs.replace(role, **texts_in(command))
    edit.replace_acls(changed, changed.acls if acls is None else acls)


def _add_role_acl(edit: SecurityEdit, command: Fields) -> None:
    role = edit.role(command)
    acl = acl_in(command)
    if any((each.acltype, each.topic) == (acl.acltype, acl.topic) for each in role.acls):
        raise DynamicSecurityError("ACL with this topic already exists")
    if len(role.acls) >= ACLS_MAX:
        raise DynamicSecurityError(f"a role has at most {ACLS_MAX} rules")
    edit.replace_acls(role, acls_by_priority([*role.acls, acl]))


def _remove_role_acl(edit: SecurityEdit, command: Fields) -> None:
    role = edit.role(command)
    acl = acl_in(command)
    left = tuple(
        each for each in role.acls if (each.acltype, each.topic) != (acl.acltype, acl.topic)
    )
    if len(left) == len(role.acls):
        raise DynamicSecurityError("ACL not found")
    edit.replace_acls(role, left)


def _get_role(edit: SecurityEdit, command: Fields) -> Json:
    return {"role": _shown_role(edit.role(command))}


def _list_roles(edit: SecurityEdit, command: Fields) -> Json:
    roles = edit.document.roles
    return listed(command, "roles", roles, lambda name: _shown_role(roles[name]))


def _set_default_access(edit: SecurityEdit, command: Fields) -> None:
    acls = command.get("acls")
    if not isinstance(acls, list):
        raise DynamicSecurityError("Missing/invalid actions array")
    found: dict[str, bool] = {}
    for each in acls:
        kind = each.get("acltype") if isinstance(each, dict) else None
        allow = each.get("allow") if isinstance(each, dict) else None
        if isinstance(kind, str) and kind in DEFAULTS and isinstance(allow, bool):
            found[kind] = allow
    edit.document.defaults = msgspec.structs.replace(edit.document.defaults, **found)
    edit.changes.are_for_all = True


def _get_default_access(edit: SecurityEdit, command: Fields) -> Json:
    defaults = edit.document.defaults
    return {"acls": [{"acltype": kind, "allow": getattr(defaults, kind)} for kind in DEFAULTS]}


def _shown_role(role: SecurityRole) -> Json:
    shown: Fields = {"rolename": role.rolename}
    shown |= shown_texts(role)
    shown["acls"] = [msgspec.structs.asdict(each) for each in role.acls]
    return shown


DEFAULTS: Final = tuple(field.name for field in msgspec.structs.fields(DefaultAccess))
"""The kinds of access that have a default."""
ROLE_COMMANDS: Final[dict[str, Callable[[SecurityEdit, Fields], Json]]] = {
    "createRole": _create_role,
    "deleteRole": _delete_role,
    "modifyRole": _modify_role,
    "addRoleACL": _add_role_acl,
    "removeRoleACL": _remove_role_acl,
    "getRole": _get_role,
    "listRoles": _list_roles,
    "setDefaultACLAccess": _set_default_access,
    "getDefaultACLAccess": _get_default_access,
}


MEMBERS_MAX: Final = 100
"""The most members of a group that are shown by name. Of more, only their number is shown."""


class NamedState:
    """The state of what a command names at one moment. The entries are never changed, so the state
    of before stays."""

    def __init__(self, document: SecurityDocument, command: Fields) -> None:
        self._user: SecurityUser | None = None
        self.shown: Fields | None = None
        """None: the document does not have it."""
        name = command.get("username")
        if name is not None:
            if isinstance(name, str):
                self._user = document.users.get(name)
            if self._user is not None:
                self.shown = _audited_user(document, self._user)
        elif command.get("command") == "setAnonymousGroup":
            self.shown = {"anonymousGroup": document.anonymous_group}
        elif command.get("command") == "setDefaultACLAccess":
            self.shown = msgspec.to_builtins(document.defaults)
        elif "groupname" in command:
            self.shown = _audited_group(document, command["groupname"])
        else:
            name = command.get("rolename")
            role = document.roles.get(name) if isinstance(name, str) else None
            self.shown = None if role is None else msgspec.to_builtins(role)

    def mark_password(self, before: "NamedState") -> None:
        """Shows that the password is another one than before."""
        old, new = before._user, self._user
        if old is None or new is None or self.shown is None:
            return
        if (old.password, old.salt) != (new.password, new.salt):
            self.shown["password"] = "changed"


def _audited_user(document: SecurityDocument, user: SecurityUser) -> Fields:
    plain = msgspec.structs.replace(user, password="", salt="", iterations=0)
    shown: Fields = msgspec.to_builtins(plain)
    shown["password"] = "set" if user.password else "none"
    groups = document.groups_by_priority(user.username)
    if groups:
        shown["groups"] = [name for name, _ in groups]
    return shown


def _audited_group(document: SecurityDocument, name: object) -> Fields | None:
    group = document.groups.get(name) if isinstance(name, str) else None
    if group is None:
        return None
    shown: Fields = msgspec.to_builtins(msgspec.structs.replace(group, members={}))
    members = group.members
    names: list[Json] = [*sorted(members)]
    shown["members"] = len(names) if len(names) > MEMBERS_MAX else names
    return shown


COMMANDS_MAX: Final = 1000
"""The most commands of a message."""
RESPONSE_BYTES_MAX: Final = 4 << 20
"""The most bytes of the response to one command."""
COMMANDS: Final = CLIENT_COMMANDS | GROUP_COMMANDS | ROLE_COMMANDS
"""The commands by name."""
UNKNOWN: Final = "Unknown command"


class CommandOutcome(Struct, frozen=True):
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


class SecurityChange(Struct, frozen=True):
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
