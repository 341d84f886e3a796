"""Dynamic security commands about groups."""

from collections.abc import Callable
from typing import Final

import msgspec

from holdfast.security.dynamic.document import (
    GROUPS_MAX,
    NO_PRIORITY,
    ROLES_EACH_MAX,
    DynamicSecurityError,
    UserGroup,
)
from holdfast.security.dynamic.edit import SecurityEdit
from holdfast.security.dynamic.fields import (
    Fields,
    Json,
    listed,
    new_name_in,
    priority_in,
    shown_roles,
    shown_texts,
    texts_in,
)


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
